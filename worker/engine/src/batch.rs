//! Runs one step plan: fills the step's host inputs from the requests' tokens, runs the model, and assigns the model's
//! results to the plan's rows.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tutti_kernels::{
    DeviceError, PageId, RowInputs, SampleRow, Sampled, ScoreRow, SlotId, StepInputs, TokenScore,
};
use tutti_models::{EmbeddedRows, LogitRequests, LogitResults, Model};
use tutti_scheduler::{Row, Terminality};

use crate::{media::Encoding, sequence::Sequence};

/// Input buffers of forward passes (forwards), sized for the largest forward and refilled for each forward.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    max_tokens: usize,
    row_tokens: usize,
    page_tokens: usize,
    token_ids: Vec<u32>,
    positions: Vec<f32>,
    /// Block tables of all chunks of the forward, end to end.
    pages: Vec<PageId>,
    logit_rows: Vec<usize>,
    results: LogitResults,
    /// Number of forwards that have returned.
    pub forwards: Arc<AtomicU64>,
}

/// Result of each row of a step, in the step's order.
pub(crate) type RowResults = Vec<Result<RowResult, DeviceError>>;

/// Results of one row, which is one request's share of a step.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct RowResult {
    /// Token that was sampled; `None` unless the row is terminal ([`Row::is_terminal`]).
    pub sampled: Option<Sampled>,
    /// Index of the prompt token that the first score belongs to.
    pub first_scored: usize,
    /// Scores of prompt tokens: each position of the row scores the token at the next position. Empty unless the
    /// request asks for prompt logprobs.
    pub prompt_scores: Vec<TokenScore>,
    /// Embeddings of the row's tokens; empty unless the row belongs to an encoder's graph.
    pub encoded: Vec<f32>,
}

/// Part of a row that one forward computes.
#[derive(Clone, Debug)]
struct ForwardChunk<'a> {
    /// Index of the row in its step.
    row_index: usize,
    row: &'a Row,
    sequence: &'a Sequence,
    positions: Range<usize>,
}

impl ForwardChunk<'_> {
    /// Token ids that must not be sampled from this chunk's last position; `None` unless the chunk ends a terminal row.
    fn forbidden(&self) -> Option<&[u32]> {
        match &self.row.terminality {
            Terminality::Terminal { forbidden } if self.positions.end == self.row.positions.end => {
                Some(forbidden)
            }
            _ => None,
        }
    }
}

impl Batch {
    /// Creates buffers for forwards of up to `max_tokens` tokens, at most `row_tokens` of them from one row.
    pub fn new(max_tokens: usize, row_tokens: usize, page_tokens: usize) -> Self {
        Self {
            max_tokens,
            row_tokens,
            page_tokens,
            token_ids: Vec::with_capacity(max_tokens),
            positions: Vec::with_capacity(max_tokens),
            logit_rows: Vec::with_capacity(max_tokens),
            ..Self::default()
        }
    }

    /// Runs the rows on the model and returns one result per row, in the order of `rows`. One forward suffices unless a
    /// row is longer than `row_tokens` or all rows together are longer than `max_tokens`. Further forwards then compute
    /// the rest, back to back.
    pub fn run(
        &mut self,
        model: &mut dyn Model,
        rows: &[(&Row, &Sequence)],
    ) -> Result<RowResults, DeviceError> {
        let mut results: RowResults = rows.iter().map(|_| Ok(RowResult::default())).collect();
        let mut next: Vec<usize> = rows.iter().map(|(row, _)| row.positions.start).collect();
        for (row_index, (row, sequence)) in
            rows.iter().enumerate().filter(|(_, row)| !row.1.encodings.is_empty())
        {
            if let Ok(result) = &mut results[row_index] {
                encode(model, &row.positions, &sequence.encodings, &mut result.encoded)?;
            }
            next[row_index] = row.positions.end;
        }
        loop {
            let mut room = self.max_tokens;
            let mut chunks = Vec::with_capacity(rows.len());
            for (row_index, (&(row, sequence), next)) in rows.iter().zip(&mut next).enumerate() {
                let tokens = (row.positions.end - *next).min(self.row_tokens).min(room);
                if tokens > 0 {
                    chunks.push(ForwardChunk { row_index, row, sequence, positions: *next..*next + tokens });
                    *next += tokens;
                    room -= tokens;
                }
            }
            if chunks.is_empty() {
                return Ok(results);
            }
            self.forward(model, &chunks, &mut results)?;
        }
    }

