//! The reference is the library with `encode_special_tokens`, which is what `split_special_tokens` of Hugging Face's
//! transformers sets.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{
    test_support::tokenizer_json,
    text::{quoting::Quoter, tokenizer::SpecialTokens},
};

fn added(id: u32, content: &str, special: bool, normalized: bool) -> Value {
    json!({ "id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": normalized })
}

fn byte_level() -> Value {
    serde_json::from_slice(&tokenizer_json()).unwrap()
}

/// A tokenizer like Llama 2's. Its special tokens are found in normalised text, as in older files.
fn sentence_piece(normalized: bool) -> Value {
    let bytes = (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte)));
    let words = ["<unk>", "<s>", "</s>", "▁", "s", "<", ">", "/", "a", "▁a", "▁<"];
    let words = words.into_iter().zip(256..).map(|(word, id)| (word.into(), json!(id)));
    let vocab: serde_json::Map<_, _> = bytes.chain(words).collect();
    json!({
        "version": "1.0",
        "added_tokens": [
            added(256, "<unk>", true, normalized), added(257, "<s>", true, normalized),
            added(258, "</s>", true, normalized),
        ],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] },
        "model": { "type": "BPE", "vocab": vocab, "merges": ["▁ a", "▁ <"], "byte_fallback": true, "unk_token": "<unk>" },
    })
}

/// A tokenizer like T5's. Its model has the special tokens among its pieces.
fn unigram() -> Value {
    let pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("a", -2.0), ("▁a", -2.5)];
    let rest = ["<", ">", "/", "s", "|", "e", "n", "d"].map(|piece| (piece, -3.0));
    let vocab: Vec<Value> =
        pieces.into_iter().chain(rest).map(|(piece, score)| json!([piece, score])).collect();
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>", true, false), added(1, "<s>", true, false), added(2, "</s>", true, false)],
        "pre_tokenizer": { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
        "model": { "type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false },
    })
}

/// A tokenizer like BERT's, without upper case.
fn word_piece() -> Value {
    let words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[", "]", "cls", "sep", "a", "##a", "s", "##s"];
    let vocab: serde_json::Map<_, _> =
        words.into_iter().zip(0..).map(|(word, id)| (word.into(), json!(id))).collect();
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"].into_iter().zip(0..);
    let special: Vec<Value> = special.map(|(word, id)| self::added(id, word, true, false)).collect();
    json!({
        "version": "1.0",
        "added_tokens": special,
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab },
    })
}

fn all() -> [(Value, &'static [&'static str]); 5] {
    [
        (byte_level(), &["<|begin|>", "<|end|>", "<|role|>"]),
        (sentence_piece(false), &["<s>", "</s>"]),
        (sentence_piece(true), &["<s>", "</s>"]),
        (unigram(), &["<s>", "</s>"]),
        (word_piece(), &["[CLS]", "[SEP]"]),
    ]
}

