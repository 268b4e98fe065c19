//! Enqueues the forward passes of a step: fills the host inputs from the requests' tokens, and assigns each result to
//! its row.

use std::{ops::Range, time::Duration};

use tutti_kernels::{DeviceError, RowInputs, Sampled, ScoreRow, SlotCopy, StepInputs, TokenScore};
use tutti_models::{EmbeddedRows, LogitResults, Model};
use tutti_proto::declaration::{ModelDeclaration, WalkKind};
use tutti_scheduler::{NotSampled, Row};
use tutti_settings::ChunkShapes;

use crate::{
    logits::{ChunkLogits, ChunkSample, MaskWait, PendingLogits},
    masks::{self, Rerun},
    padding::shape_of,
    sequence::Sequence,
};

/// Limits on the size of forwards, and the shapes to which they are padded.
#[derive(Debug)]
pub(crate) struct BatchLimits {
    /// Maximum number of tokens per forward.
    pub max_tokens: usize,
    /// Maximum number of tokens of one row per forward.
    pub row_tokens: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// The shapes to which forwards are padded; `None` for no padding.
    pub shapes: Option<ChunkShapes>,
    /// The shapes to which calls of encoders are padded; `None` for no padding.
    pub encoder_shapes: Option<ChunkShapes>,
}

/// Input buffers of forward passes (forwards), sized for the largest forward and refilled for each forward.
#[derive(Debug)]
pub(crate) struct Batch {
    limits: BatchLimits,
    /// Indexed by walk id: true if rows of the walk must not be cut.
    is_atomic: Vec<bool>,
    /// True if the model keeps state in slots, so that a row that runs again would change it twice.
    has_slots: bool,
    /// Time for which a step waits for the masks of its rows behind its forward.
    pub grace: Duration,
    token_ids: Vec<u32>,
    /// Positions of the tokens on each axis.
    positions: [Vec<f32>; 3],
    logit_rows: Vec<usize>,
}

/// Results of a step's rows, in the order of the rows.
pub(crate) type RowResults = Vec<Result<RowResult, DeviceError>>;

/// Results of one row, which is one request's share of a step.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct RowResult {
    /// Token that was sampled; `None` unless the row is terminal ([`Row::is_terminal`]).
    pub sampled: Option<Sampled>,
    /// The reason for which no token was sampled from a terminal row.
    pub not_sampled: Option<NotSampled>,
    /// True if the row's constraint allowed nothing but an end.
    pub only_ends: bool,
    /// Index of the prompt token that the first score belongs to.
    pub first_scored: usize,
    /// Scores of prompt tokens: each position of the row scores the token at the next position. Empty unless the
    /// request asks for prompt logprobs.
    pub prompt_scores: Vec<TokenScore>,
    /// Embeddings of the row's tokens; empty unless the row belongs to an encoder's graph.
    pub encoded: Vec<f32>,
}

/// A row of a step, with the sequence that supplies its inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRow<'a> {
    pub row: &'a Row,
    pub sequence: &'a Sequence,
    /// The first position that is not in an enqueued forward yet.
    pub next: usize,
}

/// The part of a row that one forward computes.
#[derive(Clone, Debug)]
pub(crate) struct ForwardChunk<'a> {
    /// Index of the row in its step.
    pub row_index: usize,
    pub row: &'a Row,
    sequence: &'a Sequence,
    positions: Range<usize>,
}

/// A forward in flight, with the rows that its results belong to.
#[derive(Debug)]
pub(crate) struct Forward {
    pub answers: Vec<Answers>,
    /// Number of tokens of padding.
    pub padding: usize,
}

/// The results to expect for one chunk of a forward.
#[derive(Debug)]
pub(crate) struct Answers {
    pub row_index: usize,
    /// `None` unless the chunk ends a terminal row.
    pub sampling: Option<Sampling>,
    /// Positions whose logits score the token at the next position. Empty if no score is wanted.
    pub scored: Range<usize>,
}

/// The sampling of a terminal row.
#[derive(Clone, Debug)]
pub(crate) enum Sampling {
    /// A token is sampled. `only_ends` is true if the row's constraint allows nothing but an end.
    Token { only_ends: bool },
    /// No token is sampled, for this reason.
    Not(NotSampled),
}

impl ForwardChunk<'_> {
    /// True if a token is sampled behind this chunk: it ends a terminal row.
    fn is_terminal(&self) -> bool {
        self.row.is_terminal() && self.positions.end == self.row.positions.end
    }

    /// True if the mask of the chunk's token depends on a token that a step in flight samples.
    pub fn awaits_commit(&self) -> bool {
        self.continues() && self.is_terminal() && self.sequence.guide.is_some()
    }

    /// True if the chunk's first token was sampled on the device and is not known to the host yet.
    fn continues(&self) -> bool {
        self.row.continues && self.positions.start == self.row.positions.start
    }
}

