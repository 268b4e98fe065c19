use serde_json::json;

use super::*;

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

#[test]
fn annotations_are_left_out_and_names_are_kept() {
    let schema = object(json!({
        "title": "T",
        "$defs": {"title": {"description": "d", "type": "string"}},
        "properties": {
            "description": {"type": "string", "description": "d", "enum": ["title"]},
            "default": {"anyOf": [{"type": "integer", "default": 1}, {"const": {"title": 1}}]},
        },
        "required": ["description"],
    }));
    let found = of_arguments(&schema);
    let expected = json!({
        "$defs": {"title": {"type": "string"}},
        "properties": {
            "description": {"type": "string", "enum": ["title"]},
            "default": {"anyOf": [{"type": "integer"}, {"const": {"title": 1}}]},
        },
        "required": ["description"],
        "type": "object",
    });
    assert_eq!(found, with_bounded_whitespace(object(expected)));
}

#[test]
fn a_parameter_keeps_what_its_references_point_to() {
    let root = object(json!({"$defs": {"count": {"type": "integer", "title": "t"}}}));
    let found = of_parameter(&json!({"$ref": "#/$defs/count"}), &root);
    assert_eq!(
        (&found["$ref"], &found["$defs"]),
        (&json!("#/$defs/count"), &json!({"count": {"type": "integer"}}))
    );
}
