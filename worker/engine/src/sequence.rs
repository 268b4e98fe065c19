//! A request's tokens and sampling parameters: the engine's state of it apart from its pages.

use std::ops::Range;

use tutti_kernels::{SampleRow, SamplingParams};

use crate::media::{Encoding, Media};

/// Created by [`crate::spec`]. Each committed terminal row adds one token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sequence {
    pub prompt: Vec<u32>,
    /// Output so far, including that of earlier incarnations.
    pub output: Vec<u32>,
    pub sampling: SamplingParams,
    /// Number of alternatives to report per sampled token; `None` reports no logprobs.
    pub logprobs: Option<u32>,
    /// Number of alternatives to report per prompt token; `None` reports no logprobs.
    pub prompt_logprobs: Option<u32>,
    /// Number of leading pages that the decoding worker already has. They are not sent.
    pub known_elsewhere: usize,
    /// Positions below this have their prompt logprobs reported. A preempted request computes them again but does not
    /// report them again.
    pub scores_reported: usize,
    /// Media in the prompt.
    pub media: Media,
    /// Items of an encoder's graph, which has no tokens; empty in other graphs.
    pub encodings: Vec<Encoding>,
}

impl Sequence {
    /// Token at a position, which must be before the end of the output.
    pub fn token(&self, position: usize) -> u32 {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.output[index],
        }
    }

    /// The `positions` whose logits score the prompt token after them, and the number of alternatives. A chunk's last
    /// position scores the first token of the next chunk.
    pub fn scored(&self, positions: &Range<usize>) -> Option<(Range<usize>, u32)> {
        let top = self.prompt_logprobs?;
        let (start, end) =
            (positions.start.max(self.scores_reported), positions.end.min(self.prompt.len() - 1));
        (start < end).then_some((start..end, top))
    }

    /// Inputs for sampling the token at `position`, the first one without a token.
    pub fn sample_row<'a>(&'a self, position: usize, forbidden: &'a [u32]) -> SampleRow<'a> {
        SampleRow {
            params: &self.sampling,
            prompt: &self.prompt,
            output: &self.output,
            forbidden,
            position: position as u64,
            logprobs: self.logprobs,
        }
    }
}
