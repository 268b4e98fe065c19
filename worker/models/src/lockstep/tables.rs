//! The block tables of all slots, as the leader has sent them. All ranks keep equal tables, so a plan holds only the
//! pages that a table has gained.

use tutti_kernels::{PageId, SlotId};

/// Maximum number of slots. It bounds the memory that a message can make this rank allocate.
const MAX_SLOTS: usize = 1 << 20;

/// One block table per slot.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// Number of pages per plane. It is also the maximum length of a table.
    pages: usize,
    slots: usize,
    /// Tables by slot, up to the highest slot that any row has used.
    by_slot: Vec<Table>,
    step: u64,
}

#[derive(Clone, Debug, Default)]
struct Table {
    pages: Vec<PageId>,
    /// The last step in which a row used this slot.
    step: u64,
}

impl Tables {
    /// Creates empty tables for planes of this size. Returns the reason if the size is not valid.
    pub fn new(pages: usize, slots: usize) -> Result<Self, String> {
        if slots > MAX_SLOTS {
            return Err(format!("{slots} slots, but a group has at most {MAX_SLOTS}"));
        }
        Ok(Self { pages, slots, by_slot: Vec::new(), step: 0 })
    }

    /// Checks that a list of `count` pages has at most as many pages as a plane.
    pub fn check_pages(&self, count: usize) -> Result<(), String> {
        if count > self.pages {
            return Err(format!("{count} pages, but a plane has {}", self.pages));
        }
        Ok(())
    }

    /// Starts the check of a step's rows. Call before [`check_row`](Self::check_row).
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    /// Checks that a row may use this slot and a table of this length, and that no earlier row of the same step uses
    /// the slot. Changes no table.
    pub fn check_row(&mut self, slot: SlotId, length: usize) -> Result<(), String> {
        self.check_pages(length)?;
        if slot == SlotId::NULL {
            return Ok(());
        }
        let index = self.check_slot(slot)?;
        if index >= self.by_slot.len() {
            self.by_slot.resize(index + 1, Table::default());
        }
        if std::mem::replace(&mut self.by_slot[index].step, self.step) == self.step {
            return Err(format!("two rows have slot {index}"));
        }
        Ok(())
    }

    /// Returns the index of a slot. Refuses a slot beyond the last one.
    pub fn check_slot(&self, slot: SlotId) -> Result<usize, String> {
        let index = slot.0 as usize;
        if index < self.slots {
            Ok(index)
        } else {
            Err(format!("slot {index}, but there are {}", self.slots))
        }
    }

    /// Replaces the table of a slot that [`check_row`](Self::check_row) has accepted. Returns the number of leading
    /// pages that stay the same, which is 0 for the null slot.
    pub fn replace(&mut self, slot: SlotId, table: &[PageId]) -> usize {
        let Some(known) = self.table_mut(slot) else { return 0 };
        // A table usually only gains pages at its end, so one comparison of all known pages usually suffices.
        let kept = match table.get(..known.len()).is_some_and(|table| are_equal(known, table)) {
            true => known.len(),
            false => known.iter().zip(table).take_while(|(known, page)| known == page).count(),
        };
        known.truncate(kept);
        known.extend_from_slice(&table[kept..]);
        kept
    }

    /// Applies the change that [`replace`](Self::replace) has made on the leader.
    pub fn append(&mut self, slot: SlotId, kept: usize, pages: &[PageId]) -> Result<(), String> {
        let Some(known) = self.table_mut(slot) else {
            return if kept == 0 { Ok(()) } else { Err("a row without a slot keeps pages".to_owned()) };
        };
        if kept > known.len() {
            return Err(format!("slot {} keeps {kept} pages of {}", slot.0, known.len()));
        }
        known.truncate(kept);
        known.extend_from_slice(pages);
        Ok(())
    }

    /// Returns the table of a slot, which is empty for the null slot.
    pub fn of(&self, slot: SlotId) -> &[PageId] {
        match self.by_slot.get(slot.0 as usize) {
            Some(table) if slot != SlotId::NULL => &table.pages,
            _ => &[],
        }
    }

    fn table_mut(&mut self, slot: SlotId) -> Option<&mut Vec<PageId>> {
        let table = self.by_slot.get_mut(slot.0 as usize).filter(|_| slot != SlotId::NULL)?;
        Some(&mut table.pages)
    }
}

/// Compares two lists of equal length without a branch per page, so that the compiler can compare several pages at
/// once.
fn are_equal(a: &[PageId], b: &[PageId]) -> bool {
    let same = |(a, b): (&[PageId], &[PageId])| a.iter().zip(b).fold(true, |same, (a, b)| same & (a == b));
    a.chunks(64).zip(b.chunks(64)).all(same)
}
