//! The tokens of a `tokenizer.json`.

use serde_json::Value;

use super::{Declared, Token, byte_level};
use crate::error::ConstraintError;

/// The way from a token's spelling to its bytes.
enum Spelling {
    /// GPT-2's byte-level alphabet.
    ByteLevel,
    /// SentencePiece: a character stands for a space, and `<0x0A>` for a byte.
    SentencePiece { space: String },
}

impl Spelling {
    fn of(json: &Value) -> Result<Self, ConstraintError> {
        let model = &json["model"];
        let decoders = parts(&json["decoder"], "decoders");
        let pre_tokenizers = parts(&json["pre_tokenizer"], "pretokenizers");
        let has = |kind: &str| decoders.iter().any(|decoder| decoder["type"] == kind);
        if has("ByteLevel") || pre_tokenizers.iter().any(|part| part["type"] == "ByteLevel") {
            return Ok(Self::ByteLevel);
        }
        let replaced = decoders.iter().find(|part| part["type"] == "Replace" && part["content"] == " ");
        let metaspace = decoders.iter().chain(&pre_tokenizers).find(|part| part["type"] == "Metaspace");
        let space = replaced
            .and_then(|part| part["pattern"]["String"].as_str())
            .or_else(|| metaspace.and_then(|part| part["replacement"].as_str()));
        if space.is_some()
            || has("ByteFallback")
            || model["byte_fallback"] == true
            || model["type"] == "Unigram"
        {
            return Ok(Self::SentencePiece { space: space.unwrap_or("▁").to_owned() });
        }
        // WordPiece's decoder joins and cleans words, so the bytes of a token depend on those around it.
        Err(invalid("has a decoder whose tokens have no known bytes"))
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => byte_level::bytes(token),
            Self::SentencePiece { space } => match fallback_byte(token) {
                Some(byte) => vec![byte],
                None => token.replace(space.as_str(), " ").into_bytes(),
            },
        }
    }
}

/// Reads the tokens. The result has as many as there are logits, or more if the tokenizer has more.
pub(super) fn tokens(json: &Value, declared: &Declared<'_>) -> Result<Vec<Token>, ConstraintError> {
    let spelling = Spelling::of(json)?;
    let mut tokens = vec![Token::Unused; declared.logits];
    for (spelled, id) in vocabulary(&json["model"]["vocab"])? {
        set(&mut tokens, id, Token::Text(spelling.bytes(spelled)))?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(text)) = (added["id"].as_u64(), added["content"].as_str()) else {
            return Err(invalid("has an added token without `id` or `content`"));
        };
        let is_special = added["special"] == true || declared.markers.contains(&text);
        let token = match is_special {
            true => Token::Special(text.to_owned()),
            false => Token::Text(text.as_bytes().to_vec()),
        };
        set(&mut tokens, id, token)?;
    }
    Ok(tokens)
}

/// The ids of the added tokens, special ones and others.
pub(super) fn added_ids(json: &Value) -> impl Iterator<Item = usize> {
    let added = json["added_tokens"].as_array().into_iter().flatten();
    added.filter_map(|added| usize::try_from(added["id"].as_u64()?).ok())
}

/// The spellings and ids of a model's vocabulary: an object, or in Unigram models a list of spellings and scores.
fn vocabulary(vocab: &Value) -> Result<Vec<(&str, u64)>, ConstraintError> {
    let pairs: Option<Vec<(&str, u64)>> = match vocab {
        Value::Object(members) => {
            members.iter().map(|(spelled, id)| Some((spelled.as_str(), id.as_u64()?))).collect()
        }
        Value::Array(list) => {
            let spelled = |n: usize| list[n].get(0)?.as_str();
            (0..list.len()).map(|n| Some((spelled(n)?, n as u64))).collect()
        }
        _ => None,
    };
    pairs.ok_or_else(|| invalid("has no vocabulary of spellings and ids"))
}

/// Sets a token. An id far beyond the logits is a mistake of the file, and must not take memory.
fn set(tokens: &mut Vec<Token>, id: u64, token: Token) -> Result<(), ConstraintError> {
    const MAX_TOKENS: u64 = 4 << 20;
    if id >= MAX_TOKENS {
        return Err(invalid(format!("has the token id {id}; the limit is {MAX_TOKENS}")));
    }
    let id = id as usize;
    if id >= tokens.len() {
        tokens.resize(id + 1, Token::Unused);
    }
    tokens[id] = token;
    Ok(())
}

/// The parts of a sequence of decoders or pre-tokenizers, or the only one.
fn parts<'a>(component: &'a Value, list: &str) -> Vec<&'a Value> {
    match component[list].as_array() {
        Some(parts) => parts.iter().collect(),
        None => vec![component],
    }
}

/// The byte of a byte-fallback token such as `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    match hex.len() == 2 && hex.is_ascii() {
        true => u8::from_str_radix(hex, 16).ok(),
        false => None,
    }
}

fn invalid(message: impl Into<String>) -> ConstraintError {
    ConstraintError::at("tokenizer.json", message)
}
