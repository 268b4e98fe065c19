//! The simulated planes: digests in pages and, with the setting `state`, the digest of all tokens so far in a slot.
//!
//! Pages hold one digest per token or, with the setting `entry_tokens`, one per group of that many tokens: the digest
//! at the group's last token. A slot then also holds the digest at the last token of the last whole group, because the
//! pages lack the tokens after it.

use tutti_kernels::{DeviceError, PageId, RowInputs, SlotCopy, SlotId, StepInputs};

use super::digest;
use crate::PausedPages;

/// Bytes per digest.
pub const DIGEST_BYTES: usize = size_of::<u64>();

/// The state in a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State {
    /// The digest of all tokens so far.
    all: u64,
    /// The digest at the last token of the last whole group.
    whole: u64,
}

const NO_TOKENS: State = State { all: digest::EMPTY, whole: digest::EMPTY };

/// The simulated device's memory. The host can read and write it at any time, because a step is computed when it is
/// enqueued.
#[derive(Default)]
pub struct SimPlanes {
    page_tokens: usize,
    /// Number of tokens per digest in pages, a divisor of `page_tokens`.
    entry_tokens: usize,
    /// The digests, page by page.
    pages: Vec<u64>,
    /// The states by slot. `None` if the model keeps no state in slots.
    states: Option<Vec<State>>,
    /// The token that was sampled from the last row of each slot; `None` if no token was.
    sampled: Vec<Option<u32>>,
}

impl SimPlanes {
    /// Allocates planes. `entry_tokens` is above 1 only if `has_state` is true.
    pub fn new([page_tokens, entry_tokens]: [usize; 2], pages: usize, slots: usize, has_state: bool) -> Self {
        Self {
            page_tokens,
            entry_tokens,
            pages: vec![digest::EMPTY; pages * page_tokens / entry_tokens],
            states: has_state.then(|| vec![NO_TOKENS; slots]),
            sampled: vec![None; slots],
        }
    }

    /// Number of digests per page.
    fn page_entries(&self) -> usize {
        self.page_tokens / self.entry_tokens
    }

    /// Bytes of a slot's state.
    fn slot_bytes(&self) -> usize {
        slot_bytes(self.entry_tokens)
    }

    /// Refuses a step that names pages, slots or tokens that do not exist.
    pub fn check(&self, inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
        let slots = self.sampled.len();
        for SlotCopy { from, to } in inputs.copies {
            let states = self.states.as_ref().map_or(0, Vec::len);
            if *to == SlotId::NULL || from.0.max(to.0) as usize >= states {
                let why = format!("a copy from slot {} to slot {} of {states}", from.0, to.0);
                return Err(DeviceError::Misuse(why));
            }
        }
        for row in inputs.rows {
            let slot = row.slot.0 as usize;
            if slot >= slots && row.slot != SlotId::NULL {
                return Err(DeviceError::Misuse(format!("slot {slot} of {slots}")));
            }
            if row.continues && self.sampled.get(slot).copied().flatten().is_none() {
                return Err(DeviceError::Misuse(format!("slot {slot} has sampled no token to continue")));
            }
            for position in [row.start.saturating_sub(1), row.start + row.tokens - 1] {
                self.index(row, position)?;
            }
            let pages = row.start / self.page_tokens..(row.start + row.tokens).div_ceil(self.page_tokens);
            for page in &row.block_table[pages] {
                self.page(*page)?;
            }
        }
        Ok(())
    }

    /// Performs slot copies in order.
    pub fn copy(&mut self, copies: &[SlotCopy]) {
        let Some(states) = &mut self.states else { return };
        for SlotCopy { from, to } in copies {
            states[to.0 as usize] = match *from {
                SlotId::NULL => NO_TOKENS,
                from => states[from.0 as usize],
            };
        }
    }

    /// True if a row of the step computes this token.
    pub fn holds(&self, inputs: &StepInputs<'_>, token: u32) -> bool {
        inputs.rows.iter().any(|row| {
            let ids = &inputs.token_ids[row.first_token..row.first_token + row.tokens];
            match self.continued(row) {
                Some(first) => first == token || ids[1..].contains(&token),
                None => ids.contains(&token),
            }
        })
    }

    /// Returns the last token that was sampled in the row's slot, if the row continues from that token.
    pub fn continued(&self, row: &RowInputs<'_>) -> Option<u32> {
        if row.continues { self.sampled[row.slot.0 as usize] } else { None }
    }

    /// Returns the digest of all tokens before the row. If the digests in pages and slot differ, returns a third value,
    /// so that all later digests are wrong.
    pub fn begin(&mut self, row: &RowInputs<'_>) -> Result<u64, DeviceError> {
        if let Some(sampled) = self.sampled.get_mut(row.slot.0 as usize) {
            *sampled = None;
        }
        let whole = row.start / self.entry_tokens * self.entry_tokens;
        let in_pages = match whole.checked_sub(1) {
            Some(position) => self.pages[self.index(row, position)?],
            None => digest::EMPTY,
        };
        let state = self.states.as_ref().filter(|_| row.slot != SlotId::NULL);
        let Some(State { all, whole: in_slot }) = state.map(|states| states[row.slot.0 as usize]) else {
            return Ok(in_pages);
        };
        let is_right = in_slot == in_pages && (whole < row.start || all == in_slot);
        Ok(if is_right { all } else { digest::mix(in_pages ^ all.rotate_left(32) ^ 1) })
    }

