//! The schemas of arguments inside a grammar.

use serde_json::{Map, Value};
use tutti_constraints::with_bounded_whitespace;

/// Keywords that describe, and constrain nothing.
const ANNOTATIONS: [&str; 8] =
    ["title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"];
/// Keywords whose members are schemas by name.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords to which references point.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Keywords whose values are no schemas.
const VALUES: [&str; 4] = ["enum", "const", "required", "type"];

/// The schema of any JSON object.
pub fn any_object() -> Value {
    of_arguments(&Map::new())
}

/// The schema of any JSON value.
pub fn any_value() -> Value {
    with_bounded_whitespace(Map::new())
}

/// The schema of a tool's arguments, which are an object.
pub fn of_arguments(schema: &Map<String, Value>) -> Value {
    let mut bare = bare_members(schema);
    bare.insert("type".to_owned(), "object".into());
    with_bounded_whitespace(bare)
}

/// The schema of one parameter, with what its references point to.
pub fn of_parameter(schema: &Value, root: &Map<String, Value>) -> Value {
    let Value::Object(members) = schema else { return with_bounded_whitespace(Map::new()) };
    let mut bare = bare_members(members);
    for key in DEFINITIONS {
        if let Some(definitions) = root.get(key) {
            bare.insert(key.to_owned(), bare_map(definitions));
        }
    }
    with_bounded_whitespace(bare)
}

/// A schema without annotations, which are long and have a meaning for the model alone.
fn bare(schema: &Value) -> Value {
    match schema {
        Value::Object(members) => Value::Object(bare_members(members)),
        Value::Array(schemas) => schemas.iter().map(bare).collect(),
        other => other.clone(),
    }
}

fn bare_members(members: &Map<String, Value>) -> Map<String, Value> {
    let kept = members.iter().filter(|(key, _)| !ANNOTATIONS.contains(&key.as_str()));
    let of_key = |key: &str, value: &Value| match key {
        key if MAPS.contains(&key) => bare_map(value),
        key if VALUES.contains(&key) => value.clone(),
        _ => bare(value),
    };
    kept.map(|(key, value)| (key.clone(), of_key(key, value))).collect()
}

/// Schemas by name. A name is no keyword.
fn bare_map(schemas: &Value) -> Value {
    match schemas {
        Value::Object(schemas) => schemas.iter().map(|(name, schema)| (name.clone(), bare(schema))).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests;