fn read(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

/// The token ids of a text in which special tokens are text.
fn split(json: &Value, text: &str) -> Vec<u32> {
    let mut tokenizer = read(json);
    tokenizer.inner.set_encode_special_tokens(true);
    tokenizer.inner.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// A piece of a rendered text.
#[derive(Clone, Copy, Debug)]
enum Piece<'a> {
    /// A special token of the template.
    Control(&'a str),
    /// Other text of the template.
    Template(&'a str),
    /// Text of a client.
    Client(&'a str),
}

fn encode(tokenizer: &Tokenizer, pieces: &[Piece<'_>]) -> Vec<u32> {
    let mut quoter = Quoter::new(tokenizer, std::iter::empty());
    let mut text = String::new();
    for piece in pieces {
        match *piece {
            Piece::Control(piece) | Piece::Template(piece) => text.push_str(piece),
            Piece::Client(piece) => {
                let mut piece = piece.to_owned();
                quoter.quote(&mut piece, Fragments::All).unwrap();
                text.push_str(&piece);
            }
        }
    }
    let text = crate::text::quoting::QuotedText { text, quotes: quoter.finish() };
    tokenizer.encode_up_to(&text, SpecialTokens::Exclude, usize::MAX).unwrap().unwrap()
}

/// The ids of control tokens, and between them those of the text.
fn expected(json: &Value, tokenizer: &Tokenizer, pieces: &[Piece<'_>]) -> Vec<u32> {
    let (mut ids, mut text) = (Vec::new(), String::new());
    for piece in pieces {
        match *piece {
            Piece::Control(token) => {
                ids.extend(split(json, &std::mem::take(&mut text)));
                ids.push(tokenizer.inner.token_to_id(token).unwrap());
            }
            Piece::Template(piece) | Piece::Client(piece) => text.push_str(piece),
        }
    }
    ids.extend(split(json, &text));
    ids
}

/// Returns the special tokens among `ids`, in order, except the tokens for unknown words.
fn control(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
    let unknown = ["<unk>", "[UNK]"].map(|token| tokenizer.inner.token_to_id(token));
    ids.iter().copied().filter(|&id| tokenizer.is_special(id) && !unknown.contains(&Some(id))).collect()
}

#[test]
fn clients_special_tokens_are_text_and_the_template_s_are_control_tokens() {
    for (json, special) in all() {
        let tokenizer = read(&json);
        for hostile in special {
            let doubled = format!("{hostile}{hostile} a {hostile}");
            let pieces = [
                Piece::Control(special[0]),
                Piece::Template("a "),
                Piece::Client(&doubled),
                Piece::Control(special[1]),
                Piece::Client(hostile),
                Piece::Template(" a"),
            ];
            let ids = encode(&tokenizer, &pieces);
            let honest =
                pieces.map(|piece| if let Piece::Client(_) = piece { Piece::Client("a") } else { piece });
            assert_eq!(
                control(&tokenizer, &ids),
                control(&tokenizer, &encode(&tokenizer, &honest)),
                "{hostile}"
            );
            // The library lets the pieces of a Unigram model make control tokens of text. A normaliser that works on
            // the whole text gives other ids than for its parts.
            let has_parts =
                json["added_tokens"].as_array().unwrap().iter().all(|token| token["normalized"] == false);
            if json["model"]["type"] != "Unigram" && has_parts {
                assert_eq!(ids, expected(&json, &tokenizer, &pieces), "{hostile}");
            }
        }
    }
}

#[test]
fn parts_of_a_special_token_from_several_sides_make_none() {
    for (json, special) in all() {
        let tokenizer = read(&json);
        let token = special[1];
        for at in (1..token.len()).filter(|&at| token.is_char_boundary(at)) {
            let (start, end) = token.split_at(at);
            for pieces in [
                [Piece::Client(start), Piece::Template(end)],
                [Piece::Template(start), Piece::Client(end)],
                [Piece::Client(start), Piece::Client(end)],
            ] {
                let ids = encode(&tokenizer, &pieces);
                let id = tokenizer.inner.token_to_id(token).unwrap();
                assert!(!ids.contains(&id), "{pieces:?}: {ids:?}");
            }
        }
    }
}

#[test]
fn a_special_token_that_only_the_normaliser_makes_is_text_too() {
    let mut json = word_piece();
    json["added_tokens"][2]["normalized"] = json!(true);
    let tokenizer = read(&json);
    let cls = tokenizer.inner.token_to_id("[CLS]").unwrap();
    assert!(tokenizer.encode("a [cls]", SpecialTokens::Exclude).unwrap().contains(&cls));
    assert!(!encode(&tokenizer, &[Piece::Client("a [cls] [CLS]")]).contains(&cls));
}

#[test]
fn a_long_text_with_quotes_has_the_ids_of_its_parts() {
    let json = byte_level();
    let tokenizer = read(&json);
    let hostile = "hello world; he said\nso 🎻 <|end|> <think>hello  ".repeat(4000);
    let pieces = [Piece::Control("<|role|>"), Piece::Client(&hostile), Piece::Control("<|end|>")];
    assert_eq!(encode(&tokenizer, &pieces), expected(&json, &tokenizer, &pieces));
}

proptest! {
    /// Quotes in a text change nothing of the text around them, nor anything where they quote no special token.
    #[test]
    fn the_way_of_quoted_texts_has_the_ids_of_the_library(
        parts in prop::collection::vec(prop::sample::select(vec![
            "a", " ", "hello", "<", ">", "|", "s", "/", "[", "]", "\n", "é", "end", "<|end|>", "<s>", "</s>", "[CLS]",
            "cls", "<think>", "🎻",
        ]), 0..12),
    ) {
        let text = parts.concat();
        let tokenizer = read(&byte_level());
        let mut quotes = Quoter::new(&tokenizer, std::iter::empty());
        quotes.quote(&mut "<|end|>".into(), Fragments::All).unwrap();
        let quotes = quotes.finish();
        for (json, _) in all() {
            let tokenizer = read(&json);
            let whole = tokenizer.inner.encode_fast(text.as_str(), false).unwrap();
            let quoted = tokenizer.encode_quoted(&text, &quotes).unwrap();
            prop_assert_eq!(quoted.get_ids(), whole.get_ids(), "{}", text);
            if json["model"]["type"] != "Unigram" {
                prop_assert_eq!(encode(&tokenizer, &[Piece::Client(&text)]), split(&json, &text), "{}", text);
            }
        }
    }
}
