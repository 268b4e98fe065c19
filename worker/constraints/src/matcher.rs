//! The state of one sequence that follows a constraint.

use std::{panic::AssertUnwindSafe, sync::Arc};

use llguidance::{CancellationHandle, TokenParser, api::StopReason, panic_utils};

use crate::{
    environment::Tokens,
    error::{ConstraintError, NO_TOKEN, TOO_LONG},
};

/// The state of one sequence. It is host state: it survives preemption, and the generated tokens rebuild it.
///
/// An error ends the matcher, and with it the request, but no other one: matchers share nothing that changes.
pub struct Matcher {
    state: State,
    tokens: Arc<Tokens>,
    canceller: Canceller,
}

enum State {
    Working(Box<TokenParser>),
    Failed(ConstraintError),
}

/// Stops a matcher from another thread, such as at a time limit. The operation that runs fails, and so does the
/// request.
#[derive(Clone, Default)]
pub struct Canceller(CancellationHandle);

impl Canceller {
    /// Stops the matcher for ever.
    pub fn cancel(&self) {
        self.0.cancel();
    }

    /// True if the matcher was stopped.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
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
        self.others() == 0
    }

    /// Number of tokens that the mask allows besides end tokens.
    pub fn others(&self) -> u32 {
        self.tokens - self.ends
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
    /// A matcher in the state of a parser. It copies the states of the lexer: a lexer that has reached a limit fails
    /// for all that share it, so what one client's request visits would end another's.
    pub(crate) fn copy_of(parser: &TokenParser, tokens: Arc<Tokens>) -> Self {
        let mut parser = Box::new(parser.deep_clone());
        let canceller = Canceller(parser.enable_cancellation());
        Self { state: State::Working(parser), tokens, canceller }
    }

    /// True for an end token of the vocabulary.
    pub fn is_end(&self, token: u32) -> bool {
        self.tokens.ends.contains(&token)
    }

    /// Number of 32-bit words in a mask.
    pub fn mask_words(&self) -> usize {
        self.tokens.usable.len()
    }

    /// Writes the mask of the next token: bit `t % 32` of word `t / 32` is set if token `t` is allowed. Words behind
    /// the vocabulary are cleared. Behind the end, the end tokens alone are allowed.
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
        let (allowed, may_end) = self.run(|parser| match parser.stop_reason() {
            StopReason::NotStopped => {
                let allowed = parser.compute_mask().map_err(failed)?;
                Ok((Some(allowed), parser.is_accepting()))
            }
            _ => Ok((None, true)),
        })?;
        // A grammar may name ranges of tokens, and these may hold padding and end tokens.
        let allowed = allowed.as_ref().map_or(&[][..], |allowed| allowed.as_slice());
        let allowed = allowed.iter().zip(&self.tokens.usable).map(|(allowed, usable)| allowed & usable);
        let mut text = 0;
        for (word, allowed) in words.iter_mut().zip(allowed.chain(std::iter::repeat(0))) {
            *word = allowed;
            text += allowed.count_ones();
        }
        let mut ends = 0;
        for &end in self.tokens.ends.iter().filter(|_| may_end) {
            let (word, bit) = (&mut words[end as usize / 32], 1 << (end % 32));
            ends += u32::from(*word & bit == 0);
            *word |= bit;
        }
        match text + ends {
            0 => Err(ConstraintError::at("", NO_TOKEN)),
            tokens => Ok(Allowed { tokens, may_end, ends }),
        }
    }

    /// Advances by a token that the last mask allowed.
    pub fn commit(&mut self, token: u32) -> Result<Progress, ConstraintError> {
        self.advance(&[token])
    }

    /// Advances by tokens that were generated before, without masks between them. See
    /// [`BaseMatchers::replayed`](crate::BaseMatchers::replayed), which gives the limits for it.
    pub fn advance(&mut self, tokens: &[u32]) -> Result<Progress, ConstraintError> {
        self.run(|parser| {
            for &token in tokens {
                parser.consume_token(token).map_err(failed)?;
            }
            parser.check_stop().map_err(failed)?;
            Ok(progress(parser))
        })
    }

    /// True if nothing can follow.
    pub fn is_finished(&self) -> bool {
        match &self.state {
            State::Working(parser) => progress(parser) == Progress::Finished,
            State::Failed(_) => false,
        }
    }

    /// True if the text may end here.
    pub fn is_accepting(&mut self) -> Result<bool, ConstraintError> {
        self.run(|parser| Ok(progress(parser) == Progress::Finished || parser.is_accepting()))
    }

    /// Size in bytes of the states that this matcher has visited, the part that grows. A process that bounds the sum
    /// over its requests is safe from grammars that visit as many as they can.
    pub fn bytes(&self) -> usize {
        match &self.state {
            State::Working(parser) => lexer_bytes(parser),
            State::Failed(_) => 0,
        }
    }

    /// Stops this matcher from another thread.
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }

    /// Runs an operation. Its error or its panic is this matcher's end.
    fn run<T>(
        &mut self,
        operation: impl FnOnce(&mut TokenParser) -> Result<T, ConstraintError>,
    ) -> Result<T, ConstraintError> {
        let parser = match &mut self.state {
            State::Working(parser) => parser,
            State::Failed(error) => return Err(error.clone()),
        };
        let mut result = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(operation(parser))))
            .unwrap_or_else(|error| Err(failed(error)));
        // An operation that was stopped may have a result all the same, which is not the right one.
        if self.canceller.is_cancelled() {
            result = Err(ConstraintError::at("", TOO_LONG));
        }
        result.inspect_err(|error| self.state = State::Failed(error.clone()))
    }
}

/// Size in bytes of a lexer's states.
pub(crate) fn lexer_bytes(parser: &TokenParser) -> usize {
    parser.parser.lexer_stats().num_bytes
}

fn progress(parser: &TokenParser) -> Progress {
    match parser.stop_reason() {
        StopReason::NoExtension | StopReason::EndOfSentence => Progress::Finished,
        _ => Progress::Continues,
    }
}

/// An error of the library at work.
pub(crate) fn failed(error: impl std::fmt::Display) -> ConstraintError {
    ConstraintError::of_library("", error)
}
