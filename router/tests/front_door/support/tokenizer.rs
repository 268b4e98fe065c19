//! Small tokenizers, as the bytes of a tokenizer.json.

use serde_json::{Value, json};

/// Size of the model's vocabulary. Ids from 264 on are unknown to the tokenizer, as with a padded embedding table.
pub const VOCAB: u32 = 270;
/// `<|end|>`, the end-of-sequence token.
pub const END: u32 = 261;

/// The characters of GPT-2's byte-level alphabet, indexed by byte.
fn stand_ins() -> Vec<char> {
    let printable =
        |b: u32| (0x21..=0x7e).contains(&b) || (0xa1..=0xac).contains(&b) || (0xae..=0xff).contains(&b);
    let mut next = 0x100;
    (0..256u32)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap()
        })
        .collect()
}

/// A byte-level BPE tokenizer.
///
/// The token ids 0 to 255 are single bytes. 256 is `he`, 257 `ll`, 258 `hell`, 259 `hello`. The special tokens are 260
/// (`<|begin|>`), 261 (`<|end|>`) and 262 (`<|role|>`). 263 (`<think>`) is an added token that is not special.
pub fn byte_level() -> Vec<u8> {
    with_markers(&[])
}

/// The tokenizer with further added tokens, which are special. Their ids count from 264.
pub fn with_markers(markers: &[&str]) -> Vec<u8> {
    let mut vocab: serde_json::Map<String, Value> =
        stand_ins().iter().enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    for (id, token) in ["he", "ll", "hell", "hello"].into_iter().enumerate() {
        vocab.insert(token.into(), json!(256 + id));
    }
    let added = |id: u32, content: &str, special: bool| {
        json!({ "id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false })
    };
    let mut tokens = vec![
        added(260, "<|begin|>", true),
        added(261, "<|end|>", true),
        added(262, "<|role|>", true),
        added(263, "<think>", false),
    ];
    // Ids of added tokens follow those of the vocabulary, so they have no gaps.
    tokens.extend(markers.iter().zip(264..).map(|(text, id)| added(id, text, true)));
    json!({
        "version": "1.0",
        "added_tokens": tokens,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": ["h e", "l l", "he ll", "hell o"] },
    })
    .to_string()
    .into_bytes()
}
