use serde_json::json;

use super::*;

/// A tool with this schema.
fn declared(schema: Value) -> Tools {
    let Value::Object(schema) = schema else { panic!("{schema} is no object") };
    Tools::from_iter([("f".to_owned(), schema.into())])
}

fn types(schema: Value) -> Types {
    let root =
        json!({"properties": {"p": schema}, "$defs": {"n": {"type": "integer"}, "l": {"$ref": "#/$defs/l"}}});
    declared(root).types("f", "p")
}

#[test]
fn types_are_those_that_the_schema_allows() {
    assert_eq!(types(json!({"type": "integer"})).read("5"), Some("5".to_owned()));
    assert_eq!(types(json!({"type": "integer"})).read("5.0"), Some("5.0".to_owned()));
    assert_eq!(types(json!({"type": "integer"})).read("5.5"), None);
    assert_eq!(types(json!({"type": ["boolean", "string"]})).read("True"), Some("true".to_owned()));
    assert_eq!(
        types(json!({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]})).read("7"),
        Some("7".to_owned())
    );
    assert_eq!(types(json!({"enum": [1, "a"]})).read("1"), Some("1".to_owned()));
    assert_eq!(types(json!({"const": {"a": 1}})).read("{\"a\":1}"), Some("{\"a\":1}".to_owned()));
}

#[test]
fn a_schema_without_a_type_is_text() {
    for schema in
        [json!({}), json!(true), json!({"type": 3}), json!({"$ref": "#/$defs/l"}), json!({"$ref": "x"})]
    {
        assert!(types(schema.clone()).is_text(), "{schema}");
    }
}

#[test]
fn what_is_not_declared_is_text() {
    let tools = declared(json!({"properties": {"p": {"type": "integer"}}}));
    assert!(tools.types("f", "q").is_text());
    assert!(tools.types("g", "p").is_text());
    assert!(tools.declares("f") && !tools.declares("g"));
}
