use serde_json::json;

use super::*;

fn calls_of(history: &mut History, calls: &Value) -> Result<Vec<ToolCall>, Error> {
    let message = json!({"tool_calls": calls}).to_string();
    let message: &RawValue = serde_json::from_str(&message).unwrap();
    history.take_calls(&mut Fields::of_value("m", message).unwrap(), "assistant")
}

#[test]
fn arguments_are_objects_however_they_are_given() {
    let call = |arguments: Value| json!([{"id": "a", "function": {"name": "f", "arguments": arguments}}]);
    for (given, expected) in [
        (json!("{\"b\": 1, \"a\": 1.50}"), json!({"b": 1, "a": 1.5})),
        (json!({"b": 1}), json!({"b": 1})),
        (json!(" "), json!({})),
        (json!("null"), json!({})),
        (json!(null), json!({})),
        (json!("{\"b\": "), json!({"arguments": "{\"b\": "})),
    ] {
        let calls = calls_of(&mut History::default(), &call(given.clone())).unwrap();
        assert_eq!(Value::Object(calls[0].arguments.clone()).to_string(), expected.to_string(), "{given}");
    }
    for given in [json!("[1]"), json!("1"), json!([1]), json!(1)] {
        let error = calls_of(&mut History::default(), &call(given)).unwrap_err();
        assert_eq!(error.field(), Some("m.tool_calls[0].function.arguments"));
    }
}

#[test]
fn the_calls_of_a_conversation_have_a_limit_in_bytes() {
    let text = "x".repeat(MAX_CALL_BYTES / 2);
    let call = json!([{"function": {"name": "f", "arguments": {"a": text}}}]);
    let mut history = History::default();
    assert!(calls_of(&mut history, &call).is_ok());
    let error = calls_of(&mut history, &call).unwrap_err();
    assert_eq!(error.field(), Some("m.tool_calls"));
    assert_eq!(history.calls, 1);
}

#[test]
fn the_arguments_of_a_conversation_have_a_limit_in_values() {
    let list = serde_json::to_string(&json!({"a": vec![0; MAX_CALL_VALUES / 2 + 10]})).unwrap();
    let object: Value = serde_json::from_str(&list).unwrap();
    // Text that was cut is no JSON and has no values.
    let cut = &list[..list.len() - 1];
    for arguments in [object, json!(list)] {
        let call = |arguments: &Value| json!([{"function": {"name": "f", "arguments": arguments}}]);
        let mut history = History::default();
        assert!(calls_of(&mut history, &call(&arguments)).is_ok());
        assert!(calls_of(&mut history, &call(&json!(cut))).is_ok());
        let error = calls_of(&mut history, &call(&arguments)).unwrap_err();
        assert_eq!(error.field(), Some("m.tool_calls[0].function.arguments"));
        assert!(error.message().contains(&MAX_CALL_VALUES.to_string()), "{error}");
    }
}
