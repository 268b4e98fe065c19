//! A model of a device's pages. A page that is shared, moved or freed wrongly is detected when it is read.

use tutti_scheduler::{PageId, Row};

/// A stand-in for keys and values: for each position, a hash of all tokens up to it.
pub type History = Vec<u64>;

/// Appends a token to a history.
pub fn remember(history: &mut History, token: u32) {
    let before = history.last().copied().unwrap_or(7);
    let mixed = (before ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    history.push(mixed ^ (mixed >> 29));
}

pub struct Memory {
    page_tokens: usize,
    slots: Vec<u64>,
}

impl Memory {
    pub fn new(pages: usize, page_tokens: usize) -> Self {
        Self { page_tokens, slots: vec![0; pages * page_tokens] }
    }

    fn slot(&self, table: &[PageId], position: usize) -> usize {
        table[position / self.page_tokens].0 as usize * self.page_tokens + position % self.page_tokens
    }

    /// Asserts that the row's block table leads to the values of all positions before the row.
    pub fn check(&self, row: &Row, history: &History) {
        for (position, expected) in history[..row.positions.start].iter().enumerate() {
            let found = self.slots[self.slot(&row.block_table, position)];
            assert_eq!(found, *expected, "{} finds something else at position {position}", row.key);
        }
    }

    /// Fills these pages, all but the first `known`, as another worker does.
    pub fn fill(&mut self, table: &[PageId], known: usize, history: &History) {
        for (position, value) in history.iter().enumerate().skip(known * self.page_tokens) {
            let slot = self.slot(table, position);
            self.slots[slot] = *value;
        }
    }

    /// True if the pages hold this history.
    pub fn holds(&self, table: &[PageId], history: &[u64]) -> bool {
        history.iter().enumerate().all(|(position, value)| self.slots[self.slot(table, position)] == *value)
    }

    /// Writes the row's positions: their values if the row was `sound`, else garbage.
    pub fn write(&mut self, row: &Row, history: &History, sound: bool) {
        for position in row.positions.clone() {
            let slot = self.slot(&row.block_table, position);
            self.slots[slot] = if sound { history[position] } else { 0xBAD };
        }
    }
}
