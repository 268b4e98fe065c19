//! Tokenizers for the unit tests.

use std::sync::{Arc, LazyLock};

use serde_json::json;

#[allow(dead_code)]
#[path = "../tests/front_door/support/tokenizer.rs"]
mod json_bytes;

pub use json_bytes::{VOCAB, byte_level as tokenizer_json};

use crate::text::tokenizer::Tokenizer;

/// The byte-level tokenizer of the tests; see [`tokenizer_json`].
pub fn tokenizer() -> Arc<Tokenizer> {
    static BUILT: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::from_bytes(&tokenizer_json()).unwrap()));
    BUILT.clone()
}

/// A tokenizer whose decoder puts a space between two words, and no space before the first word. Token 7 is empty.
pub fn metaspace_tokenizer() -> Arc<Tokenizer> {
    let vocab = json!({ "▁a": 0, "▁b": 1, "c": 2, "▁": 3, "é": 4, "▁日": 5, "<unk>": 6, "": 7 });
    let json = json!({
        "version": "1.0",
        "pre_tokenizer": { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
        "decoder": { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>" },
    });
    Arc::new(Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
}

/// A tokenizer like Llama 2's: words begin with `▁`, and characters without a token become byte tokens.
pub fn byte_fallback_tokenizer() -> Arc<Tokenizer> {
    let bytes = (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte)));
    let words =
        ["▁", "a", "b", "▁a", "<unk>"].into_iter().zip(256..).map(|(word, id)| (word.into(), json!(id)));
    let vocab: serde_json::Map<_, _> = bytes.chain(words).collect();
    let json = json!({
        "version": "1.0",
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        ] },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": { "type": "BPE", "vocab": vocab, "merges": ["▁ a"], "byte_fallback": true, "unk_token": "<unk>" },
    });
    Arc::new(Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
}

/// A tokenizer of words like BERT's: `##` marks the parts behind the first of a word, and the decoder removes spaces
/// before punctuation. The fuzzers do not need it.
#[cfg(test)]
pub fn word_piece_tokenizer() -> Arc<Tokenizer> {
    let words =
        ["[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "ab", "é", "日", ".", "'", "##a", "##b", "##c", "##é"];
    let vocab: serde_json::Map<_, _> =
        words.into_iter().zip(0..).map(|(word, id)| (word.to_owned(), json!(id))).collect();
    let json = json!({
        "version": "1.0",
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": false, "lowercase": false },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": { "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100 },
    });
    Arc::new(Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
}
