//! The device's copy of a step's inputs, in buffers that are reused by every step.

use crate::cpu::memory::Planes;
use crate::step::check;
use crate::{DeviceError, PageId, RowInputs, SlotId, StepInputs};

/// Contents of padding rows. NaN exposes an operation that lets padding affect another row's result.
pub(super) const PADDING: f32 = f32::NAN;

/// One request's share of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) first_token: usize,
    pub(super) tokens: usize,
    /// Position of the first token.
    pub(super) start: usize,
    pub(super) slot: SlotId,
    /// Index of the row's first page in [`Step::pages`].
    first_page: usize,
    /// Number of the row's pages.
    pages: usize,
}

/// A step's inputs.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) token_ids: Vec<u32>,
    /// Rotary positions on three axes.
    pub(super) positions: [Vec<f32>; 3],
    pub(super) rows: Vec<Row>,
    pages: Vec<PageId>,
    pub(super) logit_rows: Vec<usize>,
    /// Number of rows of a tensor with a row per token, padding included.
    token_rows: usize,
    /// Number of rows that are kept as logit rows, padding included.
    kept_rows: usize,
    /// The arguments with which [`Step::check_pages`] has succeeded for this step.
    checked: Option<(usize, usize)>,
    checks: check::Scratch,
}

impl Step {
    /// Checks the inputs and copies them. Nothing is copied if a check fails.
    pub(super) fn begin(&mut self, inputs: &StepInputs<'_>, planes: &Planes) -> Result<(), DeviceError> {
        check::rows(inputs)?;
        check_continues(inputs)?;
        planes.slots.check_copies(inputs.copies)?;
        self.check_slots(inputs, planes)?;
        self.copy(inputs);
        if let Some((page_tokens, pages)) = planes.paging() {
            self.check_pages(page_tokens, pages)?;
        }
        Ok(())
    }

    /// Checks that each row's slot exists and belongs to no other row. The null slot may occur several times.
    fn check_slots(&mut self, inputs: &StepInputs<'_>, planes: &Planes) -> Result<(), DeviceError> {
        if planes.slots.is_empty() {
            return Ok(());
        }
        inputs.rows.iter().try_for_each(|row| planes.slots.check(row.slot))?;
        self.checks.slots(inputs)
    }

    fn copy(&mut self, inputs: &StepInputs<'_>) {
        self.token_ids.clear();
        self.token_ids.extend_from_slice(inputs.token_ids);
        for (own, positions) in self.positions.iter_mut().zip(inputs.positions) {
            own.clear();
            own.extend_from_slice(positions);
        }
        self.logit_rows.clear();
        self.logit_rows.extend_from_slice(inputs.logit_rows);
        (self.token_rows, self.kept_rows) = (inputs.padded_tokens(), inputs.padded_logit_rows());
        self.rows.clear();
        self.pages.clear();
        for row in inputs.rows {
            let (first_page, pages) = (self.pages.len(), row.block_table.len());
            self.pages.extend_from_slice(row.block_table);
            let RowInputs { first_token, tokens, start, slot, .. } = *row;
            self.rows.push(Row { first_token, tokens, start, slot, first_page, pages });
        }
        self.checked = None;
    }

    /// Number of tokens, without padding.
    pub(super) fn tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Returns the token ids of the first rows of a tensor with `rows` rows, of which `valid` are not padding. Refuses
    /// a tensor that has not one row per token.
    pub(super) fn tokens_of_rows(&self, rows: usize, valid: usize) -> Result<&[u32], DeviceError> {
        let tokens = self.tokens();
        if (rows, valid) == (self.token_rows, tokens) {
            return Ok(&self.token_ids);
        }
        Err(DeviceError::Misuse(format!("experts by token for {valid} of {rows} rows, of {tokens} tokens")))
    }

    /// Number of rows of a tensor with a row per token, padding included.
    pub(super) fn token_rows(&self) -> usize {
        self.token_rows
    }

    /// Number of rows that are kept as logit rows, padding included.
    pub(super) fn kept_rows(&self) -> usize {
        self.kept_rows
    }

    /// Overwrites the padding rows of an operation's output with [`PADDING`], and returns the rows of the tokens. Rows
    /// have `width` elements.
    pub(super) fn pad<'a>(&self, out: &'a mut [f32], width: usize) -> &'a mut [f32] {
        let (tokens, padding) = out.split_at_mut(self.tokens() * width);
        padding.fill(PADDING);
        tokens
    }

    /// The row's pages, in order of position.
    pub(super) fn block_table(&self, row: &Row) -> &[PageId] {
        &self.pages[row.first_page..row.first_page + row.pages]
    }

    /// Checks, once per step, that block tables are long enough and name pages of the pool, and that no two rows write
    /// to one page. Such rows would race, because the tasks of a step write pages without synchronisation.
    pub(super) fn check_pages(&mut self, page_tokens: usize, pages: usize) -> Result<(), DeviceError> {
        if self.checked == Some((page_tokens, pages)) {
            return Ok(());
        }
        let tables = self
            .rows
            .iter()
            .map(|row| (row.start, row.tokens, &self.pages[row.first_page..row.first_page + row.pages]));
        self.checks.tables(tables, page_tokens, pages)?;
        self.checked = Some((page_tokens, pages));
        Ok(())
    }
}

/// Returns an error for a row that continues a step in flight, because this device runs one step at a time.
fn check_continues(inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
    match inputs.rows.iter().position(|row| row.continues) {
        Some(index) => Err(DeviceError::Misuse(format!(
            "row {index} continues a step that is not collected, on a device with one step in flight"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
