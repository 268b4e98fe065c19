//! One request's tokens and how it samples: what the engine holds of it besides its pages.

use std::ops::Range;

use tutti_kernels::{SampleRow, SamplingParams};

use crate::media::{Encoding, Media};

/// Made by [`crate::spec`], grown by one token with each committed terminal row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sequence {
    pub prompt: Vec<u32>,
    /// Output of earlier incarnations included.
    pub output: Vec<u32>,
    pub sampling: SamplingParams,
    /// Alternatives to report beside each sampled token; `None` reports no logprobs.
    pub logprobs: Option<u32>,
    /// The same for the prompt's tokens.
    pub prompt_logprobs: Option<u32>,
    /// Pages of its prefill, from the first on, that whoever goes on with it has: they are not sent.
    pub known_elsewhere: usize,
    /// Positions whose prompt logprobs have been scores_reported. They are not again when a preempted request computes them anew.
    pub scores_reported: usize,
    /// What stands for media in the prompt.
    pub media: Media,
    /// The items of an encoder's graph, which has no tokens; empty in any other.
    pub encodings: Vec<Encoding>,
}

impl Sequence {
    /// The token at a position; only positions before the end of the output are asked for.
    pub fn token(&self, position: usize) -> u32 {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.output[index],
        }
    }

    /// Those of `positions` whose logits score the prompt token after them, and with how many alternatives. A chunk's
    /// last position scores the first token of the next chunk.
    pub fn scored(&self, positions: &Range<usize>) -> Option<(Range<usize>, u32)> {
        let top = self.prompt_logprobs?;
        let (start, end) = (positions.start.max(self.scores_reported), positions.end.min(self.prompt.len() - 1));
        (start < end).then_some((start..end, top))
    }

    /// How to sample the token at `position`, the first one that is not there yet.
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
