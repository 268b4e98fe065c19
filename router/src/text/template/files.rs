//! The template and the special tokens in a checkpoint's files, read as Hugging Face's transformers do.

mod declared;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;
use tutti_runtime::Error;

use self::declared::{AddedTokenField, DeclaredTokens};

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
    /// The chat template for requests with tools in tokenizer_config.json, if it is another one.
    pub tool_template: Option<String>,
    /// Special tokens by name, such as `eos_token`.
    pub named: BTreeMap<String, String>,
    /// Tokens of the tokenizer besides those in tokenizer.json, in the order of their ids.
    pub added: Vec<AddedToken>,
    /// Tokens that the files only name: each becomes a token if no token has its text.
    pub declared: Vec<AddedToken>,
}

#[derive(Default, Deserialize)]
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
        let config = config.unwrap_or_default();
        let map: Option<Map<String, Value>> = special_tokens_map
            .filter(|_| config.added_tokens_decoder.is_none())
            .map(serde_json::from_slice)
            .transpose()
            .map_err(|e| invalid("special_tokens_map.json", e))?;
        let DeclaredTokens { named, tokens } = DeclaredTokens::of(config.rest, map.unwrap_or_default());
        let (template, tool_template) = match config.chat_template {
            Some(TemplateField::One(source)) => (Some(source), None),
            Some(TemplateField::Named(named)) => (of_name(&named, "default"), of_name(&named, "tool_use")),
            None => (None, None),
        };
        let added = config.added_tokens_decoder.unwrap_or_default();
        let added = added.into_values().map(|token| token.into_added(false)).collect();
        Ok(Self { template, tool_template, named, added, declared: tokens })
    }
}

/// The template of this name. Checkpoints with several templates name the plain one `default`, and the one for tools
/// `tool_use`.
fn of_name(named: &[NamedTemplate], name: &str) -> Option<String> {
    named.iter().find(|template| template.name == name).map(|template| template.template.clone())
}

#[cfg(test)]
mod tests;
