use super::*;
use crate::test_support::tokenizer;

#[test]
fn the_byte_alphabet_covers_every_byte_once() {
    let mut seen: Vec<u8> = (0u32..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
    // `Ġ` stands for a space, and `Ċ` for a newline.
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
    // The longest token is `<|begin|>`, with 9 bytes.
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

#[test]
fn a_long_text_has_the_token_ids_of_the_library() {
    let tokenizer = tokenizer();
    let text = "hello world; he said\nso 🎻 <think>hello  ".repeat(4000);
    assert!(tokenizer.cuttable && segments::cut(&text, SEGMENT_BYTES).len() > 3);
    let whole = tokenizer.inner.encode_fast(text.as_str(), false).unwrap();
    assert_eq!(tokenizer.encode(&text, SpecialTokens::Exclude).unwrap(), whole.get_ids());
    // Special tokens of the post-processor are added once, and not per segment.
    let begin = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<|begin|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
        "special_tokens": { "<|begin|>": { "id": "<|begin|>", "ids": [260], "tokens": ["<|begin|>"] } },
    });
    let mut json: serde_json::Value = serde_json::from_slice(&crate::test_support::tokenizer_json()).unwrap();
    json["post_processor"] = begin;
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let whole = tokenizer.inner.encode_fast(text.as_str(), true).unwrap();
    assert_eq!(whole.get_ids()[0], 260);
    assert_eq!(tokenizer.encode(&text, SpecialTokens::Include).unwrap(), whole.get_ids());
}

#[test]
fn a_text_over_the_limit_is_given_up_before_its_end() {
    let text = "hello he ".repeat(100_000);
    assert_eq!(tokenizer().encode_up_to(&text.clone().into(), SpecialTokens::Exclude, 1000).unwrap(), None);
    assert!(
        tokenizer().encode_up_to(&text.clone().into(), SpecialTokens::Exclude, 1 << 20).unwrap().is_some()
    );
}

#[test]
fn a_run_of_a_million_spaces_is_refused_by_name() {
    for run in [" ", "a", "é", "1", "."] {
        let text = format!("hello{}x", run.repeat(1_000_000));
        let error = tokenizer().encode(&text, SpecialTokens::Exclude).unwrap_err();
        assert!(error.field() == Some("prompt") && error.message().contains("without a break"), "{error}");
    }
    // A run at the limit is encoded correctly: the regular expression engine does not give up.
    let text = format!("{}x", " ".repeat(MAX_RUN_BYTES - 1));
    let ids = tokenizer().encode(&text, SpecialTokens::Exclude).unwrap();
    assert_eq!((ids.len(), ids[ids.len() - 1]), (MAX_RUN_BYTES, u32::from(b'x')));
}
