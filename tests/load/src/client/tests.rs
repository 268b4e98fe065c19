use super::*;

#[test]
fn tokens_are_counted_by_ids_or_else_by_event() {
    let mut record = Record::default();
    let now = Duration::from_millis(3);
    take(r#"{"choices":[{"text":"","token_ids":[1,2]}]}"#, now, &mut record).unwrap();
    take(r#"{"choices":[{"text":"a"}]}"#, now, &mut record).unwrap();
    take(r#"{"choices":[{"text":"","finish_reason":"stop"}],"usage":null}"#, now, &mut record).unwrap();
    take(r#"{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":4}}"#, now, &mut record).unwrap();
    assert_eq!(record.arrivals, [(now, 2), (now, 1)]);
    assert_eq!((record.prompt_tokens, record.tokens), (4, 3));
}

#[test]
fn an_error_inside_a_stream_is_a_failure() {
    let failed = take(r#"{"error":{"message":"lost"}}"#, Duration::ZERO, &mut Record::default());
    assert!(failed.unwrap_err().contains("lost"));
}
