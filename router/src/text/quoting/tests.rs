use super::*;
use crate::test_support::tokenizer;

#[test]
fn a_stand_in_occurs_nowhere_else() {
    let tokenizer = tokenizer();
    let taken = ["\u{100000}", "x\u{100001}"];
    let mut quoter = Quoter::new(&tokenizer, taken.into_iter());
    let mut text = "so <|end|> \u{100000}".to_owned();
    quoter.quote(&mut text, Fragments::All).unwrap();
    assert_eq!(text, "so \u{100002}|end|> \u{100000}");
    let quotes = quoter.finish();
    assert!(!quotes.is_empty());
    assert_eq!(quotes.unquote(&text), "so <|end|> \u{100000}");
}

#[test]
fn texts_without_special_tokens_are_not_changed() {
    let tokenizer = tokenizer();
    let mut quoter = Quoter::new(&tokenizer, std::iter::empty());
    for text in ["hello", "<think>", "<|end |>", "a < b | c > d", ""] {
        let mut quoted = text.to_owned();
        quoter.quote(&mut quoted, Fragments::All).unwrap();
        assert_eq!(quoted, text);
    }
    assert!(quoter.finish().is_empty());
}

#[test]
fn a_request_that_leaves_no_private_character_is_refused() {
    let all: String = PRIVATE.collect();
    let tokenizer = tokenizer();
    let mut quoter = Quoter::new(&tokenizer, [all.as_str()].into_iter());
    let error = quoter.quote(&mut "<|end|>".into(), Fragments::All).unwrap_err();
    assert_eq!(error.field(), Some("messages"));
}

#[test]
fn the_character_that_is_replaced_is_one_that_filters_leave_alone() {
    assert_eq!(quoted_char("<s>"), 0);
    assert_eq!(quoted_char("start|>"), 5);
    assert_eq!(quoted_char(" \"end"), 1);
    assert_eq!(quoted_char(" "), 0);
}
