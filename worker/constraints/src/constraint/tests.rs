use serde_json::json;

use super::*;

fn of(schema: Value) -> Constraint {
    Constraint::new(Kind::JsonSchema { schema, strictness: Strictness::Lenient })
}

#[test]
fn the_canonical_form_tells_apart_what_has_different_masks() {
    let first = of(json!({"properties": {"a": true, "b": true}}));
    let other_order = of(json!({"properties": {"b": true, "a": true}}));
    assert_ne!(first.canonical(), other_order.canonical());
    for whitespace in [Whitespace::Compact, Whitespace::Any] {
        assert_ne!(first.canonical(), Constraint { whitespace, ..first.clone() }.canonical());
    }
    for thinking in
        [Thinking::Open { end: 1 }, Thinking::Open { end: 2 }, Thinking::Optional { begin: 2, end: 1 }]
    {
        assert_ne!(first.canonical(), Constraint { thinking, ..first.clone() }.canonical());
    }
    let choice = |choices: &[&str]| {
        Constraint::new(Kind::Choice(choices.iter().map(ToString::to_string).collect())).canonical()
    };
    assert_ne!(choice(&["a\", \"b"]), choice(&["a", "b"]));
    assert_ne!(
        Constraint::new(Kind::Regex("a".into())).canonical(),
        Constraint::new(Kind::Lark("a".into())).canonical()
    );
}

#[test]
fn the_canonical_form_ignores_what_does_not_change_masks() {
    let text = r#"{ "type" :  "object" }"#;
    let spaced = of(serde_json::from_str(text).unwrap());
    assert_eq!(spaced.canonical(), of(json!({"type": "object"})).canonical());
    let strict = Kind::JsonSchema { schema: json!({"type": "object"}), strictness: Strictness::Strict };
    assert_eq!(spaced.canonical(), Constraint::new(strict).canonical());
}
