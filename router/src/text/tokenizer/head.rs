//! The head of a `tokenizer.json`: all from which the texts of tokens follow, without the vocabulary and the merges.

use serde::Deserialize;
use serde_json::{Value, json};

/// The members that are read. The vocabulary and the merges are passed over, and take no memory.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Head {
    decoder: Value,
    pre_tokenizer: Value,
    added_tokens: Value,
    model: Model,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Model {
    r#type: Value,
    byte_fallback: Value,
}

/// Reads the head as a `tokenizer.json` with an empty vocabulary.
pub fn read(json: &[u8]) -> serde_json::Result<Value> {
    let Head { decoder, pre_tokenizer, added_tokens, model: Model { r#type, byte_fallback } } =
        serde_json::from_slice(json)?;
    let model = json!({ "type": r#type, "byte_fallback": byte_fallback, "vocab": {} });
    Ok(json!({
        "decoder": decoder, "pre_tokenizer": pre_tokenizer, "added_tokens": added_tokens, "model": model,
    }))
}
