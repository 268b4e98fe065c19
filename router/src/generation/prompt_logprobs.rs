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
mod tests {
    use super::*;

    fn run(first: u32, logprobs: &[f32]) -> Run {
        let tokens = logprobs.iter().map(|&logprob| TokenLogprob { logprob, rank: 1, top: vec![] }).collect();
        Run { first, tokens }
    }

    #[test]
    fn runs_join_and_repeats_are_skipped() {
        let mut all = PromptLogprobs::new(4);
        all.add(run(1, &[-1.0, -2.0])).unwrap();
        all.add(run(1, &[-1.0, -2.0, -3.0])).unwrap();
        all.add(run(4, &[-4.0])).unwrap();
        let got: Vec<f32> = all.complete().unwrap().iter().map(|t| t.logprob).collect();
        assert_eq!(got, [-1.0, -2.0, -3.0, -4.0]);
    }

    #[test]
    fn a_gap_is_an_error() {
        let mut all = PromptLogprobs::new(4);
        assert!(all.add(run(2, &[-1.0])).is_err());
        assert!(PromptLogprobs::new(1).complete().is_err());
    }
}
