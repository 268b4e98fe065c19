//! Checks of a step's inputs that all devices make before they enqueue anything.

use crate::{DeviceError, PageId, SlotId, StepInputs};

/// Checks that the rows cover the step's tokens without gaps, that the logit rows ascend, and that tokens and logit
/// rows fit the step's shape.
pub(crate) fn rows(inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
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
    let (padded_tokens, padded_rows) = (inputs.padded_tokens(), inputs.padded_logit_rows());
    let logit_rows = inputs.logit_rows.len();
    if padded_tokens < tokens || padded_rows < logit_rows || padded_rows > padded_tokens {
        return Err(DeviceError::Misuse(format!(
            "{tokens} tokens and {logit_rows} logit rows in a shape of {padded_tokens} and {padded_rows}"
        )));
    }
    Ok(())
}

/// Memory that the checks of all steps reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Pages that the step writes to, sorted.
    written: Vec<PageId>,
    /// Slots of the rows, sorted.
    slots: Vec<SlotId>,
}

impl Scratch {
    /// Checks that no two rows have the same slot, except for the null slot.
    pub(crate) fn slots(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
        self.slots.clear();
        self.slots.extend(inputs.rows.iter().map(|row| row.slot).filter(|&slot| slot != SlotId::NULL));
        self.slots.sort_unstable();
        match self.slots.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(DeviceError::Misuse(format!("two rows of a step have slot {}", pair[0].0))),
            None => Ok(()),
        }
    }

    /// Checks that the rows' block tables are long enough and name pages of the pool, and that no two rows write to one
    /// page.
    pub(crate) fn pages(
        &mut self,
        inputs: &StepInputs<'_>,
        page_tokens: usize,
        pages: usize,
    ) -> Result<(), DeviceError> {
        let rows = inputs.rows.iter().map(|row| (row.start, row.tokens, row.block_table));
        self.tables(rows, page_tokens, pages)
    }

    /// Does the same as [`pages`](Self::pages). `rows` holds the first position, the number of tokens and the block
    /// table of each row.
    pub(crate) fn tables<'a>(
        &mut self,
        rows: impl Iterator<Item = (usize, usize, &'a [PageId])>,
        page_tokens: usize,
        pages: usize,
    ) -> Result<(), DeviceError> {
        self.written.clear();
        for (start, tokens, table) in rows {
            let end = start + tokens;
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
            let to = &used[start / page_tokens..];
            self.written.extend(to.iter().filter(|&&page| page != PageId::NULL));
        }
        self.written.sort_unstable();
        if let Some(pair) = self.written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(DeviceError::Misuse(format!("page {} is written to twice in one step", pair[0].0)));
        }
        Ok(())
    }
}
