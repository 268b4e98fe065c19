//! The tokens of a request: the prompt, which other parts of the worker share, and the tokens after the prompt.

use std::{borrow::Cow, ops::Range, sync::Arc};

/// One token for each position of a request. The prompt is in memory once, however many parts of a worker use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    prompt: Arc<[u32]>,
    more: Vec<u32>,
}

impl Tokens {
    /// The tokens of a shared prompt, and `more` tokens after it.
    pub fn new(prompt: Arc<[u32]>, more: Vec<u32>) -> Self {
        Self { prompt, more }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.more.len()
    }

    /// True if there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a token.
    pub(crate) fn push(&mut self, token: u32) {
        self.more.push(token);
    }

    /// The tokens at these positions. They are copied only if the range crosses the end of the prompt.
    pub(crate) fn at(&self, positions: Range<usize>) -> Cow<'_, [u32]> {
        let end = self.prompt.len();
        if positions.end <= end {
            Cow::Borrowed(&self.prompt[positions])
        } else if positions.start >= end {
            Cow::Borrowed(&self.more[positions.start - end..positions.end - end])
        } else {
            Cow::Owned([&self.prompt[positions.start..], &self.more[..positions.end - end]].concat())
        }
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(tokens: Vec<u32>) -> Self {
        Self::new(tokens.into(), Vec::new())
    }
}

#[cfg(test)]
mod tests;
