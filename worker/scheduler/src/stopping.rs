//! The rules by which a request's output ends.

use std::sync::Arc;

/// The rules of one request. Counts include output of earlier incarnations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopping {
    max_tokens: u32,
    min_tokens: u32,
    /// Ids that end the output: first the `eos` end-of-sequence ids, then the request's own stop tokens.
    ends: Arc<[u32]>,
    eos: usize,
}

/// The reason for which a request's output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence id of the model.
    EndOfSequence,
    /// One of the request's own stop tokens.
    StopToken(u32),
    /// `max_tokens` is reached.
    Length,
}

impl Stopping {
    /// Rules for an output of at most `max_tokens` tokens; 0 asks for no output. `eos_token_ids` are the model's, or
    /// empty to ignore them.
    pub fn new(max_tokens: u32, min_tokens: u32, eos_token_ids: &[u32], stop_token_ids: &[u32]) -> Self {
        let ends = eos_token_ids.iter().chain(stop_token_ids).copied().collect();
        Self { max_tokens, min_tokens, ends, eos: eos_token_ids.len() }
    }

    /// The most tokens the output may have.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Ids that must not be sampled after `generated` tokens: below `min_tokens`, the ids that end the output.
    pub(crate) fn forbidden(&self, generated: u32) -> Arc<[u32]> {
        if generated < self.min_tokens { Arc::clone(&self.ends) } else { Arc::default() }
    }

    /// The reason for which `token` ends an output that had `generated` tokens before it. None if it does not.
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
