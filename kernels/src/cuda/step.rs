//! The GPU's copy of a step's inputs. All inputs are uploaded in one copy.

use std::ops::Range;

use super::attention_work::{AttentionWork, WorkShape};
use super::memory::DevicePointer;
use super::planes::Planes;
use super::records::{Record, Row};
use super::staging::Staging;
use crate::step::check;
use crate::{DeviceError, PageId, SlotId, StepInputs};

/// Flag of an id that stands for the last token of a slot. The id's other bits are the slot: see `FROM_SLOT` in
/// `sources/embed.cu`.
const FROM_SLOT: u32 = 1 << 31;

/// Id of padding. No table holds it, and it lacks the flag [`FROM_SLOT`].
const NO_ID: u32 = FROM_SLOT - 1;

/// The row to which a logit row belongs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Owner {
    /// The row's slot; the null slot if no last token is kept for the row.
    pub(super) slot: u32,
    /// True if the row began with the token that was sampled last for the slot.
    pub(super) continues: bool,
}

/// Addresses of a step's inputs on the device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Addresses {
    pub(super) ids: DevicePointer<u32>,
    pub(super) positions: DevicePointer<f32>,
    pub(super) row_of: DevicePointer<u32>,
    /// Index of each token's keys and values in the pages: page * tokens per page + index in the page. All bits are set
    /// for padding, for a token in the null page, and in a model without pages.
    pub(super) kv_at: DevicePointer<u32>,
    pub(super) logit_rows: DevicePointer<u32>,
    /// For each logit row, the slot of its row.
    pub(super) logit_slots: DevicePointer<u32>,
    pub(super) rows: DevicePointer<Row>,
    pub(super) pages: DevicePointer<u32>,
}

/// A step's inputs.
#[derive(Default)]
pub(super) struct Step {
    /// Number of tokens, without padding.
    pub(super) tokens: usize,
    /// Number of rows of a tensor with a row per token, padding included.
    pub(super) token_rows: usize,
    pub(super) row_count: usize,
    pub(super) logit_rows: usize,
    /// Number of rows that are kept as logit rows, padding included.
    pub(super) kept_rows: usize,
    /// The owner of each logit row.
    pub(super) owners: Vec<Owner>,
    pub(super) at: Addresses,
    /// True if the step has pages.
    pub(super) has_pages: bool,
    /// Work lists of attention on tensor cores, for each shape that has been used.
    works: Vec<AttentionWork>,
    words: Vec<u32>,
    /// Range of the rows' words in `words`.
    row_words: Range<usize>,
    /// Total length of the rows' block tables.
    page_entries: usize,
    checks: check::Scratch,
}

impl Step {
    /// Checks the inputs, and enqueues their upload and the slot copies. If a check fails, nothing is enqueued.
    /// `kept_slots` is the number of slots whose last token the device keeps.
    pub(super) fn begin(
        &mut self,
        inputs: &StepInputs<'_>,
        planes: &mut Planes,
        kept_slots: usize,
        staging: &mut Staging,
    ) -> Result<(), DeviceError> {
        check::rows(inputs)?;
        planes.check_copies(inputs.copies)?;
        if !planes.has_no_slots() {
            inputs.rows.iter().try_for_each(|row| planes.check_slot(row.slot))?;
            self.checks.slots(inputs)?;
        }
        if let Some(row) = inputs.rows.iter().find(|row| row.continues && row.slot.0 as usize >= kept_slots) {
            return Err(DeviceError::Misuse(format!("a row continues slot {} of {kept_slots}", row.slot.0)));
        }
        if let Some(row) = inputs.rows.iter().find(|row| row.continues && row.slot == SlotId::NULL) {
            return Err(DeviceError::Misuse(format!(
                "the row from token {} on continues the null slot",
                row.first_token
            )));
        }
        let kv = planes.kv_shape();
        if let Some(kv) = &kv {
            self.checks.pages(inputs, kv.page_tokens, kv.pages)?;
        }
        self.fill(inputs, kv.map(|kv| kv.page_tokens), kept_slots);
        let at = staging.upload(&self.words)?;
        self.set_addresses(at);
        inputs.copies.iter().try_for_each(|&copy| planes.copy(copy))
    }

    /// Forgets the owners of the logit rows, because the next step reuses their memory on the device.
    pub(super) fn end(&mut self) {
        self.owners.clear();
    }

