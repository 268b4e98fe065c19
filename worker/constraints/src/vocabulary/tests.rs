use serde_json::{Value, json};

use super::*;

fn read(json: Value, declared: &Declared<'_>) -> Result<Vocabulary, ConstraintError> {
    Vocabulary::from_tokenizer_json(&json, declared)
}

fn text(bytes: &[u8]) -> Token {
    Token::Text(bytes.to_vec())
}

fn special(text: &str) -> Token {
    Token::Special(text.to_owned())
}

#[test]
fn byte_level_tokens_are_their_bytes() {
    let json = json!({
        "model": {"type": "BPE", "vocab": {"a": 0, "Ġb": 1, "Ċ": 2, "Ã": 3, "ÿ": 4, "<plain>": 5, "日": 6}},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [
            {"id": 7, "content": "<|end|>", "special": true},
            {"id": 8, "content": "<tool_call>", "special": false},
            {"id": 9, "content": "<other>", "special": false},
        ],
    });
    let declared = Declared { logits: 12, ends: &[7], markers: &["<tool_call>"] };
    let vocabulary = read(json, &declared).unwrap();
    let mut expected = [
        text(b"a"),
        text(b" b"),
        text(b"\n"),
        // Half of a character.
        text(b"\xc3"),
        // No UTF-8 text has this byte, and the library would take it for a special token.
        Token::Unused,
        // Brackets alone make no token special.
        text(b"<plain>"),
        text("日".as_bytes()),
        special("<|end|>"),
        special("<tool_call>"),
        text(b"<other>"),
        Token::Unused,
        Token::Unused,
    ];
    assert_eq!(vocabulary.tokens(), expected);
    expected[9] = special("<other>");
    assert_eq!(vocabulary.with_added_special().tokens(), expected);
}

#[test]
fn fallback_tokens_of_sentence_piece_are_single_bytes() {
    let decoders =
        json!([{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]);
    let json = json!({
        "model": {"type": "BPE", "vocab": {"</s>": 0, "<0xE2>": 1, "▁the": 2, "a": 3, "<0xZZ>": 4, "<0x0A>": 5, "<0xFF>": 6}},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "added_tokens": [{"id": 0, "content": "</s>", "special": true}],
    });
    let vocabulary = read(json, &Declared { logits: 7, ends: &[0], markers: &[] }).unwrap();
    let expected = [
        special("</s>"),
        text(b"\xe2"),
        text(b" the"),
        text(b"a"),
        text(b"<0xZZ>"),
        text(b"\n"),
        Token::Unused,
    ];
    assert_eq!(vocabulary.tokens(), expected);
}

#[test]
fn unigram_vocabularies_are_read_and_word_pieces_are_refused() {
    let unigram = json!({
        "model": {"type": "Unigram", "vocab": [["</s>", 0.0], ["▁a", -1.5], ["b", -2.0]]},
        "decoder": {"type": "Metaspace", "replacement": "▁"},
        "added_tokens": [],
    });
    let vocabulary = read(unigram, &Declared { logits: 3, ends: &[0], markers: &[] }).unwrap();
    assert_eq!(vocabulary.tokens(), [special("</s>"), text(b" a"), text(b"b")]);
    let word_piece = json!({
        "model": {"type": "WordPiece", "continuing_subword_prefix": "##", "vocab": {"[SEP]": 0, "word": 1, "##s": 2}},
        "decoder": {"type": "WordPiece"},
        "added_tokens": [{"id": 0, "content": "[SEP]", "special": true}],
    });
    let error = read(word_piece, &Declared { logits: 3, ends: &[0], markers: &[] }).unwrap_err();
    assert_eq!(error.to_string(), "tokenizer.json: has a decoder whose tokens have no known bytes");
}

#[test]
fn files_that_make_no_sense_are_refused() {
    let declared = Declared { logits: 2, ends: &[0], markers: &[] };
    let message = |json: Value, declared: &Declared<'_>| read(json, declared).unwrap_err().to_string();
    let of = |vocab: Value| json!({"model": {"vocab": vocab}, "decoder": {"type": "ByteLevel"}});
    assert_eq!(
        message(json!({}), &declared),
        "tokenizer.json: has a decoder whose tokens have no known bytes"
    );
    assert_eq!(message(of(json!(3)), &declared), "tokenizer.json: has no vocabulary of spellings and ids");
    assert_eq!(
        message(of(json!({"a": -1})), &declared),
        "tokenizer.json: has no vocabulary of spellings and ids"
    );
    assert_eq!(
        message(of(json!({"a": 1u64 << 40})), &declared),
        "tokenizer.json: has the token id 1099511627776; the limit is 4194304"
    );
    let no_end = Declared { ends: &[], ..declared };
    assert_eq!(message(of(json!({"a": 0})), &no_end), "vocabulary: has no token that ends a generation");
    let far = Declared { ends: &[9], ..declared };
    assert_eq!(
        message(of(json!({"a": 0})), &far),
        "vocabulary: end token 9 is not below the number of logits, 2"
    );
}

#[test]
fn long_tokens_are_never_allowed_and_do_not_break_the_trie() {
    let tokens = vec![special("<end>"), text(&[b' '; 1000]), text(&[b' '; 1001]), text(b"")];
    let vocabulary = Vocabulary::new(tokens, &[0]).unwrap();
    assert_eq!(vocabulary.tokens()[2..], [Token::Unused, Token::Unused]);
    crate::Environment::new(&vocabulary).unwrap();
}

#[test]
fn the_vocabulary_of_checks_keeps_special_tokens_and_their_ids() {
    let tokens = vec![text(b"ab"), special("<end>"), Token::Unused, special("<think>")];
    let bytes = Vocabulary::new(tokens, &[1]).unwrap().single_bytes();
    assert_eq!(bytes.tokens()[..4], [Token::Unused, special("<end>"), Token::Unused, special("<think>")]);
    assert_eq!(bytes.tokens()[4..].len(), 255);
    assert_eq!(bytes.tokens()[4 + 65], text(b"A"));
}
