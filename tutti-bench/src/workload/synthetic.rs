//! Requests made from a seed.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Content, Request};
use crate::{lengths::Lengths, random::Draw};

/// Kind of a prompt's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Alphabet {
    /// Token ids below `vocab_size`. A prompt has exactly the drawn length.
    TokenIds,
    /// Common short words, each about one token long.
    Words,
}

/// Requests with random prompts. Each request depends only on the seed and on its own number.
#[derive(Clone, Debug, Serialize)]
pub struct Synthetic {
    /// Prompt lengths in tokens, prefixes included.
    pub input_tokens: Lengths,
    /// Output lengths in tokens.
    pub output_tokens: Lengths,
    /// Number of tokens at the start of each prompt that other prompts share.
    pub shared_prefix: u32,
    /// Number of different shared prefixes. Each request has a random one of them.
    pub prefixes: u32,
    /// Kind of the prompts' content.
    pub alphabet: Alphabet,
    /// Exclusive bound of token ids.
    pub vocab_size: u32,
    /// Seed of all draws.
    pub seed: u64,
    /// Further fields of each request.
    pub extra: Map<String, Value>,
    /// Number of the next request.
    #[serde(skip)]
    pub next: u64,
}

/// Words that common vocabularies contain as one token with a leading space.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with",
    "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not",
    "what", "all", "were", "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she",
    "do", "how", "their", "if", "will", "up", "other", "about", "out", "many", "then", "them", "these", "so",
    "some", "her", "would", "make", "like", "him",
];

impl Synthetic {
    /// Makes the next request.
    pub fn request(&mut self) -> Request {
        let mut draw = Draw::numbered(self.seed, self.next);
        self.next += 1;
        let input = self.input_tokens.draw(&mut draw);
        let max_tokens = self.output_tokens.draw(&mut draw);
        let shared = self.shared_prefix.min(input);
        // Prefixes use the sequences with the highest numbers. No request uses these sequences.
        let prefix = u64::from(draw.below(self.prefixes));
        let mut common = Draw::numbered(self.seed, u64::MAX - 1 - prefix);
        let seed = draw.word() >> 32;
        let draws = (0..input).map(|index| if index < shared { &mut common } else { &mut draw }.unit());
        Request {
            content: self.alphabet.content(draws, self.vocab_size),
            max_tokens,
            seed: Some(seed),
            at: None::<Duration>,
            extra: self.extra.clone(),
        }
    }
}

impl Alphabet {
    fn content(self, draws: impl Iterator<Item = f64>, vocab_size: u32) -> Content {
        match self {
            Self::TokenIds => {
                Content::TokenIds(draws.map(|unit| (unit * f64::from(vocab_size)) as u32).collect())
            }
            Self::Words => {
                let words: Vec<&str> =
                    draws.map(|unit| WORDS[(unit * WORDS.len() as f64) as usize]).collect();
                Content::Text(words.join(" "))
            }
        }
    }
}
