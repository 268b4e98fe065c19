//! The logprobs of a prompt's tokens, put together from the runs that a chunked prefill sends.

use tutti_proto::cluster::v1::{PromptLogprobs as Run, TokenLogprob};
use tutti_runtime::Error;

/// Runs put together so far. Runs come in order; one that was sent before, by an earlier try of the request, is
/// skipped as far as it is known.
pub struct PromptLogprobs {
    tokens: Vec<TokenLogprob>,
    expected: usize,
}

impl PromptLogprobs {
    /// Expects this many: one for each prompt token but the first.
    pub fn new(expected: usize) -> Self {
        Self { tokens: Vec::new(), expected }
    }

    /// Adds a run.
    pub fn add(&mut self, run: Run) -> Result<(), Error> {
        let next = self.tokens.len() + 1;
        let first = run.first as usize;
        if first == 0 || first > next {
            let message = format!("prompt logprobs from token {first} came where token {next} was due");
            return Err(Error::internal(message));
        }
        self.tokens.extend(run.tokens.into_iter().skip(next - first));
        Ok(())
    }

    /// All of them.
    pub fn complete(self) -> Result<Vec<TokenLogprob>, Error> {
        if self.tokens.len() != self.expected {
            let message = format!("{} prompt logprobs came of {}", self.tokens.len(), self.expected);
            return Err(Error::internal(message));
        }
        Ok(self.tokens)
    }
}

#[cfg(test)]
mod tests;
