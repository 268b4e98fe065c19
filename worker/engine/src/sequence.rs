//! The engine's data about one request: tokens, sampling parameters and media. The request's pages are not part of it.

use std::{ops::Range, sync::Arc};

use tutti_kernels::{SampleRow, SamplingParams};

use crate::{
    masks::Guide,
    media::{Encoding, Media},
    positions::Positions,
    transfer::Elsewhere,
};

/// State of one request, created by [`crate::spec`]. Each committed row that sampled a token adds one output token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sequence {
    /// The prompt, which is shared with the scheduler.
    pub prompt: Arc<[u32]>,
    /// Output so far, including the output of the request's earlier incarnations.
    pub output: Vec<u32>,
    pub sampling: SamplingParams,
    /// Number of alternatives to report per sampled token; `None` reports no logprobs.
    pub logprobs: Option<u32>,
    /// Number of alternatives to report per prompt token; `None` reports no logprobs.
    pub prompt_logprobs: Option<u32>,
    /// The receiver of the request, if another worker decodes.
    pub elsewhere: Elsewhere,
    /// Number of leading positions whose prompt logprobs have been reported. A preempted request computes these
    /// positions again, but does not report their logprobs again.
    pub scores_reported: usize,
    /// Media in the prompt.
    pub media: Media,
    /// Positions of the tokens.
    pub positions: Positions,
    /// The masks of the request's tokens; `None` if all tokens are free.
    pub guide: Option<Guide>,
    /// Items of an encoder's graph, which has no tokens; empty in other graphs.
    pub encodings: Vec<Encoding>,
}

impl Sequence {
    /// True if this engine computes the tokens behind the first one, too.
    pub fn decodes_here(&self) -> bool {
        self.elsewhere == Elsewhere::default()
    }

    /// Token at `position`, which must be a position of the prompt or of the output so far.
    pub fn token(&self, position: usize) -> u32 {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.output[index],
        }
    }

    /// Returns the part of `positions` whose prompt logprobs are still to be reported, and the number of alternatives
    /// per token. `None` if there is nothing to report. A position scores the token at the next position, so a chunk's
    /// last position scores the first token of the next chunk.
    pub fn scored(&self, positions: &Range<usize>) -> Option<(Range<usize>, u32)> {
        let top = self.prompt_logprobs?;
        let (start, end) =
            (positions.start.max(self.scores_reported), positions.end.min(self.prompt.len() - 1));
        (start < end).then_some((start..end, top))
    }

    /// Inputs for sampling the token at `position`. The first `known` tokens of the output are given to the device,
    /// which itself knows any between these and `position`.
    pub fn sample_row<'a>(&'a self, position: usize, known: usize, forbidden: &'a [u32]) -> SampleRow<'a> {
        SampleRow {
            params: &self.sampling,
            prompt: &self.prompt,
            output: &self.output[..known],
            forbidden,
            allowed: None,
            position: position as u64,
            logprobs: self.logprobs,
        }
    }
}
