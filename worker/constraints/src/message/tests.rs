use serde_json::json;
use tutti_proto::v1::constraint::Whitespace as WhitespaceMessage;

use super::*;

fn read(kind: Message) -> Result<Kind, ConstraintError> {
    let message = v1::Constraint { kind: Some(kind), ..Default::default() };
    Constraint::from_message(message, None).map(|constraint| constraint.kind)
}

fn error(kind: Message) -> String {
    read(kind).unwrap_err().to_string()
}

fn schema_message(text: &str) -> Message {
    Message::JsonSchema(v1::JsonSchema { schema: text.to_owned(), strict: false })
}

fn tags_message(schemas: &[&str]) -> Message {
    let tag = |schema: &&str| v1::StructuralTag {
        begin: "<f>".to_owned(),
        schema: (*schema).to_owned(),
        end: "</f>".to_owned(),
    };
    let tags = schemas.iter().map(tag).collect();
    Message::StructuralTags(v1::StructuralTags { tags, triggers: vec!["<f".to_owned()] })
}

#[test]
fn every_kind_is_read() {
    assert_eq!(read(Message::JsonObject(v1::JsonObject {})).unwrap(), Kind::JsonObject);
    assert_eq!(read(Message::Regex("a+".to_owned())).unwrap(), Kind::Regex("a+".to_owned()));
    assert_eq!(
        read(Message::Lark("start: \"a\"".to_owned())).unwrap(),
        Kind::Lark("start: \"a\"".to_owned())
    );
    let texts = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(read(Message::Choice(v1::Choices { texts: texts.clone() })).unwrap(), Kind::Choice(texts));
    for (strict, strictness) in [(false, Strictness::Lenient), (true, Strictness::Strict)] {
        let message = v1::JsonSchema { schema: r#"{"b": 1, "a": 2}"#.to_owned(), strict };
        let schema = json!({"b": 1, "a": 2});
        assert_eq!(read(Message::JsonSchema(message)).unwrap(), Kind::JsonSchema { schema, strictness });
    }
    let Kind::StructuralTags { tags, triggers } = read(tags_message(&["{}", "true"])).unwrap() else {
        panic!("no tags");
    };
    assert_eq!(triggers, ["<f"]);
    assert_eq!(tags.iter().map(|tag| tag.schema.to_string()).collect::<Vec<_>>(), ["{}", "true"]);
}

#[test]
fn whitespace_and_thinking_are_read() {
    for (message, whitespace) in [
        (WhitespaceMessage::Bounded, Whitespace::Bounded),
        (WhitespaceMessage::Compact, Whitespace::Compact),
        (WhitespaceMessage::Any, Whitespace::Any),
    ] {
        let kind = Some(Message::Regex("a".to_owned()));
        let message = v1::Constraint { kind, whitespace: message.into() };
        assert_eq!(Constraint::from_message(message, None).unwrap().whitespace, whitespace);
    }
    let block = |begin| pb::Thinking { begin, end: 7, max_tokens: Some(3) };
    assert_eq!(Thinking::from(None), Thinking::Closed);
    assert_eq!(Thinking::from(Some(&block(None))), Thinking::Open { end: 7 });
    assert_eq!(Thinking::from(Some(&block(Some(6)))), Thinking::Optional { begin: 6, end: 7 });
}

#[test]
fn what_cannot_be_read_is_refused_with_its_position() {
    let unknown = v1::Constraint { kind: Some(Message::Regex("a".to_owned())), whitespace: 9 };
    let refused = Constraint::from_message(unknown, None).unwrap_err().to_string();
    assert_eq!(refused, "constraint: has the unknown whitespace 9");
    let refused = Constraint::from_message(v1::Constraint::default(), None).unwrap_err().to_string();
    assert_eq!(refused, "constraint: is of no kind: one of its kinds is required");
    assert_eq!(
        error(schema_message("{")),
        "schema: is no JSON: EOF while parsing an object at line 1 column 1"
    );
    assert!(error(tags_message(&["{}", ""])).starts_with("structural_tag.structures[1].schema: is no JSON"));
    let deep = "[".repeat(100_000);
    assert!(error(schema_message(&deep)).starts_with("schema: is no JSON: recursion limit exceeded"));
    let long = " ".repeat(MAX_TEXT_BYTES + 1);
    assert_eq!(error(schema_message(&long)), "schema: has 262145 bytes of text; the limit is 262144");
    let half = " ".repeat(MAX_TEXT_BYTES / 2 + 1);
    assert_eq!(
        error(tags_message(&[&half, &half])),
        "structural_tag: has 262146 bytes of schemas; the limit is 262144"
    );
}
