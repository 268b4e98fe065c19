use super::*;
use crate::test_support::tokenizer;

#[test]
fn the_byte_alphabet_covers_every_byte_once() {
    let mut seen: Vec<u8> = (0u32..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
    // Space and newline.
    assert_eq!((byte_of('Ġ'), byte_of('Ċ')), (Some(b' '), Some(b'\n')));
}

#[test]
fn text_survives_a_round_trip_and_token_bytes_add_up_to_it() {
    let tokenizer = tokenizer();
    let text = "hello 🎻 Grüße\n";
    let ids = tokenizer.encode(text, SpecialTokens::Include).unwrap();
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Exclude).unwrap(), text);
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
    assert_eq!(bytes, text.as_bytes());
}

#[test]
fn a_text_too_long_for_the_limit_is_detected_without_encoding_it() {
    let tokenizer = tokenizer();
    // The longest token is `<|begin|>`.
    assert!(!tokenizer.surely_exceeds(4 * 9 * 10, 10));
    assert!(tokenizer.surely_exceeds(4 * 9 * 10 + 4, 10));
}

#[test]
fn an_incomplete_character_is_shown_as_bytes() {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode("é", SpecialTokens::Exclude).unwrap();
    let shown: Vec<String> = ids.iter().map(|&id| tokenizer.token_string(id)).collect();
    assert_eq!(shown, [r"bytes:\xc3", r"bytes:\xa9"]);
}

#[test]
fn broken_json_is_named() {
    let error = Tokenizer::from_bytes(b"{\"version\":").err().unwrap();
    assert_eq!(error.field(), Some("tokenizer"));
}
