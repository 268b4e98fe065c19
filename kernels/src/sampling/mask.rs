//! Masks of tokens.

use std::sync::Arc;

/// The tokens that may be sampled from a row: bit `t % 32` of word `t / 32` is set if token `t` is allowed. Bits behind
/// the vocabulary have no meaning. Clones share their words, so rows with the same mask cost one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask(Arc<[u32]>);

impl TokenMask {
    /// Creates a mask from its words.
    pub fn new(words: impl Into<Arc<[u32]>>) -> Self {
        Self(words.into())
    }

    /// Creates a mask of `words` words that allows these tokens. Tokens behind the last word are left out.
    pub fn of_tokens(words: usize, tokens: impl IntoIterator<Item = u32>) -> Self {
        let mut mask = vec![0; words];
        for token in tokens {
            if let Some(word) = mask.get_mut(token as usize / 32) {
                *word |= 1 << (token % 32);
            }
        }
        Self::new(mask)
    }

    /// Number of words in a mask of a vocabulary.
    pub fn words_of(vocabulary: usize) -> usize {
        vocabulary.div_ceil(32)
    }

    /// The words.
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// True if the mask allows a token.
    pub fn allows(&self, token: u32) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// True if both masks share their words.
    pub fn shares_words(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
