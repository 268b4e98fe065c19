//! Vocabularies made for tests, and a sampler that walks under masks.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(dead_code, reason = "each test uses some of it")]

pub mod judge;
pub mod schemas;

use std::time::Duration;

use serde_json::{Map, Value, json};
use tutti_constraints::{
    Constraint, ConstraintError, Declared, Environment, Kind, Matcher, Progress, Strictness, Token,
    Vocabulary,
};

/// Pieces that real vocabularies have: they cross the tokens of JSON.
const PIECES: &[&str] = &[
    "{\"", "\":", "\",", "\"}", "\": \"", "\", \"", "},", "]}", "[]", "{}", "[{", "null", "true", "false",
    " \"", "  ", "name", "a", "b", "value", "ab", "12", "0.", "00", "-1", "the", " the", "1e", "\\n", "\\\"",
    "2024-", "\n\n", "é",
];

/// A byte-level vocabulary: the tokens of bytes, some pieces, special tokens and padding.
pub fn byte_level() -> Vocabulary {
    let mut vocab = Map::new();
    for piece in
        (0..=u8::MAX).map(|byte| vec![byte]).chain(PIECES.iter().map(|piece| piece.as_bytes().to_vec()))
    {
        let spelled: String = piece.iter().map(|&byte| stand_in(byte)).collect();
        let id = vocab.len();
        vocab.entry(spelled).or_insert(json!(id));
    }
    let first = vocab.len();
    let added = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"];
    let added: Vec<Value> = added
        .iter()
        .enumerate()
        .map(|(n, text)| json!({"id": first + n, "content": text, "special": text.starts_with("<|")}))
        .collect();
    let json = json!({
        "model": {"type": "BPE", "vocab": vocab},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": added,
    });
    let ends = [first as u32 + 1, first as u32 + 2];
    let declared = Declared { logits: 333, ends: &ends, markers: &["<think>", "</think>", "<tool_call>"] };
    Vocabulary::from_tokenizer_json(&json, &declared).unwrap()
}

/// A SentencePiece vocabulary with byte fallback and padding.
pub fn sentence_piece() -> Vocabulary {
    let mut vocab = Map::new();
    let fallback = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
    let chars = (' '..='~').map(|c| if c == ' ' { "▁".to_owned() } else { c.to_string() });
    let pieces = PIECES.iter().map(|piece| piece.replace(' ', "▁"));
    let special = ["<unk>", "<s>", "</s>"].map(String::from);
    for piece in special.into_iter().chain(fallback).chain(chars).chain(pieces) {
        let id = vocab.len();
        vocab.entry(piece).or_insert(json!(id));
    }
    let added = ["<unk>", "<s>", "</s>"];
    let added: Vec<Value> = added
        .iter()
        .enumerate()
        .map(|(id, text)| json!({"id": id, "content": text, "special": true}))
        .collect();
    let json = json!({
        "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "added_tokens": added,
    });
    Vocabulary::from_tokenizer_json(&json, &Declared { logits: 500, ends: &[2], markers: &[] }).unwrap()
}

/// The character that stands for a byte in GPT-2's alphabet.
fn stand_in(byte: u8) -> char {
    let is_printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match is_printable {
        true => char::from(byte),
        false => {
            let before =
                (0..byte).filter(|byte| !matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)).count();
            char::from_u32(0x100 + before as u32).unwrap()
        }
    }
}

/// The id of a special token.
pub fn special(vocabulary: &Vocabulary, text: &str) -> u32 {
    let token = Token::Special(text.to_owned());
    vocabulary.tokens().iter().position(|other| *other == token).unwrap() as u32
}

/// A vocabulary, prepared for masks and for checks.
pub struct Tested {
    pub vocabulary: Vocabulary,
    pub environment: Environment,
    pub checks: Environment,
}

impl Tested {
    pub fn new(vocabulary: Vocabulary) -> Self {
        let environment = Environment::new(&vocabulary).unwrap();
        let checks = Environment::new(&vocabulary.single_bytes()).unwrap();
        Self { vocabulary, environment, checks }
    }