impl Batch {
    /// Creates buffers for forwards within these limits.
    pub fn new(limits: BatchLimits, model: &ModelDeclaration) -> Self {
        let is_atomic = |walk: &tutti_proto::declaration::Walk| matches!(walk.kind, WalkKind::Atomic { .. });
        let max_tokens = limits.max_tokens;
        Self {
            limits,
            is_atomic: model.walks().iter().map(is_atomic).collect(),
            has_slots: model.has_slots(),
            grace: masks::GRACE,
            token_ids: Vec::with_capacity(max_tokens),
            positions: std::array::from_fn(|_| Vec::with_capacity(max_tokens)),
            logit_rows: Vec::with_capacity(max_tokens),
        }
    }

    /// The limits of forwards.
    pub fn limits(&self) -> &BatchLimits {
        &self.limits
    }

    /// Takes the next chunk of each row that has positions left, as far as the chunks fit into one forward. Empty if no
    /// row has positions left. A step takes more than one forward only if a row is longer than `row_tokens` or all rows
    /// together are longer than `max_tokens`.
    ///
    /// A row of an atomic walk is one chunk, whatever its length. The row waits for a forward with enough room. If no
    /// forward has enough room, the row runs alone. The model refuses the row if the model's buffers are too small.
    pub fn chunks<'a>(&self, rows: &mut [StepRow<'a>]) -> Vec<ForwardChunk<'a>> {
        let mut room = self.limits.max_tokens;
        let mut chunks = Vec::with_capacity(rows.len());
        for (row_index, StepRow { row, sequence, next }) in rows.iter_mut().enumerate() {
            let left = row.positions.end - *next;
            let tokens = match self.is_atomic.get(row.walk.0 as usize) {
                Some(true) if left <= room || chunks.is_empty() => left,
                Some(true) => 0,
                _ => left.min(self.limits.row_tokens).min(room),
            };
            if tokens > 0 {
                let positions = *next..*next + tokens;
                chunks.push(ForwardChunk { row_index, row, sequence, positions });
                *next += tokens;
                room = room.saturating_sub(tokens);
            }
        }
        chunks
    }

    /// Enqueues one forward over the chunks. Its logits follow. After any error other than [`DeviceError::Lost`], no
    /// part of the forward has run or will run.
    pub fn forward(
        &mut self,
        model: &mut dyn Model,
        chunks: &[ForwardChunk<'_>],
        copies: &[SlotCopy],
    ) -> Result<PendingLogits, DeviceError> {
        let logits = self.fill(chunks);
        let rows = self.row_inputs(chunks);
        let embedded = chunks
            .iter()
            .zip(&rows)
            .flat_map(|(chunk, row)| chunk.sequence.media.rows(&chunk.positions, row.first_token));
        let embedded: Vec<EmbeddedRows<'_>> = embedded.collect();
        let inputs = StepInputs {
            token_ids: &self.token_ids,
            positions: self.positions.each_ref().map(Vec::as_slice),
            rows: &rows,
            copies,
            logit_rows: &self.logit_rows,
            shape: shape_of(self.limits.shapes.as_ref(), self.token_ids.len(), self.logit_rows.len()),
        };
        let padding = inputs.padded_tokens() - self.token_ids.len();
        model.forward(&inputs, &embedded)?;
        Ok(PendingLogits { padding, ..logits })
    }

    /// The limits of waiting for masks behind a forward.
    pub fn mask_wait(&self) -> MaskWait {
        // A row without a slot's state writes the same planes again, and has no results if it is late.
        let rerun = if self.has_slots { Rerun::Impossible } else { Rerun::Possible };
        MaskWait { grace: self.grace, rerun }
    }

    /// Fills the inputs with the tokens of all chunks in order. Returns the samples and the scores to compute from the
    /// logits, without the padding.
    fn fill(&mut self, chunks: &[ForwardChunk<'_>]) -> PendingLogits {
        self.token_ids.clear();
        self.positions.iter_mut().for_each(Vec::clear);
        self.logit_rows.clear();
        let mut logits = PendingLogits { chunks: Vec::with_capacity(chunks.len()), ..Default::default() };
        for chunk in chunks {
            let ForwardChunk { row_index, sequence, positions, .. } = chunk;
            let first_token = self.token_ids.len();
            let known = positions.start + usize::from(chunk.continues())..positions.end;
            self.token_ids.resize(first_token + usize::from(chunk.continues()), 0);
            self.token_ids.extend(known.map(|position| sequence.token(position)));
            for axes in positions.clone().map(|position| sequence.positions.at(position)) {
                self.positions.iter_mut().zip(axes).for_each(|(positions, axis)| positions.push(axis));
            }
            let scored = sequence.scored(positions);
            for position in scored.iter().flat_map(|(scored, _)| scored.clone()) {
                let (token, top) = (sequence.token(position + 1), scored.as_ref().map_or(0, |(_, top)| *top));
                logits.score.push((self.logit_rows.len(), ScoreRow { token, top }));
                self.logit_rows.push(first_token + position - positions.start);
            }
            let sample = chunk.is_terminal().then(|| ChunkSample {
                logit_row: self.logit_rows.len(),
                position: positions.end,
                known: sequence.output.len(),
                awaits_commit: chunk.awaits_commit(),
            });
            self.logit_rows.extend(sample.as_ref().map(|_| self.token_ids.len() - 1));
            let scored = scored.map_or(0..0, |(scored, _)| scored);
            logits.chunks.push(ChunkLogits { row_index: *row_index, sample, scored });
        }
        logits
    }

    /// Returns the rows of a forward over the chunks. Each row has the scheduler's block table, cut to the pages that
    /// the chunk reads or writes.
    fn row_inputs<'a>(&self, chunks: &[ForwardChunk<'a>]) -> Vec<RowInputs<'a>> {
        let mut first_token = 0;
        let inputs = |chunk: &ForwardChunk<'a>| {
            let tokens = chunk.positions.len();
            let pages = chunk.positions.end.div_ceil(self.limits.page_tokens);
            let inputs = RowInputs {
                first_token,
                tokens,
                start: chunk.positions.start,
                slot: chunk.row.slot,
                continues: chunk.continues(),
                block_table: &chunk.row.block_table[..pages],
            };
            first_token += tokens;
            inputs
        };
        chunks.iter().map(inputs).collect()
    }
}

