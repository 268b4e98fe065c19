//! The bytes of every token, as plain data.

mod byte_level;
mod tokenizer_json;

use crate::error::ConstraintError;

/// Maximum length of a token's text in bytes: the depth of the library's trie. A longer token is never allowed.
const MAX_TOKEN_BYTES: usize = 1000;
/// The byte that marks special tokens in the library's trie. No UTF-8 text has it.
const SPECIAL_MARKER: u8 = 0xff;

/// A token of a vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// No token: padding of the logits, or a token whose text a constraint cannot have. It is never allowed.
    Unused,
    /// A piece of text. It may be an incomplete character.
    Text(Vec<u8>),
    /// A special token, which is no text: a grammar has to name it.
    Special(String),
}

impl Token {
    /// Makes the token of this id a special one.
    fn make_special(&mut self, id: u32) {
        match self {
            Self::Special(_) => {}
            Self::Text(bytes) => *self = Self::Special(String::from_utf8_lossy(bytes).into_owned()),
            Self::Unused => *self = Self::Special(format!("<token {id}>")),
        }
    }
}

/// Facts about a vocabulary that its `tokenizer.json` does not have.
#[derive(Clone, Debug, Default)]
pub struct Declared<'a> {
    /// Number of logits. It may be greater than the number of tokens.
    pub logits: usize,
    /// The tokens that end a generation.
    pub ends: &'a [u32],
    /// Texts of tokens that a format uses as markers, such as `<tool_call>`. They become special tokens though the
    /// tokenizer does not call them special.
    pub markers: &'a [&'a str],
}

/// The tokens of a checkpoint.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    tokens: Vec<Token>,
    ends: Vec<u32>,
    /// Added tokens that are ordinary text, such as the `<tool_call>` of some families.
    added_text: Vec<u32>,
}

impl Vocabulary {
    /// Reads the tokens of a `tokenizer.json`.
    pub fn from_tokenizer_json(
        json: &serde_json::Value,
        declared: &Declared<'_>,
    ) -> Result<Self, ConstraintError> {
        let tokens = tokenizer_json::tokens(json, declared)?;
        let is_text = |id: &usize| matches!(tokens.get(*id), Some(Token::Text(_)));
        let added_text = tokenizer_json::added_ids(json).filter(is_text).map(|id| id as u32).collect();
        Ok(Self { added_text, ..Self::new(tokens, declared.ends)? })
    }

    /// A vocabulary of these tokens. A token that ends generations becomes a special token.
    pub fn new(mut tokens: Vec<Token>, ends: &[u32]) -> Result<Self, ConstraintError> {
        if ends.is_empty() {
            return Err(ConstraintError::at("vocabulary", "has no token that ends a generation"));
        }
        for &end in ends {
            let logits = tokens.len();
            let Some(token) = tokens.get_mut(end as usize) else {
                let message = format!("end token {end} is not below the number of logits, {logits}");
                return Err(ConstraintError::at("vocabulary", message));
            };
            token.make_special(end);
        }
        for token in &mut tokens {
            if let Token::Text(bytes) = token
                && (bytes.is_empty() || bytes.len() > MAX_TOKEN_BYTES || bytes.starts_with(&[SPECIAL_MARKER]))
            {
                *token = Token::Unused;
            }
        }
        Ok(Self { tokens, ends: ends.to_vec(), added_text: Vec::new() })
    }

    /// The vocabulary for grammars that [name tokens](crate::Constraint::names_tokens): all added tokens are special.
    /// Otherwise the free text in front of a marker would swallow a marker that the tokenizer calls ordinary text.
    pub fn with_added_special(&self) -> Self {
        let mut tokens = self.tokens.clone();
        for &id in &self.added_text {
            tokens[id as usize].make_special(id);
        }
        Self { tokens, ends: self.ends.clone(), added_text: Vec::new() }
    }

    /// The vocabulary with more special tokens, such as those of a thinking block. Text in front of such a token would
    /// swallow it if it were text itself.
    pub fn with_special(&self, special: &[u32]) -> Result<Self, ConstraintError> {
        let mut tokens = self.tokens.clone();
        for &id in special {
            let logits = tokens.len();
            match tokens.get_mut(id as usize) {
                Some(token) => token.make_special(id),
                None => {
                    let message = format!("special token {id} is not below the number of logits, {logits}");
                    return Err(ConstraintError::at("vocabulary", message));
                }
            }
        }
        Ok(Self { tokens, ends: self.ends.clone(), added_text: self.added_text.clone() })
    }

    /// The vocabulary for checks: the special tokens with their ids, and a token for each byte behind all others. A
    /// check against it gives the same errors as one against the whole vocabulary, in half of the time and without its
    /// memory.
    pub fn single_bytes(&self) -> Self {
        let special = self.tokens.iter().map(|token| match token {
            Token::Special(_) => token.clone(),
            _ => Token::Unused,
        });
        let bytes = (0..=u8::MAX).filter(|&byte| byte != SPECIAL_MARKER).map(|byte| Token::Text(vec![byte]));
        Self { tokens: special.chain(bytes).collect(), ends: self.ends.clone(), added_text: Vec::new() }
    }

    /// The vocabulary for checks from a `tokenizer.json` that may lack its vocabulary and merges. Special tokens have
    /// their texts. The other added tokens, such as markers of tool calls, have no texts here: a grammar can name their
    /// ids, as it can on a worker, where their texts are ordinary text.
    pub fn for_checks(json: &serde_json::Value, declared: &Declared<'_>) -> Result<Self, ConstraintError> {
        let mut tokens = tokenizer_json::tokens(json, declared)?;
        for id in tokenizer_json::added_ids(json) {
            if let Some(token @ Token::Text(_)) = tokens.get_mut(id) {
                *token = Token::Special(format!("\u{0}{id}"));
            }
        }
        Ok(Self::new(tokens, declared.ends)?.single_bytes())
    }

    /// The tokens, by id.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The tokens that end a generation.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The special tokens' ids and texts.
    pub(crate) fn special(&self) -> impl Iterator<Item = (u32, &str)> {
        self.tokens.iter().enumerate().filter_map(|(id, token)| match token {
            Token::Special(text) => Some((id as u32, text.as_str())),
            _ => None,
        })
    }

    /// The tokens as the library's trie has them: no bytes for no token, and a marker before special ones.
    pub(crate) fn trie_words(&self) -> Vec<Vec<u8>> {
        let word = |token: &Token| match token {
            Token::Unused => Vec::new(),
            Token::Text(bytes) => bytes.clone(),
            Token::Special(text) => {
                let mut word = vec![SPECIAL_MARKER];
                word.extend(text.bytes().take(MAX_TOKEN_BYTES));
                word
            }
        };
        self.tokens.iter().map(word).collect()
    }
}

#[cfg(test)]
mod tests;
