//! The template and the special tokens in a checkpoint's files, read as Hugging Face's transformers do.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;
use tutti_runtime::Error;

/// Names under which transformers set special tokens, whether the checkpoint has them or not.
pub const SPECIAL_TOKEN_NAMES: [&str; 8] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];

/// The contents of tokenizer_config.json and special_tokens_map.json.
#[derive(Debug, Default)]
pub struct TokenizerFiles {
    /// The chat template in tokenizer_config.json.
    pub template: Option<String>,
    /// Special tokens by name, such as `eos_token`.
    pub named: BTreeMap<String, String>,
    /// Tokens of the tokenizer besides those in tokenizer.json, in the order of their ids.
    pub added: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct TokenizerConfig {
    chat_template: Option<TemplateField>,
    added_tokens_decoder: Option<BTreeMap<u32, AddedTokenField>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// The members of a token, with the defaults of transformers.
#[derive(Deserialize)]
struct AddedTokenField {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl From<AddedTokenField> for AddedToken {
    fn from(field: AddedTokenField) -> Self {
        Self {
            content: field.content,
            single_word: field.single_word,
            lstrip: field.lstrip,
            rstrip: field.rstrip,
            normalized: field.normalized.unwrap_or(!field.special),
            special: field.special,
        }
    }
}

impl TokenizerFiles {
    /// Reads tokenizer_config.json and special_tokens_map.json. The latter holds only without `added_tokens_decoder`,
    /// which newer files have.
    pub fn read(config: Option<&[u8]>, special_tokens_map: Option<&[u8]>) -> Result<Self, Error> {
        let invalid = |file: &str, e: serde_json::Error| {
            Error::invalid(file.trim_end_matches(".json"), format!("{file}: {e}"))
        };
        let config: Option<TokenizerConfig> = config
            .map(serde_json::from_slice)
            .transpose()
            .map_err(|e| invalid("tokenizer_config.json", e))?;
        let Some(TokenizerConfig { chat_template, added_tokens_decoder, mut rest }) = config else {
            return Self::of_map(special_tokens_map.map(serde_json::from_slice).transpose())
                .map_err(|e| invalid("special_tokens_map.json", e));
        };
        if let (None, Some(map)) = (&added_tokens_decoder, special_tokens_map) {
            let map: Map<String, Value> =
                serde_json::from_slice(map).map_err(|e| invalid("special_tokens_map.json", e))?;
            rest.extend(map);
        }
        let template = match chat_template {
            Some(TemplateField::One(source)) => Some(source),
            Some(TemplateField::Named(named)) => default_of(named),
            None => None,
        };
        let added = added_tokens_decoder.unwrap_or_default().into_values().map(Into::into).collect();
        Ok(Self { template, added, ..Self::of_members(rest) })
    }

    fn of_map(map: Result<Option<Map<String, Value>>, serde_json::Error>) -> Result<Self, serde_json::Error> {
        Ok(map?.map(Self::of_members).unwrap_or_default())
    }

    /// Reads special tokens from members such as `eos_token`. Those that tokenizer.json lacks become tokens.
    fn of_members(members: Map<String, Value>) -> Self {
        let mut named: BTreeMap<String, String> = BTreeMap::new();
        for (key, value) in members {
            match (&value, key.as_str()) {
                // Further names, of models with media.
                (Value::Object(extra), "extra_special_tokens") => {
                    named.extend(
                        extra.iter().filter_map(|(key, value)| Some((key.clone(), token_text(value)?))),
                    );
                }
                _ if key.ends_with("_token") => named.extend(token_text(&value).map(|text| (key, text))),
                _ => {}
            }
        }
        Self { named, ..Self::default() }
    }

    /// The special tokens with common names, which are tokens even if tokenizer.json does not say so.
    pub fn special(&self) -> impl Iterator<Item = &str> {
        SPECIAL_TOKEN_NAMES.iter().filter_map(|name| self.named.get(*name).map(String::as_str))
    }
}

/// The template named `default`. Checkpoints with several templates (for tools, for retrieval) give this name to the
/// plain template.
fn default_of(named: Vec<NamedTemplate>) -> Option<String> {
    named.into_iter().find(|t| t.name == "default").map(|t| t.template)
}

/// The text of a special token, which is a string or an object with the string in `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}
