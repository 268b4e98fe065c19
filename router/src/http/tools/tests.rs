use serde_json::json;
use tutti_proto::parameters::Scope;

use super::*;

fn given(body: &Value) -> Result<(GivenTools, ToolChoice, CallLimit), Error> {
    let body = body.to_string();
    let mut fields = Fields::of_body(body.as_bytes(), Scope::Chat)?;
    let tools = take(&mut fields)?;
    let choice = choice(&mut fields, &tools.tools)?;
    Ok((tools, choice, limit(&mut fields)?))
}

#[test]
fn tools_are_kept_as_they_are_declared() {
    let tool = json!({"type": "function", "z": 1, "function": {"name": "a.b-c_d", "parameters": {"required": [],
        "type": "object", "properties": {"b": true, "a": {}}}, "strict": true}, "cache_control": {"type": "x"}});
    let (found, choice, limit) = given(&json!({"tools": [tool]})).unwrap();
    // The text has the order of the members.
    assert_eq!(found.shown[0].to_string(), tool.to_string());
    assert_eq!((found.tools[0].name.as_str(), found.tools[0].is_strict), ("a.b-c_d", true));
    assert_eq!(found.bytes, tool.to_string().len());
    assert_eq!((choice, limit), (ToolChoice::Auto, CallLimit::None));
}

#[test]
fn choices_name_what_is_wanted() {
    let tools = json!([{"function": {"name": "f"}}, {"function": {"name": "g"}}]);
    let named = json!({"type": "function", "function": {"name": "g"}});
    for (asked, found) in [
        (json!("none"), ToolChoice::None),
        (json!("auto"), ToolChoice::Auto),
        (json!("required"), ToolChoice::Required),
        (named, ToolChoice::Named(1)),
    ] {
        let body = json!({"tools": tools, "tool_choice": asked, "parallel_tool_calls": false});
        let (_, choice, limit) = given(&body).unwrap();
        assert_eq!((choice, limit), (found, CallLimit::One));
    }
}

#[test]
fn tools_have_a_limit_in_values() {
    let tool = |values: usize| json!({"function": {"name": "f", "parameters": {"enum": vec![0; values]}}});
    assert!(given(&json!({"tools": [tool(MAX_TOOL_VALUES - 100)]})).is_ok());
    let mut second = tool(60_000);
    second["function"]["name"] = json!("g");
    let error = given(&json!({"tools": [tool(60_000), second]})).err().unwrap();
    assert_eq!(error.field(), Some("tools[1]"));
    assert!(error.message().contains(&MAX_TOOL_VALUES.to_string()), "{error}");
}

#[test]
fn tools_have_a_limit_in_bytes() {
    let tool = json!({"function": {"name": "f", "description": "x".repeat(MAX_TOOL_BYTES)}});
    let error = given(&json!({"tools": [tool]})).err().unwrap();
    assert_eq!(error.field(), Some("tools"));
    assert!(error.message().contains(&MAX_TOOL_BYTES.to_string()), "{error}");
}
