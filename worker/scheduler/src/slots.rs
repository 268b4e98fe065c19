//! Slots: a fixed number of bytes of state per request, copies between slots, and the pool of slots.
//!
//! A slot is held (a running request or a save owns it), a snapshot (the prefix cache can restore a request from it),
//! or free. A snapshot is idle unless a request that begins from it still reads it. Idle snapshots count as
//! available: they are taken when no free slot is left, the snapshot unused for longest first.

use std::collections::BTreeMap;

use tutti_planes::{PageId, SlotId};

/// The slots of a worker.
#[derive(Debug)]
pub(crate) struct SlotPool {
    /// The use of each slot, by the slot's index.
    uses: Vec<Use>,
    /// The free slots, used as a stack.
    free: Vec<SlotId>,
    /// Idle snapshots, by the time of their last use.
    idle: BTreeMap<u64, SlotId>,
    /// Logical time: counts uses of snapshots.
    clock: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    Held,
    Snapshot {
        /// The page of the last block that the snapshot's state covers.
        page: PageId,
        /// Number of requests that begin from the snapshot and have not committed their first row.
        readers: u32,
        /// The snapshot's key in `idle`, if it has no readers.
        since: u64,
    },
}

impl SlotPool {
    /// A pool of `slots` slots, the null slot included.
    pub fn new(slots: usize) -> Self {
        let mut uses = vec![Use::Free; slots];
        if let Some(null) = uses.first_mut() {
            *null = Use::Held;
        }
        // Slots are taken from the end of the list, so that a new pool gives out slots in ascending order.
        let free = (1..slots).rev().map(|slot| SlotId(slot as u32)).collect();
        Self { uses, free, idle: BTreeMap::new(), clock: 0 }
    }

    /// Takes a slot. If the slot was an idle snapshot, also returns the snapshot's page. None if no slot is
    /// available.
    pub fn take(&mut self) -> Option<(SlotId, Option<PageId>)> {
        let slot = self.free.pop().or_else(|| Some(self.idle.pop_first()?.1))?;
        let before = std::mem::replace(&mut self.uses[slot.0 as usize], Use::Held);
        let page = if let Use::Snapshot { page, .. } = before { Some(page) } else { None };
        Some((slot, page))
    }

    /// Gives back a slot that [`take`](Self::take) returned.
    pub fn give_back(&mut self, slot: SlotId) {
        let of_slot = &mut self.uses[slot.0 as usize];
        assert!(*of_slot == Use::Held && slot != SlotId::NULL, "slot {} is {of_slot:?}, not held", slot.0);
        *of_slot = Use::Free;
        self.free.push(slot);
    }

    /// Makes a held slot the snapshot of `page`.
    pub fn attach(&mut self, slot: SlotId, page: PageId) {
        let of_slot = &mut self.uses[slot.0 as usize];
        assert!(*of_slot == Use::Held && slot != SlotId::NULL, "slot {} is {of_slot:?}, not held", slot.0);
        self.clock += 1;
        *of_slot = Use::Snapshot { page, readers: 0, since: self.clock };
        self.idle.insert(self.clock, slot);
    }

    /// Frees an idle snapshot.
    pub fn drop_snapshot(&mut self, slot: SlotId) {
        let of_slot = &mut self.uses[slot.0 as usize];
        let Use::Snapshot { readers: 0, since, .. } = *of_slot else {
            unreachable!("slot {} is {of_slot:?}, not an idle snapshot", slot.0)
        };
        self.idle.remove(&since);
        *of_slot = Use::Free;
        self.free.push(slot);
    }

    /// Adds a reader to a snapshot. The snapshot is not evicted until the reader is [removed](Self::remove_reader).
    pub fn add_reader(&mut self, slot: SlotId) {
        let of_slot = &mut self.uses[slot.0 as usize];
        let Use::Snapshot { readers, since, .. } = of_slot else {
            unreachable!("slot {} is {of_slot:?}, not a snapshot", slot.0)
        };
        if *readers == 0 {
            self.idle.remove(since);
        }
        *readers += 1;
    }

    /// Removes a reader from a snapshot, which counts as used now.
    pub fn remove_reader(&mut self, slot: SlotId) {
        let of_slot = &mut self.uses[slot.0 as usize];
        let Use::Snapshot { readers: readers @ 1.., since, .. } = of_slot else {
            unreachable!("slot {} is {of_slot:?}, not a snapshot with readers", slot.0)
        };
        *readers -= 1;
        if *readers == 0 {
            self.clock += 1;
            *since = self.clock;
            self.idle.insert(self.clock, slot);
        }
    }

    /// Number of slots that requests can hold: all but the null slot.
    pub fn total(&self) -> usize {
        self.uses.len().saturating_sub(1)
    }

    /// Number of slots that can be taken.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Number of slots that are held, or are snapshots with readers.
    pub fn used(&self) -> usize {
        self.total() - self.available()
    }

    /// Number of idle snapshots.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }
}

#[cfg(test)]
mod tests;
