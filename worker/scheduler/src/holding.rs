//! The planes that a request holds (pages and a slot), and the pool of all pages and slots.

use tutti_planes::{PageId, SlotId};

use crate::{
    pages::{BlockTable, PagePool},
    prefix::{Chain, PrefixCache},
    slots::SlotPool,
};

/// The planes of one request: its pages and its slot. A holding is given back exactly once, by [`PlanePool::release`],
/// and only when no step in flight reads or writes its planes.
#[derive(Debug)]
#[must_use = "a dropped holding leaks its pages and its slot; give it to PlanePool::release"]
pub(crate) struct Holding {
    pub table: BlockTable,
    pub slot: SlotId,
}

/// The pages and slots of a worker. A snapshot belongs to both: it is a slot that is attached to a page of the prefix
/// cache.
#[derive(Debug)]
pub(crate) struct PlanePool {
    pages: PagePool,
    slots: SlotPool,
    /// True if the model has planes in slots. Otherwise the content of a slot is never used.
    has_slots: bool,
}

impl PlanePool {
    pub fn new(pages: PagePool, slots: SlotPool, has_slots: bool) -> Self {
        Self { pages, slots, has_slots }
    }

    pub fn pages(&self) -> &PagePool {
        &self.pages
    }

    pub fn slots(&self) -> &SlotPool {
        &self.slots
    }

    pub fn has_slots(&self) -> bool {
        self.has_slots
    }

    /// The index of pages by content. It also keeps the last look-up of a waiting request.
    pub fn content_mut(&mut self) -> &mut PrefixCache {
        self.pages.content_mut()
    }

    /// Takes a slot and `pages` pages, of which the first are the `known` pages. Adds a reader to `snapshot`, if there
    /// is one. None, without effect, if too few pages or slots are available.
    pub fn take(
        &mut self,
        known: &[(PageId, Chain)],
        pages: usize,
        snapshot: Option<SlotId>,
    ) -> Option<Holding> {
        if !self.pages.fits_behind(known, pages) {
            return None;
        }
        // The reader is added first. Otherwise `take_slot` could take the slot of this snapshot.
        snapshot.iter().for_each(|&slot| self.slots.add_reader(slot));
        let Some(slot) = self.take_slot() else {
            self.remove_reader(snapshot);
            return None;
        };
        let table = self.pages.allocate_behind(known, pages);
        self.free_dropped();
        match table {
            Some(table) => Some(Holding { table, slot }),
            None => {
                self.slots.give_back(slot);
                self.remove_reader(snapshot);
                None
            }
        }
    }

    /// Takes a slot, if necessary that of the idle snapshot unused for longest. None if no slot is available.
    pub fn take_slot(&mut self) -> Option<SlotId> {
        let (slot, page) = self.slots.take()?;
        page.iter().for_each(|&page| self.pages.set_snapshot(page, SlotId::NULL));
        Some(slot)
    }

    /// Gives back a slot that belongs to no holding.
    pub fn give_back_slot(&mut self, slot: SlotId) {
        self.slots.give_back(slot);
    }

    /// Removes a reader of the snapshot. Has no effect for None and for the null slot, which has no readers.
    pub fn remove_reader(&mut self, snapshot: Option<SlotId>) {
        if let Some(slot) = snapshot.filter(|&slot| slot != SlotId::NULL) {
            self.slots.remove_reader(slot);
        }
    }

    /// The snapshot of the last block of `chain`: the slot with the state behind that block. The null slot if the block
    /// has no snapshot.
    pub fn snapshot(&self, chain: Chain) -> SlotId {
        self.pages.snapshot(chain)
    }

    /// Makes the slot the snapshot of the chain's last block, or frees it if the block has a snapshot already or is
    /// no longer cached.
    pub fn attach(&mut self, slot: SlotId, chain: Option<Chain>) {
        match chain.and_then(|chain| self.pages.page_without_snapshot(chain)) {
            Some(page) => {
                self.slots.attach(slot, page);
                self.pages.set_snapshot(page, slot);
            }
            None => self.slots.give_back(slot),
        }
    }

    /// Adds a page to the holding. False if no page is available.
    pub fn grow(&mut self, holding: &mut Holding) -> bool {
        let page = self.pages.allocate(1);
        self.free_dropped();
        page.map(|page| holding.table.extend(page)).is_some()
    }

    /// Records the content of a page; see [`PagePool::record`].
    pub fn record(
        &mut self,
        holding: &Holding,
        index: usize,
        before: Chain,
        tokens: &[u32],
    ) -> Option<Chain> {
        self.pages.record(&holding.table, index, before, tokens)
    }

    /// Gives back a request's pages and slot.
    pub fn release(&mut self, holding: Holding) {
        let Holding { table, slot } = holding;
        self.pages.release(table);
        self.slots.give_back(slot);
    }

    /// Frees the snapshots of pages that were evicted.
    fn free_dropped(&mut self) {
        while let Some(slot) = self.pages.next_dropped_snapshot() {
            self.slots.drop_snapshot(slot);
        }
    }
}
