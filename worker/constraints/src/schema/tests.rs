use serde_json::json;

use super::*;

fn check_lenient(schema: Value) -> Result<(), ConstraintError> {
    check("schema", &schema, Strictness::Lenient)
}

#[test]
fn positions_quote_names_that_are_no_words() {
    let root = Path::root("schema");
    let (plain, spaced) = (root.member("a-b_1"), root.member("a b"));
    assert_eq!(plain.element(3).to_string(), "schema.a-b_1[3]");
    assert_eq!(spaced.to_string(), r#"schema["a b"]"#);
    let long = "é".repeat(100);
    assert_eq!(root.member(&long).to_string(), format!("schema[\"{}\"…]", "é".repeat(20)));
}

#[test]
fn keywords_are_found_in_every_schema_and_not_in_values() {
    let bad = json!({"not": {}});
    for (schema, position) in [
        (json!({"properties": {"not": bad}}), "schema.properties.not.not"),
        (json!({"patternProperties": {"^a": bad}}), r#"schema.patternProperties["^a"].not"#),
        (json!({"additionalProperties": bad}), "schema.additionalProperties.not"),
        (json!({"items": bad}), "schema.items.not"),
        (json!({"items": [true, bad]}), "schema.items[1].not"),
        (json!({"prefixItems": [bad]}), "schema.prefixItems[0].not"),
        (json!({"anyOf": [true, bad]}), "schema.anyOf[1].not"),
        (json!({"$defs": {"x": bad}}), "schema.$defs.x.not"),
    ] {
        assert_eq!(check_lenient(schema).unwrap_err().path, position);
    }
    let data = json!({"const": {"not": 1}, "enum": [{"not": 1}], "default": {"not": 1}, "properties": {"not": true}});
    assert_eq!(check_lenient(data), Ok(()));
    assert_eq!(check_lenient(json!({"uniqueItems": false, "x-unknown": 1})), Ok(()));
}

#[test]
fn a_format_belongs_to_strings() {
    for kind in [json!("integer"), json!(["number", "null"])] {
        assert_eq!(check_lenient(json!({"type": kind, "format": "int32"})), Ok(()));
    }
    for schema in [json!({"format": "int32"}), json!({"type": ["null", "string"], "format": "int32"})] {
        assert_eq!(check_lenient(schema).unwrap_err().path, "schema.format");
    }
}

#[test]
fn an_error_is_located_in_the_innermost_schema_that_has_it() {
    let schema =
        json!({"anyOf": [true, {"properties": {"a": {"type": "x"}, "b": true}}], "$defs": {"d": true}});
    let has_type = |schema: &Value| schema.to_string().contains(r#""x""#);
    let mut compilations = 0;
    let error = ConstraintError::at("", "unknown type");
    let located = locate::locate("schema", &schema, error.clone(), &mut |child| {
        compilations += 1;
        has_type(child).then(|| error.clone())
    });
    assert_eq!(located.to_string(), "schema.anyOf[1].properties.a: unknown type");
    assert_eq!(compilations, 2);
}

#[test]
fn the_search_for_a_position_is_bounded() {
    let schema = json!({"anyOf": (0..100).map(|n| json!({"const": n})).collect::<Vec<_>>()});
    let mut compilations = 0;
    let located = locate::locate("schema", &schema, ConstraintError::at("", "whatever"), &mut |_| {
        compilations += 1;
        None
    });
    assert_eq!((located.path.as_str(), compilations), ("schema", 32));
}