    fn forward(
        &mut self,
        model: &mut dyn Model,
        chunks: &[ForwardChunk<'_>],
        results: &mut RowResults,
    ) -> Result<(), DeviceError> {
        let (sample, score) = self.fill(chunks);
        let inputs = self.row_inputs(chunks);
        let embedded = chunks
            .iter()
            .zip(&inputs)
            .flat_map(|(chunk, inputs)| chunk.sequence.media.rows(&chunk.positions, inputs.first_token));
        let embedded: Vec<EmbeddedRows<'_>> = embedded.collect();
        let inputs = StepInputs {
            token_ids: &self.token_ids,
            positions: [&self.positions[..]; 3],
            rows: &inputs,
            copies: &[],
            logit_rows: &self.logit_rows,
        };
        model.forward(&inputs, &embedded)?;
        self.forwards.fetch_add(1, Ordering::Relaxed);
        self.results.clear();
        model.enqueue_logits(&LogitRequests { sample: &sample, score: &score }).map_err(lost)?;
        model.collect(None, &mut self.results).map_err(lost)?;
        let (got, wanted) = (&self.results, (sample.len(), score.len()));
        if (got.sampled.len(), got.scores.len()) != wanted {
            let (tokens, scores) = (got.sampled.len(), got.scores.len());
            return Err(DeviceError::Lost(format!("{tokens} tokens and {scores} scores for {wanted:?}")));
        }
        let (mut sampled, mut scores) = (self.results.sampled.drain(..), self.results.scores.drain(..));
        for chunk in chunks {
            let own_sample = chunk.forbidden().and_then(|_| sampled.next());
            let scored = chunk.sequence.scored(&chunk.positions).map(|(positions, _)| positions);
            let own_scores = scores.by_ref().take(scored.as_ref().map_or(0, Range::len));
            let result = &mut results[chunk.row_index];
            let first_scored = scored.map(|positions| positions.start + 1);
            if let Err(error) = add(result, own_sample, first_scored, own_scores) {
                *result = Err(error);
            }
        }
        Ok(())
    }

    /// Fills the inputs with the chunks, end to end. Returns the samples and the scores to read from the logits, each
    /// with its index in `logit_rows`.
    #[expect(clippy::type_complexity, reason = "the two lists of LogitRequests")]
    fn fill<'a>(
        &mut self,
        chunks: &'a [ForwardChunk<'a>],
    ) -> (Vec<(usize, SampleRow<'a>)>, Vec<(usize, ScoreRow)>) {
        self.token_ids.clear();
        self.positions.clear();
        self.pages.clear();
        self.logit_rows.clear();
        let (mut sample, mut score) = (Vec::with_capacity(chunks.len()), Vec::new());
        for chunk in chunks {
            let ForwardChunk { sequence, positions, .. } = chunk;
            let first_token = self.token_ids.len();
            self.token_ids.extend(positions.clone().map(|position| sequence.token(position)));
            self.positions.extend(positions.clone().map(|position| position as f32));
            let pages = chunk.row.block_table[..self.pages_of(chunk)].iter();
            self.pages.extend(pages.map(|page| PageId(page.0)));
            if let Some((scored, top)) = sequence.scored(positions) {
                for position in scored {
                    let token = sequence.token(position + 1);
                    score.push((self.logit_rows.len(), ScoreRow { token, top }));
                    self.logit_rows.push(first_token + position - positions.start);
                }
            }
            if let Some(forbidden) = chunk.forbidden() {
                sample.push((self.logit_rows.len(), sequence.sample_row(positions.end, forbidden)));
                self.logit_rows.push(self.token_ids.len() - 1);
            }
        }
        (sample, score)
    }

    fn row_inputs(&self, chunks: &[ForwardChunk<'_>]) -> Vec<RowInputs<'_>> {
        let (mut first_token, mut first_page) = (0, 0);
        let inputs = |chunk: &ForwardChunk<'_>| {
            let tokens = chunk.positions.len();
            let pages = self.pages_of(chunk);
            let inputs = RowInputs {
                first_token,
                tokens,
                start: chunk.positions.start,
                slot: SlotId::NULL,
                continues: false,
                block_table: &self.pages[first_page..first_page + pages],
            };
            first_token += tokens;
            first_page += pages;
            inputs
        };
        chunks.iter().map(inputs).collect()
    }

    /// Number of leading pages of the row's block table that the chunk reads or writes.
    fn pages_of(&self, chunk: &ForwardChunk<'_>) -> usize {
        chunk.positions.end.div_ceil(self.page_tokens)
    }
}

/// Adds the results of one forward to those of its row. The logits of a position score the token at the next position:
/// `first_scored` is the position that the first score belongs to. An error is the row's own.
fn add(
    result: &mut Result<RowResult, DeviceError>,
    sampled: Option<Result<Sampled, DeviceError>>,
    first_scored: Option<usize>,
    mut scores: impl Iterator<Item = Result<TokenScore, DeviceError>>,
) -> Result<(), DeviceError> {
    // The scores are taken from the iterator also if the row has failed, because the next row's follow them.
    let Ok(result) = result else {
        scores.for_each(drop);
        return Ok(());
    };
    let prompt_scores = &mut result.prompt_scores;
    if let Some(first) = first_scored.filter(|_| prompt_scores.is_empty()) {
        result.first_scored = first;
    }
    let failed = scores.by_ref().find_map(|score| score.map(|score| prompt_scores.push(score)).err());
    scores.for_each(drop);
    if let Some(error) = failed {
        return Err(error);
    }
    result.sampled = sampled.transpose()?;
    Ok(())
}

/// Makes any error of a step whose layers have run a loss of the device: the step cannot run again.
fn lost(error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Lost(_) => error,
        error => DeviceError::Lost(error.to_string()),
    }
}

/// Runs the encoders over the items whose embeddings lie within the range `rows`, and appends the embeddings to `out`.
fn encode(
    model: &mut dyn Model,
    rows: &Range<usize>,
    encodings: &[Encoding],
    out: &mut Vec<f32>,
) -> Result<(), DeviceError> {
    let of_row = |encoding: &&Encoding| rows.start <= encoding.rows.start && encoding.rows.end <= rows.end;
    for Encoding { walk, rows, data } in encodings.iter().filter(of_row) {
        let input = model.declaration().media().iter().find(|input| input.walk == *walk);
        let width = input.map_or(0, |input| input.width as usize);
        let before = out.len();
        model.encode(*walk, data, out)?;
        let encoded = &out[before..];
        if encoded.len() != rows.len() * width || !encoded.iter().all(|value| value.is_finite()) {
            let message = format!(
                "{} values for {} embeddings of {width}, or some that are no numbers",
                encoded.len(),
                rows.len()
            );
            return Err(DeviceError::Lost(message));
        }
    }
    Ok(())
}
