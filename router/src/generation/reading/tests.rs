use super::*;

#[test]
fn calls_are_enforced_as_the_request_wants() {
    let tool = |is_strict| Tool { name: "f".into(), parameters: None, is_strict };
    for (choice, is_strict, wanted) in [
        (ToolChoice::Required, false, Some(Wanted::Calls)),
        (ToolChoice::Named(0), true, Some(Wanted::Calls)),
        (ToolChoice::Auto, true, Some(Wanted::TextAndCalls)),
        (ToolChoice::Auto, false, None),
        (ToolChoice::None, true, None),
    ] {
        let reading = Reading { tools: vec![tool(is_strict)], choice, ..Reading::default() };
        assert_eq!(reading.wanted(), wanted, "{choice:?}");
    }
}
