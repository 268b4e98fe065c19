//! The second half of a forward: the masks, the sampling and the scores of its rows.
//!
//! The mask of a row depends on the token before it. If a step in flight samples that token, the logits wait until that
//! step is committed. Everything else that they need is kept here, and the sequences are looked up again: the commit
//! may have ended a request. Its row is then sampled from no more.

use std::{ops::Range, time::Duration};

use tutti_kernels::{DeviceError, SampleRow, ScoreRow};
use tutti_models::{LogitRequests, Model};
use tutti_scheduler::{NotSampled, Row, Terminality};

use crate::{
    batch::{Answers, Forward, Sampling, lost},
    masks::{NextMask, Rerun, StepMasks},
    sequence::Sequence,
    sequences::Sequences,
};

/// A forward whose logits are not enqueued yet.
#[derive(Debug, Default)]
pub(crate) struct PendingLogits {
    pub chunks: Vec<ChunkLogits>,
    /// The scores to compute, each with its index among the logit rows.
    pub score: Vec<(usize, ScoreRow)>,
    /// Number of tokens of padding.
    pub padding: usize,
}

/// The results that one chunk of a forward has.
#[derive(Debug)]
pub(crate) struct ChunkLogits {
    pub row_index: usize,
    /// `None` unless the chunk ends a terminal row.
    pub sample: Option<ChunkSample>,
    /// Positions whose logits score the token at the next position. Empty if no score is wanted.
    pub scored: Range<usize>,
}

/// The token to sample behind a chunk.
#[derive(Debug)]
pub(crate) struct ChunkSample {
    /// Index among the logit rows.
    pub logit_row: usize,
    /// The position of the token.
    pub position: usize,
    /// Number of tokens of the output that the host knew at the forward. The device itself counts the others.
    pub known: usize,
    /// True if the mask depends on a token of a step in flight.
    pub awaits_commit: bool,
}

/// The limits of waiting for masks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MaskWait {
    /// Maximum time behind the forward.
    pub grace: Duration,
    /// True if rows whose masks are late may run again.
    pub rerun: Rerun,
}

impl PendingLogits {
    /// True if the logits must wait for the commit of the steps before.
    pub fn await_commit(&self) -> bool {
        self.chunks.iter().any(|chunk| chunk.sample.as_ref().is_some_and(|sample| sample.awaits_commit))
    }

    /// Enqueues the samples and the scores of a step's rows. An error counts as the loss of the device, because the
    /// layers are enqueued already.
    pub fn enqueue(
        self,
        model: &mut dyn Model,
        rows: &[Row],
        sequences: &Sequences,
        wait: MaskWait,
    ) -> Result<Forward, DeviceError> {
        // The pool has made the masks while the layers ran.
        let mut masks = StepMasks::begin(wait.grace);
        let mut mask = |chunk: &ChunkLogits| {
            let sample = chunk.sample.as_ref()?;
            let sequence = sequences.get(&rows[chunk.row_index]);
            let found = match sequence {
                // The request has ended.
                None => Err(NotSampled::Void),
                Some(Sequence { guide: None, .. }) => Ok(NextMask::ALL),
                Some(Sequence { guide: Some(guide), prompt, .. }) => {
                    masks.of(guide, sample.position - prompt.len(), wait.rerun)
                }
            };
            Some((found, sequence))
        };
        let masked: Vec<_> = self.chunks.iter().map(&mut mask).collect();
        let sample_row = |(chunk, masked): (&ChunkLogits, _)| {
            let (sample, (found, sequence)): (_, &(Result<NextMask, _>, Option<&Sequence>)) =
                (chunk.sample.as_ref()?, Option::as_ref(masked)?);
            let (NextMask { mask, only_ends, .. }, sequence) = (found.as_ref().ok()?, (*sequence)?);
            let forbidden: &[u32] = match &rows[chunk.row_index].terminality {
                Terminality::Terminal { forbidden } if !only_ends => forbidden,
                _ => &[],
            };
            let row = sequence.sample_row(sample.position, sample.known, forbidden);
            Some((sample.logit_row, SampleRow { allowed: mask.as_ref(), ..row }))
        };
        let sample: Vec<_> = self.chunks.iter().zip(&masked).filter_map(sample_row).collect();
        model.enqueue_logits(&LogitRequests { sample: &sample, score: &self.score }).map_err(lost)?;
        let answers = self.chunks.into_iter().zip(masked).map(|(chunk, masked)| Answers {
            row_index: chunk.row_index,
            sampling: masked.map(|(found, _)| match found {
                Ok(NextMask { only_ends, .. }) => Sampling::Token { only_ends },
                Err(why) => Sampling::Not(why),
            }),
            scored: chunk.scored,
        });
        Ok(Forward { answers: answers.collect(), padding: self.padding })
    }
}