    /// Writes the digest of all tokens up to `position`, inclusive, to the pages, if that token ends a group.
    pub fn write(&mut self, row: &RowInputs<'_>, position: usize, digest: u64) -> Result<(), DeviceError> {
        let index = self.index(row, position)?;
        if !(position + 1).is_multiple_of(self.entry_tokens) {
            return Ok(());
        }
        self.pages[index] = digest;
        if let Some(states) = self.states.as_mut().filter(|_| row.slot != SlotId::NULL) {
            states[row.slot.0 as usize].whole = digest;
        }
        Ok(())
    }

    /// Writes the row's last digest to its slot.
    pub fn end(&mut self, row: &RowInputs<'_>, digest: u64) {
        if let Some(states) = self.states.as_mut().filter(|_| row.slot != SlotId::NULL) {
            states[row.slot.0 as usize].all = digest;
        }
    }

    /// Records the token that was sampled from the last row of a slot.
    pub fn sample(&mut self, slot: SlotId, token: u32) {
        if let Some(sampled) = self.sampled.get_mut(slot.0 as usize) {
            *sampled = Some(token);
        }
    }

    /// Returns the index into `pages` of the group of a position of the row's request.
    fn index(&self, row: &RowInputs<'_>, position: usize) -> Result<usize, DeviceError> {
        let (page, offset) = (position / self.page_tokens, position % self.page_tokens);
        let page = row.block_table.get(page).ok_or_else(|| {
            let pages = row.block_table.len();
            DeviceError::Misuse(format!("position {position} has no page in a block table of {pages}"))
        })?;
        Ok(self.page(*page)? + offset / self.entry_tokens)
    }

    /// Returns the index into `pages` of the page's first digest.
    fn page(&self, page: PageId) -> Result<usize, DeviceError> {
        let first = page.0 as usize * self.page_entries();
        if first + self.page_entries() > self.pages.len() {
            return Err(DeviceError::Misuse(format!("page {} is not in the pool", page.0)));
        }
        Ok(first)
    }
}

impl PausedPages for SimPlanes {
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        for page in pages {
            let first = self.page(*page)?;
            let digests = &self.pages[first..first + self.page_entries()];
            out.extend(digests.iter().flat_map(|digest| digest.to_le_bytes()));
        }
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        let page_bytes = self.page_entries() * DIGEST_BYTES;
        if data.len() != pages.len() * page_bytes {
            let wanted = pages.len() * page_bytes;
            return Err(DeviceError::Misuse(format!("{} bytes for pages of {wanted}", data.len())));
        }
        for (page, data) in pages.iter().zip(data.chunks_exact(page_bytes)) {
            let (first, entries) = (self.page(*page)?, self.page_entries());
            let digests = &mut self.pages[first..first + entries];
            for (digest, bytes) in digests.iter_mut().zip(data.as_chunks().0) {
                *digest = u64::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let Some(states) = &self.states else { return Ok(()) };
        let State { all, whole } = *states.get(slot.0 as usize).ok_or_else(|| no_slot(slot, states.len()))?;
        let digests = [all.to_le_bytes(), whole.to_le_bytes()];
        out.extend_from_slice(&digests.as_flattened()[..self.slot_bytes()]);
        Ok(())
    }

    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        let wanted = self.slot_bytes();
        let Some(states) = &mut self.states else {
            return if data.is_empty() { Ok(()) } else { Err(no_slot(slot, 0)) };
        };
        let slots = states.len();
        let digests = data.as_chunks::<DIGEST_BYTES>().0;
        let (Some(all), Some(whole)) = (digests.first(), digests.last()) else {
            return Err(DeviceError::Misuse(format!("{} bytes for a slot of {wanted}", data.len())));
        };
        if data.len() != wanted {
            return Err(DeviceError::Misuse(format!("{} bytes for a slot of {wanted}", data.len())));
        }
        let state = State { all: u64::from_le_bytes(*all), whole: u64::from_le_bytes(*whole) };
        let at = states.get_mut(slot.0 as usize).filter(|_| slot != SlotId::NULL);
        *at.ok_or_else(|| no_slot(slot, slots))? = state;
        Ok(())
    }
}

/// Bytes of a slot's state, if a digest in pages stands for `entry_tokens` tokens.
pub fn slot_bytes(entry_tokens: usize) -> usize {
    if entry_tokens == 1 { DIGEST_BYTES } else { 2 * DIGEST_BYTES }
}

fn no_slot(slot: SlotId, slots: usize) -> DeviceError {
    DeviceError::Misuse(format!("slot {} of {slots}", slot.0))
}
