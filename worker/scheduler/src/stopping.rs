//! The rules by which a request's output ends.

use std::sync::Arc;

/// The rules of one request. Token counts include output of earlier incarnations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopping {
    max_tokens: u32,
    min_tokens: u32,
    /// Token ids that end the output. The first `eos` of them are end-of-sequence ids, the rest are the request's own
    /// stop tokens.
    ends: Arc<[u32]>,
    eos: usize,
}

/// The reason for which a request's output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence id of the model was sampled.
    EndOfSequence,
    /// One of the request's own stop tokens was sampled.
    StopToken(u32),
    /// The output follows a constraint, and no token can follow.
    Complete,
    /// `max_tokens` is reached.
    Length,
}

impl Stopping {
    /// Rules for an output of at most `max_tokens` tokens; 0 asks for no output. `eos_token_ids` are the model's
    /// end-of-sequence ids, or empty if the request ignores them.
    pub fn new(max_tokens: u32, min_tokens: u32, eos_token_ids: &[u32], stop_token_ids: &[u32]) -> Self {
        let ends = eos_token_ids.iter().chain(stop_token_ids).copied().collect();
        Self { max_tokens, min_tokens, ends, eos: eos_token_ids.len() }
    }

    /// Maximum number of tokens of the output.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Lets the output end from now on, although it has fewer than `min_tokens` tokens.
    pub(crate) fn waive_min_tokens(&mut self) {
        self.min_tokens = 0;
    }

    /// Token ids that must not be sampled next, after an output of `generated` tokens. As long as the output has fewer
    /// than `min_tokens` tokens, these are the ids that end it; afterwards there are none.
    pub(crate) fn forbidden(&self, generated: u32) -> Arc<[u32]> {
        if generated < self.min_tokens { Arc::clone(&self.ends) } else { Arc::default() }
    }

    /// The reason for which `token` ends an output that had `generated` tokens before it. None if the output goes on.
    pub(crate) fn finish(&self, token: u32, generated: u32) -> Option<Finish> {
        let index = self.ends.iter().position(|&end| end == token).filter(|_| generated >= self.min_tokens);
        match index {
            Some(index) if index < self.eos => Some(Finish::EndOfSequence),
            Some(_) => Some(Finish::StopToken(token)),
            None => (generated + 1 >= self.max_tokens).then_some(Finish::Length),
        }
    }
}

#[cfg(test)]
mod tests;