    /// Returns the work lists for a shape. The first step with a shape uploads them here. Later steps upload them with
    /// their inputs.
    pub(super) fn attention_work(
        &mut self,
        shape: WorkShape,
        staging: &mut Staging,
    ) -> Result<&AttentionWork, DeviceError> {
        if !self.works.iter().any(|work| work.shape == shape) {
            let mut work = AttentionWork::new(shape);
            work.build(&self.words[self.row_words.clone()], self.tokens);
            let mut words = Vec::with_capacity(work.words());
            work.write(&mut words);
            work.at = staging.upload(&words)?.cast();
            self.works.push(work);
        }
        let work = self.works.iter().find(|work| work.shape == shape);
        work.ok_or_else(|| DeviceError::Misuse("attention without work lists".to_owned()))
    }

    /// Returns the owner of a logit row. For an index beyond the logit rows, returns an owner with the null slot that
    /// does not continue.
    pub(super) fn owner(&self, logit_row: usize) -> Owner {
        self.owners.get(logit_row).copied().unwrap_or_default()
    }

    /// Writes all inputs one after another, in the order of [`set_addresses`](Self::set_addresses).
    fn fill(&mut self, inputs: &StepInputs<'_>, page_tokens: Option<usize>, kept_slots: usize) {
        self.tokens = inputs.token_ids.len();
        (self.token_rows, self.kept_rows) = (inputs.padded_tokens(), inputs.padded_logit_rows());
        let padding = self.token_rows - self.tokens;
        let pad = |words: &mut Vec<u32>, word| words.extend(std::iter::repeat_n(word, padding));
        self.row_count = inputs.rows.len();
        self.logit_rows = inputs.logit_rows.len();
        self.has_pages = page_tokens.is_some();
        self.words.clear();
        self.words.extend_from_slice(inputs.token_ids);
        for row in inputs.rows.iter().filter(|row| row.continues) {
            self.words[row.first_token] = FROM_SLOT | row.slot.0;
        }
        pad(&mut self.words, NO_ID);
        for positions in inputs.positions {
            self.words.extend(positions.iter().map(|position| position.to_bits()));
            pad(&mut self.words, 0);
        }
        let row_of =
            (0u32..).zip(inputs.rows).flat_map(|(index, row)| std::iter::repeat_n(index, row.tokens));
        self.words.extend(row_of);
        pad(&mut self.words, 0);
        for row in inputs.rows {
            let entry = |position: usize| match (page_tokens, row.block_table) {
                (None, _) => u32::MAX,
                (Some(size), table) => match table[position / size] {
                    PageId::NULL => u32::MAX,
                    page => page.0 * size as u32 + (position % size) as u32,
                },
            };
            self.words.extend((row.start..row.start + row.tokens).map(entry));
        }
        pad(&mut self.words, u32::MAX);
        self.words.extend(inputs.logit_rows.iter().map(|&row| row as u32));
        self.owners.clear();
        let mut row = 0;
        for &token in inputs.logit_rows {
            while inputs.rows[row].first_token + inputs.rows[row].tokens <= token {
                row += 1;
            }
            let of = &inputs.rows[row];
            let is_last = of.first_token + of.tokens == token + 1;
            let slot = if is_last && (of.slot.0 as usize) < kept_slots { of.slot.0 } else { 0 };
            self.owners.push(Owner { slot, continues: is_last && of.continues });
        }
        self.words.extend(self.owners.iter().map(|owner| owner.slot));
        let mut first_page = 0;
        let first_row_word = self.words.len();
        for row in inputs.rows {
            let (first_token, start, slot) = (row.first_token as u32, row.start as u32, row.slot.0);
            self.words.extend_from_slice(Row { first_token, start, first_page, slot }.words());
            first_page += row.block_table.len() as u32;
        }
        self.row_words = first_row_word..self.words.len();
        self.page_entries = first_page as usize;
        inputs.rows.iter().for_each(|row| self.words.extend(row.block_table.iter().map(|page| page.0)));
        for work in &mut self.works {
            work.build(&self.words[self.row_words.clone()], self.tokens);
            work.write(&mut self.words);
        }
    }

    fn set_addresses(&mut self, at: DevicePointer<u32>) {
        let mut next = at;
        let mut take = |words: usize| {
            let at = next;
            next = next.add(words);
            at
        };
        self.at = Addresses {
            ids: take(self.token_rows),
            positions: take(3 * self.token_rows).cast(),
            row_of: take(self.token_rows),
            kv_at: take(self.token_rows),
            logit_rows: take(self.logit_rows),
            logit_slots: take(self.logit_rows),
            rows: take(Row::WORDS * self.row_count).cast(),
            pages: take(self.page_entries),
        };
        self.works.iter_mut().for_each(|work| work.at = take(work.words()).cast());
    }
}
