//! Logprobs of a prompt's tokens, joined from the runs of consecutive tokens that a chunked prefill sends.

use tutti_proto::cluster::v1::{PromptLogprobs as Run, TokenLogprob};
use tutti_runtime::Error;

/// The logprobs received so far. Runs arrive in order. A later attempt at the request may repeat tokens. Repeated
/// tokens are skipped.
pub struct PromptLogprobs {
    tokens: Vec<TokenLogprob>,
    /// Number of logprobs of the whole prompt.
    expected: usize,
}

impl PromptLogprobs {
    /// Creates an empty list that expects this many logprobs: one for each prompt token except the first.
    pub fn new(expected: usize) -> Self {
        Self { tokens: Vec::new(), expected }
    }

    /// Adds a run of consecutive tokens.
    pub fn add(&mut self, run: Run) -> Result<(), Error> {
        let next = self.tokens.len() + 1;
        let first = run.first as usize;
        if first == 0 || first > next {
            let message = format!("received prompt logprobs from token {first}, expected token {next}");
            return Err(Error::internal(message));
        }
        self.tokens.extend(run.tokens.into_iter().skip(next - first));
        Ok(())
    }

    /// All logprobs of the prompt, or an error if some are missing.
    pub fn complete(self) -> Result<Vec<TokenLogprob>, Error> {
        if self.tokens.len() != self.expected {
            let message = format!("received {} of {} prompt logprobs", self.tokens.len(), self.expected);
            return Err(Error::internal(message));
        }
        Ok(self.tokens)
    }
}

#[cfg(test)]
mod tests;
