//! A second opinion on JSON Schema: says whether a document is valid, for the keywords that are enforced.

use regex::Regex;
use serde_json::{Map, Value};

/// True if a document is valid against a schema.
pub fn is_valid(root: &Value, schema: &Value, document: &Value) -> bool {
    let Value::Object(keywords) = schema else { return schema != &Value::Bool(false) };
    let valid = |schema: &Value, document: &Value| is_valid(root, schema, document);
    let all = |schemas: &Value, wanted: &dyn Fn(usize) -> bool| {
        wanted(schemas.as_array().unwrap().iter().filter(|schema| valid(schema, document)).count())
    };
    keywords.iter().all(|(keyword, value)| match keyword.as_str() {
        "$ref" => valid(resolve(root, value.as_str().unwrap()), document),
        "type" => match value {
            Value::Array(kinds) => kinds.iter().any(|kind| has_type(document, kind.as_str().unwrap())),
            kind => has_type(document, kind.as_str().unwrap()),
        },
        "const" => same(value, document),
        "enum" => value.as_array().unwrap().iter().any(|value| same(value, document)),
        "allOf" => all(value, &|count| count == value.as_array().unwrap().len()),
        "anyOf" => all(value, &|count| count > 0),
        "oneOf" => all(value, &|count| count == 1),
        _ => match document {
            Value::Object(members) => member_keyword(root, keywords, keyword, value, members),
            Value::Array(items) => item_keyword(root, keywords, keyword, value, items),
            Value::String(text) => text_keyword(keyword, value, text),
            Value::Number(number) => number_keyword(keyword, value, number.as_f64().unwrap()),
            _ => true,
        },
    })
}

fn resolve<'a>(root: &'a Value, reference: &str) -> &'a Value {
    root.pointer(reference.trim_start_matches('#')).unwrap()
}

fn has_type(document: &Value, kind: &str) -> bool {
    match kind {
        "null" => document.is_null(),
        "boolean" => document.is_boolean(),
        "string" => document.is_string(),
        "array" => document.is_array(),
        "object" => document.is_object(),
        "number" => document.is_number(),
        "integer" => document.as_f64().is_some_and(|number| number.fract() == 0.0),
        other => panic!("type {other}"),
    }
}

fn same(left: &Value, right: &Value) -> bool {
    match (left.as_f64(), right.as_f64()) {
        (Some(left), Some(right)) => left == right,
        _ => left == right,
    }
}

fn member_keyword(
    root: &Value,
    keywords: &Map<String, Value>,
    keyword: &str,
    value: &Value,
    members: &Map<String, Value>,
) -> bool {
    let matching = |name: &str| {
        let patterns = keywords.get("patternProperties").and_then(Value::as_object).into_iter().flatten();
        patterns
            .filter(|(pattern, _)| Regex::new(pattern).unwrap().is_match(name))
            .map(|(_, schema)| schema)
            .collect()
    };
    let known = |name: &str| keywords.get("properties").is_some_and(|known| known.get(name).is_some());
    members.iter().all(|(name, member)| match keyword {
        "properties" => value.get(name).is_none_or(|schema| is_valid(root, schema, member)),
        "patternProperties" => {
            let schemas: Vec<&Value> = matching(name);
            schemas.into_iter().all(|schema| is_valid(root, schema, member))
        }
        "additionalProperties" => known(name) || !matching(name).is_empty() || is_valid(root, value, member),
        _ => true,
    }) && match keyword {
        "required" => {
            value.as_array().unwrap().iter().all(|name| members.contains_key(name.as_str().unwrap()))
        }
        "minProperties" => members.len() as u64 >= value.as_u64().unwrap(),
        "maxProperties" => members.len() as u64 <= value.as_u64().unwrap(),
        _ => true,
    }
}

fn item_keyword(
    root: &Value,
    keywords: &Map<String, Value>,
    keyword: &str,
    value: &Value,
    items: &[Value],
) -> bool {
    let prefix = keywords.get("prefixItems").and_then(Value::as_array).map_or(0, Vec::len);
    match keyword {
        "items" => items.iter().skip(prefix).all(|item| is_valid(root, value, item)),
        "prefixItems" => {
            value.as_array().unwrap().iter().zip(items).all(|(schema, item)| is_valid(root, schema, item))
        }
        "minItems" => items.len() as u64 >= value.as_u64().unwrap(),
        "maxItems" => items.len() as u64 <= value.as_u64().unwrap(),
        _ => true,
    }
}

fn text_keyword(keyword: &str, value: &Value, text: &str) -> bool {
    let length = text.chars().count() as u64;
    match keyword {
        "minLength" => length >= value.as_u64().unwrap(),
        "maxLength" => length <= value.as_u64().unwrap(),
        "pattern" => Regex::new(value.as_str().unwrap()).unwrap().is_match(text),
        "format" => Regex::new(format_pattern(value.as_str().unwrap())).unwrap().is_match(text),
        _ => true,
    }
}

/// The shape of a format, as far as a reader would check it by eye.
fn format_pattern(format: &str) -> &str {
    match format {
        "date" => r"^\d{4}-\d\d-\d\d$",
        "time" => r"^\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)$",
        "date-time" => r"^\d{4}-\d\d-\d\d[tT]\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)$",
        "duration" => r"^P[0-9YMDTHSW]+$",
        "email" => r"^[^@ ]+@[^@ ]+$",
        "hostname" => r"^[A-Za-z0-9.-]+$",
        "ipv4" => r"^(\d{1,3}\.){3}\d{1,3}$",
        "ipv6" => r"^[0-9a-fA-F:.]+$",
        "uuid" => r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
        "uri" => r"^[A-Za-z][A-Za-z0-9+.-]*:",
        other => panic!("format {other}"),
    }
}

fn number_keyword(keyword: &str, value: &Value, number: f64) -> bool {
    let limit = || value.as_f64().unwrap();
    match keyword {
        "minimum" => number >= limit(),
        "maximum" => number <= limit(),
        "exclusiveMinimum" => number > limit(),
        "exclusiveMaximum" => number < limit(),
        "multipleOf" => {
            let quotient = number / limit();
            (quotient - quotient.round()).abs() < 1e-6
        }
        _ => true,
    }
}
