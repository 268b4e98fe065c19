//! The device's copy of a step's inputs, in buffers that are reused from step to step.

use crate::{DeviceError, PageId, StepInputs};

/// One request's share of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) first_token: usize,
    pub(super) tokens: usize,
    /// Position of the first token.
    pub(super) start: usize,
    /// Where the row's pages begin in [`Step::pages`], and how many there are.
    first_page: usize,
    pages: usize,
}

/// A step's inputs.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) token_ids: Vec<u32>,
    pub(super) positions: Vec<f32>,
    pub(super) rows: Vec<Row>,
    pages: Vec<PageId>,
    pub(super) logit_rows: Vec<usize>,
    /// The page size for which [`Step::check_pages`] has passed.
    checked: Option<(usize, usize)>,
    /// Pages that the step writes to, sorted; only used while checking.
    written: Vec<PageId>,
}

impl Step {
    /// Takes over the inputs.
    pub(super) fn begin(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
        let tokens = inputs.token_ids.len();
        if inputs.positions.len() != tokens {
            let positions = inputs.positions.len();
            return Err(DeviceError::Misuse(format!("{positions} positions for {tokens} tokens")));
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
        self.token_ids.clear();
        self.token_ids.extend_from_slice(inputs.token_ids);
        self.positions.clear();
        self.positions.extend_from_slice(inputs.positions);
        self.logit_rows.clear();
        self.logit_rows.extend_from_slice(inputs.logit_rows);
        self.rows.clear();
        self.pages.clear();
        for row in inputs.rows {
            let (first_page, pages) = (self.pages.len(), row.block_table.len());
            self.pages.extend_from_slice(row.block_table);
            let (first_token, tokens, start) = (row.first_token, row.tokens, row.start);
            self.rows.push(Row { first_token, tokens, start, first_page, pages });
        }
        self.checked = None;
        Ok(())
    }

    pub(super) fn tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// The row's pages, in order of position.
    pub(super) fn block_table(&self, row: &Row) -> &[PageId] {
        &self.pages[row.first_page..row.first_page + row.pages]
    }

    /// Checks, once a step, that block tables are long enough, name pages of the pool, and that no two rows write to
    /// one page: the tasks of a step write without looking at each other.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RowInputs;

    fn check(rows: &[RowInputs<'_>], tokens: usize) -> Result<(), DeviceError> {
        let mut step = Step::default();
        step.begin(&StepInputs {
            token_ids: &vec![0; tokens],
            positions: &vec![0.0; tokens],
            rows,
            logit_rows: &[],
        })?;
        step.check_pages(16, 8)
    }

    #[test]
    fn rows_that_break_the_contract_are_refused() {
        let table =
            |pages: &'static [u32]| -> Vec<PageId> { pages.iter().map(|&page| PageId(page)).collect() };
        let (one, two, outside, null) = (table(&[1]), table(&[2, 3]), table(&[9]), table(&[0, 0]));
        let row =
            |first_token, tokens, start, block_table| RowInputs { first_token, tokens, start, block_table };
        check(&[row(0, 4, 0, &one), row(4, 20, 0, &two)], 24).unwrap();
        // Reading one page in two rows is sharing a prefix; writing to it is not.
        let (left, right) = (table(&[1, 2]), table(&[1, 3]));
        check(&[row(0, 1, 16, &left), row(1, 1, 16, &right)], 2).unwrap();
        check(&[row(0, 4, 0, &null), row(4, 4, 0, &null)], 8).unwrap();
        for (what, rows, tokens) in [
            ("gap", vec![row(0, 4, 0, &one[..]), row(5, 1, 0, &two)], 6),
            ("empty row", vec![row(0, 0, 0, &one)], 0),
            ("uncovered", vec![row(0, 4, 0, &one)], 5),
            ("short table", vec![row(0, 4, 13, &one)], 4),
            ("page outside", vec![row(0, 4, 0, &outside)], 4),
            ("shared write", vec![row(0, 4, 0, &one), row(4, 4, 0, &one)], 8),
        ] {
            assert!(matches!(check(&rows, tokens), Err(DeviceError::Misuse(_))), "{what}");
        }
    }
}
