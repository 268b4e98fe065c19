//! Runs one step plan: fills the step's host inputs from the requests' tokens, runs the model, sorts out the answers.

use tutti_kernels::{DeviceError, PageId, RowInputs, SampleRow, Sampled, ScoreRow, StepInputs, TokenScore};
use tutti_models::{LogitRequests, LogitResults, Model};
use tutti_scheduler::{Row, Terminality};

use crate::sequence::Sequence;

/// Buffers of the largest step, filled anew for each one.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    page_tokens: usize,
    token_ids: Vec<u32>,
    positions: Vec<f32>,
    /// The rows' block tables, end to end.
    pages: Vec<PageId>,
    logit_rows: Vec<usize>,
    results: LogitResults,
}

/// What a step computed for one row.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct RowResult {
    /// Of a terminal row.
    pub sampled: Option<Sampled>,
    /// Of the prompt tokens after the row's positions, as far as asked for.
    pub prompt_scores: Vec<TokenScore>,
}

impl Batch {
    pub fn new(max_step_tokens: usize, page_tokens: usize) -> Self {
        Self {
            page_tokens,
            token_ids: Vec::with_capacity(max_step_tokens),
            positions: Vec::with_capacity(max_step_tokens),
            logit_rows: Vec::with_capacity(max_step_tokens),
            ..Self::default()
        }
    }

    /// Runs the rows on the model; one result for each, in their order.
    pub fn run(
        &mut self,
        model: &mut dyn Model,
        rows: &[(&Row, &Sequence)],
    ) -> Result<Vec<RowResult>, DeviceError> {
        let (sample, score) = self.fill(rows);
        let inputs = self.row_inputs(rows);
        model.forward(&StepInputs {
            token_ids: &self.token_ids,
            positions: &self.positions,
            rows: &inputs,
            logit_rows: &self.logit_rows,
        })?;
        self.results.sampled.clear();
        self.results.scores.clear();
        if !self.logit_rows.is_empty() {
            model.read_logits(&LogitRequests { sample: &sample, score: &score }, &mut self.results)?;
        }
        let (got, wanted) = (&self.results, (sample.len(), score.len()));
        if (got.sampled.len(), got.scores.len()) != wanted {
            let (tokens, scores) = (got.sampled.len(), got.scores.len());
            return Err(DeviceError::Lost(format!("{tokens} tokens and {scores} scores for {wanted:?}")));
        }
        let (mut sampled, mut scores) = (self.results.sampled.drain(..), self.results.scores.drain(..));
        let result = |(row, sequence): &(&Row, &Sequence)| RowResult {
            sampled: if row.terminality.is_terminal() { sampled.next() } else { None },
            prompt_scores: sequence
                .scored(&row.positions)
                .map_or_else(Vec::new, |(positions, _)| scores.by_ref().take(positions.len()).collect()),
        };
        Ok(rows.iter().map(result).collect())
    }

    /// Lays the rows end to end, and lists what is wanted of which logit row.
    #[expect(clippy::type_complexity, reason = "the two lists of LogitRequests")]
    fn fill<'a>(
        &mut self,
        rows: &[(&'a Row, &'a Sequence)],
    ) -> (Vec<(usize, SampleRow<'a>)>, Vec<(usize, ScoreRow)>) {
        self.token_ids.clear();
        self.positions.clear();
        self.pages.clear();
        self.logit_rows.clear();
        let (mut sample, mut score) = (Vec::with_capacity(rows.len()), Vec::new());
        for &(row, sequence) in rows {
            let first_token = self.token_ids.len();
            self.token_ids.extend(row.positions.clone().map(|position| sequence.token(position)));
            self.positions.extend(row.positions.clone().map(|position| position as f32));
            let pages = row.block_table[..self.pages_of(row)].iter();
            self.pages.extend(pages.map(|page| PageId(page.0)));
            if let Some((scored, top)) = sequence.scored(&row.positions) {
                for position in scored {
                    let token = sequence.token(position + 1);
                    score.push((self.logit_rows.len(), ScoreRow { token, top }));
                    self.logit_rows.push(first_token + position - row.positions.start);
                }
            }
            if let Terminality::Terminal { forbidden } = &row.terminality {
                sample.push((self.logit_rows.len(), sequence.sample_row(row.positions.end, forbidden)));
                self.logit_rows.push(self.token_ids.len() - 1);
            }
        }
        (sample, score)
    }

    fn row_inputs(&self, rows: &[(&Row, &Sequence)]) -> Vec<RowInputs<'_>> {
        let (mut first_token, mut first_page) = (0, 0);
        let inputs = |&(row, _): &(&Row, &Sequence)| {
            let tokens = row.positions.len();
            let pages = self.pages_of(row);
            let inputs = RowInputs {
                first_token,
                tokens,
                start: row.positions.start,
                block_table: &self.pages[first_page..first_page + pages],
            };
            first_token += tokens;
            first_page += pages;
            inputs
        };
        rows.iter().map(inputs).collect()
    }

    /// How many pages of its table the row reads or writes.
    fn pages_of(&self, row: &Row) -> usize {
        row.positions.end.div_ceil(self.page_tokens)
    }
}
