//! Schemas by families of keywords.

use serde_json::{Value, json};

/// Schemas that are enforced.
pub fn all() -> Vec<Value> {
    [types(), numbers(), texts(), formats(), arrays(), objects(), unions(), references()].concat()
}

fn types() -> Vec<Value> {
    vec![
        json!({"type": "null"}),
        json!({"type": "boolean"}),
        json!({"type": "integer"}),
        json!({"type": "number"}),
        json!({"type": "string", "maxLength": 20}),
        json!({"type": ["null", "boolean"]}),
        json!({"type": ["integer", "string"], "maxLength": 3}),
        json!({"enum": ["red", "green", 3, null, true]}),
        json!({"enum": [{"a": 1}, [1, 2], "x"]}),
        json!({"const": "fixed \"text\" \\ ü"}),
        json!({"const": {"a": [1, {"b": null}]}}),
    ]
}

fn numbers() -> Vec<Value> {
    vec![
        json!({"type": "integer", "minimum": 0, "maximum": 9}),
        json!({"type": "integer", "minimum": -12, "maximum": 345}),
        json!({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7}),
        json!({"type": "integer", "minimum": 1000}),
        json!({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}),
        json!({"type": "number", "minimum": 0.5, "maximum": 2.25}),
        json!({"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1}),
        json!({"type": "number", "maximum": -3.5}),
    ]
}

fn texts() -> Vec<Value> {
    vec![
        json!({"type": "string", "minLength": 3, "maxLength": 5}),
        json!({"type": "string", "maxLength": 0}),
        json!({"type": "string", "minLength": 8, "maxLength": 8}),
        json!({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
        json!({"type": "string", "pattern": "^(yes|no|may\"be)$"}),
        json!({"type": "string", "pattern": "^a+b?c*$", "maxLength": 6}),
        json!({"type": "string", "pattern": "b", "maxLength": 4}),
        json!({"type": "string", "pattern": "^\\d{2}:\\d{2}$"}),
    ]
}

fn formats() -> Vec<Value> {
    let formats =
        ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
    formats.iter().map(|format| json!({"type": "string", "format": format})).collect()
}

fn arrays() -> Vec<Value> {
    vec![
        json!({"type": "array", "items": {"type": "boolean"}, "maxItems": 4}),
        json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3}),
        json!({"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}),
        json!({"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": false, "minItems": 2}),
        json!({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "maxItems": 3}),
        json!({"type": "array", "maxItems": 0}),
        json!({"type": "array", "items": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}, "maxItems": 2}),
    ]
}

fn objects() -> Vec<Value> {
    let closed = |properties: Value, required: Value| json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false});
    vec![
        closed(
            json!({"name": {"type": "string", "maxLength": 9}, "b": {"type": "boolean"}}),
            json!(["name", "b"]),
        ),
        closed(json!({"name": {"type": "null"}, "b": {"type": "null"}, "a": {"type": "null"}}), json!(["b"])),
        closed(json!({"a": {"type": "integer", "maximum": 9, "minimum": 0}}), json!([])),
        closed(json!({}), json!([])),
        closed(json!({"a\"b\\": {"const": 1}, "ü ": {"const": 2}}), json!(["a\"b\\", "ü "])),
        closed(
            json!({"a": closed(json!({"b": closed(json!({"c": {"const": 0}}), json!(["c"]))}), json!(["b"]))}),
            json!(["a"]),
        ),
        json!({"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2}),
        json!({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "null"}}),
        json!({"type": "object", "patternProperties": {"^x_": {"type": "boolean"}}, "additionalProperties": false}),
        json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "other"],
               "additionalProperties": {"type": "integer"}}),
        json!({"properties": {"a": {"const": 1}}, "type": "object", "required": ["a"], "title": "T", "description": "d"}),
    ]
}

fn unions() -> Vec<Value> {
    let closed = |name: &str, schema: Value| json!({"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": false});
    vec![
        json!({"anyOf": [{"type": "boolean"}, {"const": "none"}]}),
        json!({"anyOf": [closed("a", json!({"const": 1})), closed("b", json!({"type": "null"}))]}),
        json!({"oneOf": [closed("k", json!({"const": "x"})), closed("k", json!({"const": "y"}))]}),
        json!({"oneOf": [{"type": "null"}, {"type": "boolean"}]}),
        json!({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}),
        json!({"allOf": [closed("a", json!({"type": "integer"})), {"properties": {"a": {"enum": [4, 5, "x"]}}}]}),
        json!({"type": "string", "enum": ["a", "b", 3]}),
        json!({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array", "items": {"const": 1}, "maxItems": 2}]}),
    ]
}

fn references() -> Vec<Value> {
    vec![
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}),
        json!({"type": "array", "items": {"$ref": "#/definitions/n"}, "maxItems": 3, "definitions": {"n": {"enum": [1, 2]}}}),
        json!({"$ref": "#/$defs/tree", "$defs": {"tree": {
            "type": "object",
            "properties": {"v": {"enum": [0, 1]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
            "required": ["v", "next"], "additionalProperties": false,
        }}}),
        json!({"type": "array", "items": {"$ref": "#"}, "maxItems": 2}),
    ]
}
