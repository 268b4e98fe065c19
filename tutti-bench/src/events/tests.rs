use super::*;

#[test]
fn lines_do_not_depend_on_chunks() {
    let text = "data: {\"é\": 1}\r\n\ndata: [DONE]\n";
    for size in 1..text.len() {
        let mut lines = Lines::default();
        let mut got = Vec::new();
        for chunk in text.as_bytes().chunks(size) {
            lines.push(chunk);
            while let Some(line) = lines.next().unwrap() {
                got.push(line.to_owned());
            }
        }
        assert_eq!(got, ["data: {\"é\": 1}", "", "data: [DONE]"], "chunks of {size}");
    }
}

#[test]
fn tokens_are_counted_by_ids_or_else_by_event() {
    for (event, tokens) in [
        (r#"{"choices":[{"text":"","token_ids":[1,2]}]}"#, 2),
        (r#"{"choices":[{"text":"the end","token_ids":[]}]}"#, 0),
        (r#"{"choices":[{"text":"a"}]}"#, 1),
        (r#"{"choices":[{"text":"","finish_reason":"stop"}],"usage":null}"#, 0),
        (r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#, 0),
        (r#"{"choices":[{"delta":{"content":"a"},"token_ids":[1,2,3]}]}"#, 3),
        (r#"{"choices":[{"delta":{"content":"a"}}]}"#, 1),
        (r#"{"choices":[{"delta":{"content":null,"reasoning_content":"a"}}]}"#, 1),
        (r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#, 1),
        (r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#, 0),
    ] {
        assert_eq!(parse(event), Ok(Delta { tokens, usage: None }), "{event}");
    }
    let usage = parse(r#"{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":4}}"#).unwrap().usage;
    assert_eq!(usage, Some(Usage { prompt_tokens: 4, completion_tokens: 3 }));
}

#[test]
fn an_error_inside_a_stream_is_a_failure() {
    assert_eq!(
        parse(r#"{"error":{"message":"lost"}}"#),
        Err(EventError::Server(r#"{"message":"lost"}"#.into()))
    );
    assert!(matches!(parse("{"), Err(EventError::Malformed(_))));
}
