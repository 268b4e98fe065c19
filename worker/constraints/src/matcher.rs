//! The state of one sequence that follows a constraint.

use std::sync::Arc;

use llguidance::{CancellationHandle, TokenParser, api::StopReason};

use crate::{environment::Tokens, error::ConstraintError};

/// The state of one sequence. It is host state: it survives preemption, and the generated tokens rebuild it.
///
/// An error ends the matcher, and with it the request, but no other one.
pub struct Matcher {
    inner: llguidance::Matcher,
    tokens: Arc<Tokens>,
}

/// The tokens that a mask allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Number of tokens that the mask allows.
    pub tokens: u32,
    /// True if the text may end here, so that the end tokens are allowed.
    pub may_end: bool,
    /// Number of end tokens that the mask allows.
    ends: u32,
}

impl Allowed {
    /// True if nothing but an end may follow. `min_tokens` does not hold then.
    pub fn only_ends(&self) -> bool {
        self.tokens == self.ends
    }
}

/// The state of a sequence behind a committed token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More tokens may follow.
    Continues,
    /// Nothing can follow. The request ends now, without an end token.
    Finished,
}

impl Matcher {
    pub(crate) fn new(parser: TokenParser, tokens: Arc<Tokens>) -> Self {
        Self { inner: llguidance::Matcher::new(Ok(parser)).into_cancellable(), tokens }
    }

    /// Number of 32-bit words in a mask.
    pub fn mask_words(&self) -> usize {
        self.tokens.usable.len()
    }

    /// Writes the mask of the next token: bit `t % 32` of word `t / 32` is set if token `t` is allowed. Words behind the
    /// vocabulary are cleared. Behind the end, the end tokens alone are allowed.
    ///
    /// # Errors
    ///
    /// If a limit of the library is exceeded or `words` has fewer than [`mask_words`](Self::mask_words).
    pub fn mask(&mut self, words: &mut [u32]) -> Result<Allowed, ConstraintError> {
        let needed = self.mask_words();
        if words.len() < needed {
            let message = format!("a mask of {needed} words does not fit into {}", words.len());
            return Err(ConstraintError::at("", message));
        }
        let allowed = self.inner.compute_mask_or_eos().map_err(failed)?;
        let may_end = self.is_accepting()?;
        let (mask, rest) = words.split_at_mut(needed);
        rest.fill(0);
        // A grammar may name ranges of tokens, and these may hold padding and end tokens.
        for ((word, &allowed), &usable) in mask.iter_mut().zip(allowed.as_slice()).zip(&self.tokens.usable) {
            *word = allowed & usable;
        }
        let text: u32 = mask.iter().map(|word| word.count_ones()).sum();
        let mut ends = 0;
        for &end in self.tokens.ends.iter().filter(|_| may_end) {
            let (word, bit) = (&mut mask[end as usize / 32], 1 << (end % 32));
            ends += u32::from(*word & bit == 0);
            *word |= bit;
        }
        match text + ends {
            0 => Err(ConstraintError::at("", "no token can follow")),
            tokens => Ok(Allowed { tokens, may_end, ends }),
        }
    }

    /// Advances by a token that the last mask allowed.
    pub fn commit(&mut self, token: u32) -> Result<Progress, ConstraintError> {
        self.inner.consume_token(token).map_err(failed)?;
        Ok(self.progress())
    }

    /// Advances by the tokens that a request generated before, as after a replay or on another worker. The state is that of
    /// a matcher that committed each of them.
    pub fn replay(&mut self, tokens: &[u32]) -> Result<Progress, ConstraintError> {
        self.inner.consume_tokens(tokens).map_err(failed)?;
        Ok(self.progress())
    }

    /// True if nothing can follow.
    pub fn is_finished(&self) -> bool {
        self.progress() == Progress::Finished
    }

    /// True if the text may end here.
    pub fn is_accepting(&mut self) -> Result<bool, ConstraintError> {
        match self.progress() {
            Progress::Finished => Ok(true),
            Progress::Continues => self.inner.is_accepting().map_err(failed),
        }
    }

    /// A second matcher in the same state, such as for another choice of the request. The two share the states of their
    /// lexer behind a lock.
    pub fn fork(&self) -> Self {
        Self { inner: self.inner.clone(), tokens: Arc::clone(&self.tokens) }
    }

    /// Stops this matcher from another thread. The operation that runs fails, and so does the request.
    pub(crate) fn cancellation(&self) -> Option<CancellationHandle> {
        self.inner.cancellation_handle()
    }

    fn progress(&self) -> Progress {
        match self.inner.stop_reason() {
            StopReason::NoExtension | StopReason::EndOfSentence => Progress::Finished,
            _ => Progress::Continues,
        }
    }
}

fn failed(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError::of_library("", &format!("{error:#}"))
}