impl Forward {
    /// Moves the results of this forward from `got` to their rows.
    pub fn distribute(self, got: &mut LogitResults, rows: &mut RowResults) -> Result<(), DeviceError> {
        let samples = |answers: &&Answers| matches!(answers.sampling, Some(Sampling::Token { .. }));
        let samples = self.answers.iter().filter(samples).count();
        let scores = self.answers.iter().map(|answers| answers.scored.len()).sum::<usize>();
        if (got.sampled.len(), got.scores.len()) != (samples, scores) {
            let (tokens, found) = (got.sampled.len(), got.scores.len());
            return Err(DeviceError::Lost(format!(
                "{tokens} tokens and {found} scores for {samples} and {scores}"
            )));
        }
        let (mut sampled, mut scores) = (got.sampled.drain(..), got.scores.drain(..));
        for Answers { row_index, sampling, scored } in self.answers {
            // The results of a failed row are taken from the lists, too, because the next row's results follow them.
            let mut failed = None;
            let sampled = match sampling {
                Some(Sampling::Token { .. }) => sampled.next(),
                _ => None,
            };
            let sampled = sampled.and_then(|sampled| sampled.map_err(|error| failed = Some(error)).ok());
            let result = &mut rows[row_index];
            if let Ok(row) = result {
                row.sampled = sampled;
                match sampling {
                    Some(Sampling::Token { only_ends }) => row.only_ends = only_ends,
                    Some(Sampling::Not(why)) => row.not_sampled = Some(why),
                    None => {}
                }
                if row.prompt_scores.is_empty() {
                    // The logits of a position score the token at the next position.
                    row.first_scored = scored.start + 1;
                }
                row.prompt_scores.reserve(scored.len());
            }
            for score in scores.by_ref().take(scored.len()) {
                match (score, &mut *result) {
                    (Ok(score), Ok(row)) => row.prompt_scores.push(score),
                    (Err(error), _) => failed = Some(error),
                    (Ok(_), Err(_)) => {}
                }
            }
            match (failed, &mut *result) {
                (Some(error), Ok(_)) => *result = Err(error),
                // The row runs again, and reports its scores then.
                (None, Ok(row)) if row.not_sampled == Some(NotSampled::Late) => row.prompt_scores.clear(),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Converts any error of a step whose layers have run into [`DeviceError::Lost`], because the step cannot run again.
pub(crate) fn lost(error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Lost(_) => error,
        error => DeviceError::Lost(error.to_string()),
    }
}
