//! The tokenizer and the chat template of a GGUF file, as the files of Hugging Face's libraries.

use serde_json::{Map, Value, json};

use crate::gguf::{self, Header};

/// Token types in `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Control tokens that end an answer.
const ENDS: [&str; 5] = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"];

/// A kind of pre-tokenizer, by its name in `tokenizer.ggml.pre`.
struct Kind {
    names: &'static [&'static str],
    /// Expression by which a text is split; `None` for GPT-2's, with single digits.
    split: Option<&'static str>,
    /// True if texts are normalised to NFC.
    nfc: bool,
    /// True if a piece that is a token is not split by merges.
    ignore_merges: bool,
    /// True if a prompt begins with the token of the beginning, unless the metadata differ.
    adds_bos: bool,
}

const KINDS: [Kind; 3] = [
    Kind { names: &["smollm"], split: None, nfc: false, ignore_merges: false, adds_bos: false },
    Kind {
        names: &["qwen2"],
        split: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        nfc: true,
        ignore_merges: false,
        adds_bos: false,
    },
    Kind {
        names: &["llama-bpe", "llama3", "llama-v3"],
        split: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        nfc: false,
        ignore_merges: true,
        adds_bos: true,
    },
];

fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

fn kind(header: &Header) -> Result<&'static Kind, String> {
    match header.text(&key("model"))? {
        Some("gpt2") => {}
        other => {
            let other = other.unwrap_or("none");
            return Err(format!("tokenizer.ggml.model: {other:?} is not supported; supported: gpt2"));
        }
    }
    let name = header.text(&key("pre"))?.unwrap_or("default");
    KINDS.iter().find(|kind| kind.names.contains(&name)).ok_or_else(|| {
        let supported: Vec<_> = KINDS.iter().flat_map(|kind| kind.names).copied().collect();
        format!("tokenizer.ggml.pre: {name:?} is not supported; supported: {}", supported.join(", "))
    })
}

/// Returns the text of the token whose id is the value of a key.
fn token<'a>(header: &'a Header, name: &str) -> Result<Option<(u64, &'a str)>, String> {
    let Some(id) = header.integer(&key(name))? else { return Ok(None) };
    let tokens = header.texts(&key("tokens"))?;
    match usize::try_from(id).ok().and_then(|id| tokens.get(id)) {
        Some(text) => Ok(Some((id, text))),
        None => Err(format!("tokenizer.ggml.{name}: {id} of a vocabulary of {}", tokens.len())),
    }
}

/// Returns the type of each token; nothing if the metadata have no types.
fn token_types(header: &Header) -> Result<&[i64], String> {
    let tokens = header.texts(&key("tokens"))?;
    match header.metadata.get(&key("token_type")) {
        Some(gguf::Value::Integers(types)) if types.len() == tokens.len() => Ok(types),
        None => Ok(&[]),
        Some(_) => Err("tokenizer.ggml.token_type: must have an integer per token".into()),
    }
}

/// Makes a `tokenizer.json`.
pub(super) fn tokenizer(header: &Header) -> Result<Value, String> {
    let kind = kind(header)?;
    let tokens = header.texts(&key("tokens"))?;
    let types = token_types(header)?;
    if header.flag(&key("add_eos_token"))? == Some(true) {
        return Err("tokenizer.ggml.add_eos_token: true is not supported".into());
    }
    let mut vocabulary = Map::new();
    for (id, text) in tokens.iter().enumerate() {
        if vocabulary.insert(text.clone(), id.into()).is_some() {
            return Err(format!("tokenizer.ggml.tokens: {text:?} occurs twice"));
        }
    }
    let is_added = |&(id, _): &(usize, &String)| {
        types.get(id).is_some_and(|&kind| kind == CONTROL || kind == USER_DEFINED)
    };
    let added = |(id, text): (usize, &String)| {
        json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": types[id] == CONTROL,
        })
    };
    let added: Vec<Value> = tokens.iter().enumerate().filter(is_added).map(added).collect();
    let byte_level = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    let first = match kind.split {
        None => json!({ "type": "Digits", "individual_digits": true }),
        Some(pattern) => {
            json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
        }
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": kind.nfc.then(|| json!({ "type": "NFC" })),
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [first, byte_level(kind.split.is_none())] },
        "post_processor": post_processor(header, kind)?,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": kind.ignore_merges, "vocab": vocabulary, "merges": header.texts(&key("merges"))?,
        },
    }))
}

/// Makes the post-processor that adds the token of the beginning; null if there is none.
fn post_processor(header: &Header, kind: &Kind) -> Result<Value, String> {
    if !header.flag(&key("add_bos_token"))?.unwrap_or(kind.adds_bos) {
        return Ok(Value::Null);
    }
    let Some((id, text)) = token(header, "bos_token_id")? else { return Ok(Value::Null) };
    let special = json!({ "SpecialToken": { "id": text, "type_id": 0 } });
    let sequence = |name: &str, type_id: u8| json!({ "Sequence": { "id": name, "type_id": type_id } });
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [special, sequence("A", 0)],
        "pair": [special, sequence("A", 0), sequence("B", 1)],
        "special_tokens": { text: { "id": text, "ids": [id], "tokens": [text] } },
    }))
}

/// Makes a `tokenizer_config.json` with the chat template and the named tokens.
pub(super) fn config(header: &Header) -> Result<Value, String> {
    let mut config = Map::new();
    for (name, key) in
        [("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id")]
    {
        if let Some((_, text)) = token(header, key)? {
            config.insert(name.into(), text.into());
        }
    }
    if let Some(template) = header.text("tokenizer.chat_template")? {
        config.insert("chat_template".into(), template.into());
    }
    Ok(Value::Object(config))
}

/// Makes a `generation_config.json` with the tokens that end an answer.
pub(super) fn generation_config(header: &Header) -> Result<Value, String> {
    let mut ends = Vec::new();
    for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        if let Some((id, _)) = token(header, name)?
            && !ends.contains(&id)
        {
            ends.push(id);
        }
    }
    // As in llama.cpp, these tokens end an answer whatever the metadata name. A file may have no tokenizer.
    if header.metadata.contains_key(&key("tokens")) {
        let types = token_types(header)?;
        for (id, text) in header.texts(&key("tokens"))?.iter().enumerate() {
            let is_end = ENDS.contains(&text.as_str()) && types.get(id) == Some(&CONTROL);
            if is_end && !ends.contains(&(id as u64)) {
                ends.push(id as u64);
            }
        }
    }
    Ok(if ends.is_empty() { json!({}) } else { json!({ "eos_token_id": ends }) })
}
