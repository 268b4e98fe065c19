//! The tokenizer's own end token, by the files of the tokenizer.
//!
//! The router reads these files in full, and reports faults in them. Here a file that cannot be read has no end token.

use std::{collections::BTreeMap, fs, path::Path};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

/// tokenizer_config.json or special_tokens_map.json.
#[derive(Default, Deserialize)]
struct Names {
    #[serde(default)]
    eos_token: Value,
    added_tokens_decoder: Option<BTreeMap<u32, Added>>,
}

#[derive(Deserialize)]
struct Added {
    content: String,
}

#[derive(Deserialize)]
struct AddedTokens {
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// The vocabulary of a tokenizer, which is read only if the token is no added one.
#[derive(Deserialize)]
struct Vocabulary {
    model: Value,
}

/// Returns the id of the tokenizer's end token.
pub(super) fn read(dir: &Path) -> Option<u32> {
    let Names { mut eos_token, added_tokens_decoder } =
        json(dir, "tokenizer_config.json").unwrap_or_default();
    if added_tokens_decoder.is_none()
        && let Some(names) =
            json::<Names>(dir, "special_tokens_map.json").filter(|names| !names.eos_token.is_null())
    {
        eos_token = names.eos_token;
    }
    let text = eos_token.as_str().or_else(|| eos_token.get("content")?.as_str())?;
    let listed = added_tokens_decoder.unwrap_or_default();
    let listed = listed.into_iter().find(|(_, token)| token.content == text).map(|(id, _)| id);
    listed
        .or_else(|| {
            let AddedTokens { added_tokens } = json(dir, "tokenizer.json")?;
            added_tokens.into_iter().find(|token| token.content == text).map(|token| token.id)
        })
        .or_else(|| {
            let Vocabulary { model } = json(dir, "tokenizer.json")?;
            u32::try_from(model.get("vocab")?.get(text)?.as_u64()?).ok()
        })
}

fn json<T: DeserializeOwned>(dir: &Path, name: &str) -> Option<T> {
    serde_json::from_slice(&fs::read(dir.join(name)).ok()?).ok()
}
