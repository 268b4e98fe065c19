//! The special tokens that tokenizer_config.json and special_tokens_map.json name.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::SPECIAL_TOKEN_NAMES;

/// Key of tokens without names of their own, as a list, or of further names, as an object.
const EXTRA: &str = "extra_special_tokens";
/// The older key of tokens without names.
const ADDITIONAL: &str = "additional_special_tokens";

/// Special tokens that files name.
#[derive(Debug, Default)]
pub(super) struct DeclaredTokens {
    /// The texts of tokens by name, such as `eos_token`: the variables of templates.
    pub named: BTreeMap<String, String>,
    /// All tokens, in the order in which transformers add those that tokenizer.json lacks.
    pub tokens: Vec<AddedToken>,
}

/// The members of a token, with the defaults of transformers.
#[derive(Clone, Deserialize)]
pub(super) struct AddedTokenField {
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

impl AddedTokenField {
    /// The token, which is special if its members say so or if `special` is true.
    pub fn into_added(self, special: bool) -> AddedToken {
        let special = special || self.special;
        AddedToken {
            content: self.content,
            single_word: self.single_word,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            normalized: self.normalized.unwrap_or(!special),
            special,
        }
    }
}

/// A token in a file: its text, or its members.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum TokenField {
    Text(String),
    Members(AddedTokenField),
}

impl TokenField {
    fn of(value: &Value) -> Option<Self> {
        Self::deserialize(value).ok()
    }

    fn into_added(self, special: bool) -> AddedToken {
        match self {
            Self::Text(text) => AddedToken::from(text, true),
            Self::Members(members) => members.into_added(special),
        }
    }
}

impl DeclaredTokens {
    /// Reads the members of tokenizer_config.json, and over them those of special_tokens_map.json.
    pub fn of(mut members: Map<String, Value>, map: Map<String, Value>) -> Self {
        let is_given = |value: Option<&Value>| match value {
            Some(Value::Array(list)) => !list.is_empty(),
            Some(Value::Object(names)) => !names.is_empty(),
            _ => false,
        };
        if !is_given(members.get(EXTRA))
            && let Some(list) = members.remove(ADDITIONAL)
        {
            members.insert(EXTRA.into(), list);
        }
        // Names that are not usual: those of objects in EXTRA come behind the keys of their own.
        let mut further = Map::new();
        let mut take_names = |members: &mut Map<String, Value>| {
            if let Some(Value::Object(names)) = members.get(EXTRA) {
                further.extend(names.clone());
                members.remove(EXTRA);
            }
        };
        take_names(&mut members);
        for (key, value) in map {
            match (members.get_mut(&key), value) {
                (Some(Value::Array(tokens)), Value::Array(more)) if key == EXTRA => {
                    let more: Vec<_> = more.into_iter().filter(|token| !tokens.contains(token)).collect();
                    tokens.extend(more);
                }
                (_, value) => {
                    members.insert(key, value);
                }
            }
        }
        take_names(&mut members);
        let list = match members.get(EXTRA) {
            Some(list) => Some(list),
            None => members.get(ADDITIONAL),
        };
        let list = list.and_then(Value::as_array).cloned().unwrap_or_default();
        let own = SPECIAL_TOKEN_NAMES.iter().filter(|name| **name != ADDITIONAL);
        let own = own.filter_map(|name| Some((*name, members.get(*name)?)));
        let others = members.iter().chain(&further).map(|(name, value)| (name.as_str(), value));
        let others = others.filter(|(name, _)| {
            !SPECIAL_TOKEN_NAMES.contains(name) && (name.ends_with("_token") || further.contains_key(*name))
        });
        let mut declared = Self::default();
        for (name, value) in own.chain(others) {
            let Some(token) = TokenField::of(value).map(|token| token.into_added(true)) else { continue };
            declared.named.insert(name.to_owned(), token.content.clone());
            declared.add(token);
        }
        for value in &list {
            // A token with a type says itself whether it is special, also in a list of special tokens.
            let is_special = value.get("__type").is_none();
            let token = TokenField::of(value).map(|token| token.into_added(is_special));
            token.into_iter().for_each(|token| declared.add(token));
        }
        declared
    }

    /// Adds a token unless there is one of its text.
    fn add(&mut self, token: AddedToken) {
        if !self.tokens.iter().any(|known| known.content == token.content) {
            self.tokens.push(token);
        }
    }
}
