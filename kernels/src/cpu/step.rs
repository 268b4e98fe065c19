//! The device's copy of a step's inputs, in buffers that are reused by every step.

use crate::cpu::memory::Planes;
use crate::{DeviceError, PageId, RowInputs, SlotId, StepInputs};

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
    /// The arguments with which [`Step::check_pages`] has succeeded for this step.
    checked: Option<(usize, usize)>,
    /// Pages that the step writes to, sorted. Used only by [`Step::check_pages`].
    written: Vec<PageId>,
    /// Slots of the rows, sorted. Used only by [`Step::check_slots`].
    slots: Vec<SlotId>,
}

impl Step {
    /// Checks the inputs, copies them and performs the slot copies. Nothing is copied if the inputs are refused.
    pub(super) fn begin(&mut self, inputs: &StepInputs<'_>, planes: &mut Planes) -> Result<(), DeviceError> {
        check_rows(inputs)?;
        planes.slots.check_copies(inputs.copies)?;
        self.check_slots(inputs, planes)?;
        self.copy(inputs);
        if let Some(kv) = &planes.kv {
            self.check_pages(kv.shape.page_tokens, kv.shape.pages)?;
        }
        inputs.copies.iter().for_each(|&copy| planes.slots.copy(copy));
        Ok(())
    }

    /// Checks that the rows have slots of their own, which exist. The null slot may occur several times.
    fn check_slots(&mut self, inputs: &StepInputs<'_>, planes: &Planes) -> Result<(), DeviceError> {
        if planes.slots.is_empty() {
            return Ok(());
        }
        self.slots.clear();
        self.slots.extend(inputs.rows.iter().map(|row| row.slot).filter(|&slot| slot != SlotId::NULL));
        self.slots.iter().try_for_each(|&slot| planes.slots.check(slot))?;
        self.slots.sort_unstable();
        match self.slots.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(DeviceError::Misuse(format!("two rows of a step have slot {}", pair[0].0))),
            None => Ok(()),
        }
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

    pub(super) fn tokens(&self) -> usize {
        self.token_ids.len()
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
        self.written.clear();
        for row in &self.rows {
            let (end, table) = (row.start + row.tokens, &self.pages[row.first_page..][..row.pages]);
            if table.len() * page_tokens < end {
                let covered = table.len() * page_tokens;
                return Err(DeviceError::Misuse(format!(
                    "a block table of {covered} tokens for {end} tokens"
                )));
            }
            let used = &table[..end.div_ceil(page_tokens)];
            if let Some(page) = used.iter().find(|page| page.0 as usize >= pages) {
                return Err(DeviceError::Misuse(format!("page {} of a pool of {pages}", page.0)));
            }
            let to = &used[row.start / page_tokens..];
            self.written.extend(to.iter().filter(|&&page| page != PageId::NULL));
        }
        self.written.sort_unstable();
        if let Some(pair) = self.written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(DeviceError::Misuse(format!("page {} is written to twice in one step", pair[0].0)));
        }
        self.checked = Some((page_tokens, pages));
        Ok(())
    }
}

/// Checks that the rows cover the step's tokens without gaps, and that this device can run them.
fn check_rows(inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
    let tokens = inputs.token_ids.len();
    if let Some(positions) = inputs.positions.iter().find(|positions| positions.len() != tokens) {
        return Err(DeviceError::Misuse(format!("{} positions for {tokens} tokens", positions.len())));
    }
    let mut next = 0;
    for (index, row) in inputs.rows.iter().enumerate() {
        if row.first_token != next || row.tokens == 0 {
            let (first, count) = (row.first_token, row.tokens);
            return Err(DeviceError::Misuse(format!(
                "row {index} covers {count} tokens from {first} on, after a row that ends at {next}"
            )));
        }
        if row.continues {
            return Err(DeviceError::Misuse(format!(
                "row {index} continues a step that is not collected, on a device with one step in flight"
            )));
        }
        next += row.tokens;
    }
    if next != tokens {
        return Err(DeviceError::Misuse(format!("rows cover {next} of {tokens} tokens")));
    }
    if let Some(outside) = inputs.logit_rows.iter().find(|&&row| row >= tokens) {
        return Err(DeviceError::Misuse(format!("logit row {outside} of {tokens} tokens")));
    }
    if let Some(pair) = inputs.logit_rows.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(DeviceError::Misuse(format!("logit rows {} and {} do not ascend", pair[0], pair[1])));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
