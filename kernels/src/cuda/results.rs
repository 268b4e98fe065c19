//! Results of sampling on their way from the GPU to the host.

use std::sync::Arc;

use super::context::Gpu;
use super::staging::{Pair, Staging};
use crate::{DeviceError, Sampled, StepResults, TokenScore};

/// Bytes of `Result` in `sources/logits.cuh`.
const RESULT_BYTES: usize = 32;
/// Bytes of `Top` in `sources/logits.cuh`.
const TOP_BYTES: usize = 8;
/// Value of one in the sums of probabilities.
const ONE: f64 = (1u64 << 44) as f64;

/// The results of one launch: one per row, then the lists of likeliest tokens.
pub(super) struct Block {
    pair: Pair,
    /// Number of likeliest tokens that each row asks for; `None` if it asks for no score.
    rows: Vec<Option<usize>>,
    kind: Kind,
}

/// The list of [`StepResults`] that a block belongs to.
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
    pub(super) fn results_at(&self) -> u64 {
        self.pair.device.at()
    }

    /// Address of the lists of likeliest tokens.
    pub(super) fn tops_at(&self) -> u64 {
        self.pair.device.at() + (self.rows.len() * RESULT_BYTES) as u64
    }

    /// Enqueues the copy to the host, behind the launch.
    pub(super) fn fetch(&mut self) -> Result<(), DeviceError> {
        self.pair.fetch(size_of_block(&self.rows))
    }

    /// Appends the results to `out`. The stream has passed the copy. A row whose logits are not finite has an
    /// error of its own.
    pub(super) fn read(&self, out: &mut StepResults) -> Result<(), DeviceError> {
        let bytes = self.pair.host.bytes();
        let mut first_top = self.rows.len() * RESULT_BYTES;
        for (row, tops) in self.rows.iter().enumerate() {
            let record = Record::read(&bytes[row * RESULT_BYTES..][..RESULT_BYTES]);
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

    /// Gives back memory that the stream no longer uses.
    pub(super) fn free(self, staging: &mut Staging) {
        staging.give(self.pair);
    }

    /// Gives the memory of results that nobody reads to `staging`, for the time after the stream has passed it.
    pub(super) fn discard(self, staging: &mut Staging) {
        staging.keep(self.pair);
    }
}

fn size_of_block(rows: &[Option<usize>]) -> usize {
    rows.len() * RESULT_BYTES + rows.iter().map(|tops| tops.unwrap_or(0) * TOP_BYTES).sum::<usize>()
}

/// `Result` in `sources/logits.cuh`.
struct Record {
    token: u32,
    status: u32,
    logit: f32,
    largest: f32,
    sum: u64,
    rank: u32,
    tops: usize,
}

impl Record {
    fn read(bytes: &[u8]) -> Self {
        let word = |index: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[index * 4..][..4]);
            u32::from_ne_bytes(word)
        };
        Self {
            token: word(0),
            status: word(1),
            logit: f32::from_bits(word(2)),
            largest: f32::from_bits(word(3)),
            sum: u64::from(word(4)) | u64::from(word(5)) << 32,
            rank: word(6),
            tops: word(7) as usize,
        }
    }

    /// Returns the row's own error, if it has one.
    fn refusal(&self) -> Result<Option<DeviceError>, DeviceError> {
        let nothing_left = "bias, forbidden tokens and penalties leave no token to sample";
        match self.status {
            0 => Ok(None),
            1 => Ok(Some(DeviceError::NotFinite("a logit is not a number".to_owned()))),
            2 => Ok(Some(DeviceError::NotFinite(format!("the largest logit is {}", self.largest)))),
            3 => Ok(Some(DeviceError::Misuse(nothing_left.to_owned()))),
            other => Err(DeviceError::Lost(format!("a sampled row has status {other}"))),
        }
    }

    /// Log-softmax: `logit - largest - ln(sum)`, in f64.
    fn score(&self, tops: &[u8]) -> TokenScore {
        let normaliser = f64::from(self.largest) + (self.sum as f64 / ONE).ln();
        let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
        let (pairs, _) = tops.as_chunks::<TOP_BYTES>();
        let top = pairs.iter().take(self.tops).map(|&[a, b, c, d, e, f, g, h]| {
            (u32::from_ne_bytes([a, b, c, d]), logprob(f32::from_ne_bytes([e, f, g, h])))
        });
        TokenScore { logprob: logprob(self.logit), rank: self.rank, top: top.collect() }
    }
}

/// Results of the steps that are begun, and the memory of all.
pub(super) struct Results {
    pub(super) staging: Staging,
    /// Blocks of the step that is being enqueued.
    blocks: Vec<Block>,
}

impl Results {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { staging: Staging::new(gpu), blocks: Vec::new() }
    }

    /// Adds the results of a launch, whose copy to the host is enqueued.
    pub(super) fn push(&mut self, mut block: Block) -> Result<(), DeviceError> {
        block.fetch()?;
        self.blocks.push(block);
        Ok(())
    }

    /// Takes the step's results.
    pub(super) fn take(&mut self) -> Vec<Block> {
        std::mem::take(&mut self.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::{ONE, Record};

    #[test]
    fn a_record_gives_the_logprob_of_its_sum() {
        // Two equal logits: each has half of the probability.
        let words = [7u32, 0, 1.5f32.to_bits(), 1.5f32.to_bits(), 0, 1 << 13, 1, 1];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let record = Record::read(&bytes);
        assert_eq!(record.sum as f64, 2.0 * ONE);
        let top: Vec<u8> = [9u32, 1.5f32.to_bits()].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let score = record.score(&top);
        assert_eq!((score.rank, score.top.len(), score.top[0].0), (1, 1, 9));
        assert!((score.logprob - 0.5f32.ln()).abs() < 1e-6 && score.top[0].1 == score.logprob);
    }
}
