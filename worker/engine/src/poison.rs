//! Poison: in debug builds, memory that a request is given holds NaN until the request writes to it.
//!
//! A page or a slot that has had another owner holds plausible numbers. If a row reads one position too many, a slot is
//! only partly restored, or a hand-over lacks its last page, the answer may look right. With poison the row's results
//! are not finite, and its request fails.
//!
//! Pages are poisoned before the first step that writes to them, and slots before a copy into them. Devices with
//! several steps in flight are not poisoned, because a write to pages would wait for all of these steps.

use std::ops::Range;

use tutti_kernels::{DeviceError, PageId, SlotCopy, SlotId};
use tutti_models::Model;
use tutti_scheduler::StepPlan;

/// Floats of any width that consist of this byte are NaN.
const BYTE: u8 = 0xff;

/// Bytes of poison for one page and one slot.
#[derive(Debug)]
pub(crate) struct Poison {
    page_tokens: usize,
    page_bytes: usize,
    slot: Vec<u8>,
}

impl Poison {
    /// Creates the poison for the memory of `model`. `None` in release builds, and for a model with several steps in
    /// flight or without pages.
    pub fn of(model: &dyn Model) -> Option<Self> {
        if !cfg!(debug_assertions) || !model.has_thinker() || model.limits().steps_in_flight > 1 {
            return None;
        }
        let layout = model.page_layout();
        tracing::info!("debug build: memory is filled with NaN before a request gets it");
        Some(Self {
            page_tokens: layout.page_tokens,
            page_bytes: layout.page_bytes(),
            slot: vec![BYTE; layout.slot_bytes()],
        })
    }

    /// Poisons the memory that the step is the first to write: each page that begins at or after its row's first
    /// position, and each slot that a copy writes and no copy reads.
    pub fn apply(&self, model: &mut dyn Model, step: &StepPlan) -> Result<(), DeviceError> {
        let rows = step.rows.iter();
        let pages: Vec<PageId> = rows
            .flat_map(|row| unwritten(&row.positions, &row.block_table, self.page_tokens))
            .copied()
            .collect();
        if !pages.is_empty() && self.page_bytes > 0 {
            model.write_pages(&pages, &vec![BYTE; pages.len() * self.page_bytes])?;
        }
        if !self.slot.is_empty() {
            for slot in destinations(&step.copies) {
                model.write_slot(slot, &self.slot)?;
            }
        }
        Ok(())
    }
}

/// Returns the pages that the row writes and that begin at or after the row's first position.
fn unwritten<'a>(positions: &Range<usize>, pages: &'a [PageId], page_tokens: usize) -> &'a [PageId] {
    let end = positions.end.div_ceil(page_tokens).min(pages.len());
    pages.get(positions.start.div_ceil(page_tokens)..end).unwrap_or_default()
}

/// Returns the destinations of the copies, except slots that are also the source of a copy.
fn destinations(copies: &[SlotCopy]) -> impl Iterator<Item = SlotId> {
    copies.iter().map(|copy| copy.to).filter(|to| copies.iter().all(|copy| copy.from != *to))
}

#[cfg(test)]
mod tests;