    /// Checks a constraint, without the time limit: tests hold on slow machines.
    pub fn check(&self, constraint: &Constraint) -> Result<(), ConstraintError> {
        self.checks.check(constraint, Duration::from_secs(3600))
    }

    /// The text of tokens. Special tokens are their texts.
    pub fn text(&self, tokens: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &token in tokens {
            match &self.vocabulary.tokens()[token as usize] {
                Token::Text(text) => bytes.extend_from_slice(text),
                Token::Special(text) => bytes.extend_from_slice(text.as_bytes()),
                Token::Unused => panic!("token {token} is padding"),
            }
        }
        String::from_utf8(bytes).unwrap()
    }

    /// Tokens of a text, the longest ones first.
    pub fn tokens(&self, text: &str) -> Vec<u32> {
        let (mut tokens, mut rest) = (Vec::new(), text.as_bytes());
        while !rest.is_empty() {
            let begins = |token: &Token| match token {
                Token::Text(text) if rest.starts_with(text) => text.len(),
                Token::Special(text) if rest.starts_with(text.as_bytes()) => text.len(),
                _ => 0,
            };
            let lengths = self.vocabulary.tokens().iter().map(begins).enumerate();
            let (token, length) = lengths.max_by_key(|&(_, length)| length).unwrap();
            tokens.push(token as u32);
            rest = &rest[length..];
        }
        tokens
    }

    /// True if a constraint admits a text and may end behind it.
    pub fn admits(&self, constraint: &Constraint, text: &str) -> bool {
        let mut matcher = self.environment.compile(constraint).unwrap();
        let mut words = vec![0; matcher.mask_words()];
        for token in self.tokens(text) {
            if matcher.is_finished() || matcher.mask(&mut words).is_err() || !is_set(&words, token) {
                return false;
            }
            matcher.commit(token).unwrap();
        }
        matcher.is_accepting().unwrap()
    }
}

/// True if a mask has a token.
pub fn is_set(words: &[u32], token: u32) -> bool {
    words[token as usize / 32] >> (token % 32) & 1 == 1
}

/// The tokens of a mask.
pub fn set_tokens(words: &[u32]) -> Vec<u32> {
    (0..words.len() as u32 * 32).filter(|&token| is_set(words, token)).collect()
}

/// A walk's end.
#[derive(Debug, PartialEq)]
pub enum End {
    /// Nothing could follow, or an end token was drawn.
    Ended,
    /// The walk was longer than its limit.
    Cut,
}

/// A look at a walk: the matcher, the tokens before the mask, and the mask.
pub type Look<'a> = dyn FnMut(&mut Matcher, &[u32], &[u32]) + 'a;

/// Draws tokens under masks.
pub fn walk(
    tested: &Tested,
    matcher: &mut Matcher,
    random: &mut fastrand::Rng,
    most: usize,
    each: &mut Look<'_>,
) -> (Vec<u32>, End) {
    let mut words = vec![0; matcher.mask_words()];
    let mut tokens = Vec::new();
    while tokens.len() < most {
        let allowed = matcher.mask(&mut words).unwrap();
        each(matcher, &tokens, &words);
        if allowed.may_end && (allowed.only_ends() || random.u8(..4) == 0) {
            return (tokens, End::Ended);
        }
        let mut candidates = set_tokens(&words);
        candidates.retain(|token| !tested.vocabulary.ends().contains(token));
        // Closing tokens more often than by chance, so that walks end.
        if random.bool() {
            let closes = |token: &u32| match &tested.vocabulary.tokens()[*token as usize] {
                Token::Text(text) => text.iter().any(|byte| b"\"}]".contains(byte)),
                _ => false,
            };
            let closing: Vec<u32> = candidates.iter().copied().filter(closes).collect();
            if !closing.is_empty() {
                candidates = closing;
            }
        }
        let token = candidates[random.usize(..candidates.len())];
        tokens.push(token);
        if matcher.commit(token).unwrap() == Progress::Finished {
            return (tokens, End::Ended);
        }
    }
    (tokens, End::Cut)
}

/// A schema as a constraint with bounded white space.
pub fn of_schema(schema: Value) -> Constraint {
    Constraint::new(Kind::JsonSchema { schema, strictness: Strictness::Lenient })
}
