//! Results of sampling, and their copies from the GPU to the host.

use std::sync::Arc;

use super::context::Gpu;
use super::memory::DevicePointer;
use super::records::{Record, RowResult, Top};
use super::staging::{Pair, Staging};
use crate::device::sampler_preconditions as check;
use crate::{DeviceError, Sampled, StepResults, TokenScore};

const RESULT_BYTES: usize = size_of::<RowResult>();
const TOP_BYTES: usize = size_of::<Top>();
/// The number 1 in the fixed-point sums of probabilities.
const ONE: f64 = (1u64 << 44) as f64;

/// The results of one launch: one per row, and then the lists of likeliest tokens.
pub(super) struct Block {
    pair: Pair,
    /// Number of likeliest tokens that each row requests; `None` if it requests no score.
    rows: Vec<Option<usize>>,
    kind: Kind,
}

/// The list of [`StepResults`] that receives the results of a [`Block`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Sampled,
    Scores,
}

impl Block {
    pub(super) fn new(
        staging: &mut Staging,
        rows: Vec<Option<usize>>,
        kind: Kind,
    ) -> Result<Self, DeviceError> {
        let pair = staging.take(size_of_block(&rows))?;
        Ok(Self { pair, rows, kind })
    }

    /// Address of the rows' results.
    pub(super) fn results_at(&self) -> DevicePointer<RowResult> {
        self.pair.device.at()
    }

    /// Address of the lists of likeliest tokens.
    pub(super) fn tops_at(&self) -> DevicePointer<Top> {
        self.results_at().add(self.rows.len()).cast()
    }

    /// Enqueues the copy to the host. The launch is already enqueued.
    pub(super) fn fetch(&mut self) -> Result<(), DeviceError> {
        self.pair.fetch(size_of_block(&self.rows))
    }

    /// Appends the results to `out`. The copy must have ended. A row whose logits are not finite gets an error of its
    /// own.
    pub(super) fn read(&self, out: &mut StepResults) -> Result<(), DeviceError> {
        let bytes = self.pair.host.bytes();
        let mut first_top = self.rows.len() * RESULT_BYTES;
        for (row, tops) in self.rows.iter().enumerate() {
            let record = RowResult::of_bytes(&bytes[row * RESULT_BYTES..]);
            let tops_bytes = tops.unwrap_or(0) * TOP_BYTES;
            let refused = record.refusal()?;
            let score = tops.map(|_| record.score(&bytes[first_top..first_top + tops_bytes]));
            first_top += tops_bytes;
            match self.kind {
                Kind::Sampled => {
                    out.sampled.push(refused.map_or(Ok(Sampled { token: record.token, score }), Err));
                }
                Kind::Scores => out.scores.extend(score.map(|score| refused.map_or(Ok(score), Err))),
            }
        }
        Ok(())
    }

    /// Returns memory that the stream no longer uses to `staging`.
    pub(super) fn free(self, staging: &mut Staging) {
        staging.give(self.pair);
    }

    /// Gives the memory to `staging` without reading the results. `staging` reuses the memory after the stream has
    /// passed the step.
    pub(super) fn discard(self, staging: &mut Staging) {
        staging.keep(self.pair);
    }
}

fn size_of_block(rows: &[Option<usize>]) -> usize {
    rows.len() * RESULT_BYTES + rows.iter().map(|tops| tops.unwrap_or(0) * TOP_BYTES).sum::<usize>()
}

impl RowResult {
    /// Returns the row's own error, if it has one.
    fn refusal(&self) -> Result<Option<DeviceError>, DeviceError> {
        match self.status {
            0 => Ok(None),
            1 => Ok(Some(check::logit_is_nan())),
            2 => Ok(Some(check::largest_is_infinite(self.largest))),
            3 => Ok(Some(check::no_token_left())),
            other => Err(DeviceError::Lost(format!("a sampled row has status {other}"))),
        }
    }

    /// Log-softmax: `logit - largest - ln(sum)`, in f64.
    fn score(&self, tops: &[u8]) -> TokenScore {
        let normaliser = f64::from(self.largest) + (self.sum as f64 / ONE).ln();
        let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
        let tops = tops.chunks_exact(TOP_BYTES).take(self.tops as usize).map(|bytes| {
            let Top { token, logit } = Top::of_bytes(bytes);
            (token, logprob(logit))
        });
        TokenScore { logprob: logprob(self.logit), rank: self.rank, top: tops.collect() }
    }
}

/// Results of the steps in flight, and their memory.
pub(super) struct Results {
    pub(super) staging: Staging,
    /// Blocks of results of the step that is being enqueued.
    blocks: Vec<Block>,
}

impl Results {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { staging: Staging::new(gpu), blocks: Vec::new() }
    }

    /// Enqueues the copy of a launch's results to the host, and adds the results to the step.
    pub(super) fn push(&mut self, mut block: Block) -> Result<(), DeviceError> {
        block.fetch()?;
        self.blocks.push(block);
        Ok(())
    }

    /// Takes the results of the step that is being enqueued.
    pub(super) fn take(&mut self) -> Vec<Block> {
        std::mem::take(&mut self.blocks)
    }
}

#[cfg(test)]
mod tests;
