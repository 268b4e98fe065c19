//! Requests that are prefilled elsewhere and decoded here, and the received runs on their way to the device.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use tutti_proto::GraphKey;
use tutti_scheduler::{PageId, Reserved, SlotId};

use super::courier::Cargo;

/// A request that is prefilled elsewhere and decoded here.
pub(super) struct Incoming {
    pub pages: Arc<[PageId]>,
    pub slot: SlotId,
    /// Index of the first page that belongs to this request alone. The pages before this index are shared and valid,
    /// and are never written.
    first_own: usize,
    /// Progress of each rank of the group.
    ranks: Vec<Written>,
}

#[derive(Clone)]
struct Written {
    /// True for each page whose content is valid.
    pages: Vec<bool>,
    /// True once the slot holds the request's state.
    slot: bool,
}

/// A unit that is not written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    Page(usize),
    Slot,
}

impl Incoming {
    /// A request that holds reserved pages on a group of `ranks` ranks.
    pub fn new(Reserved { pages, known, slot, .. }: Reserved, ranks: usize) -> Self {
        let written = Written { pages: (0..pages.len()).map(|index| index < known).collect(), slot: false };
        Self { pages: pages.into(), slot, first_own: known, ranks: vec![written; ranks] }
    }

    /// True if all of these pages are the request's and none of them is shared.
    pub fn may_write(&self, first: usize, count: usize) -> bool {
        first >= self.first_own && first.saturating_add(count) <= self.pages.len()
    }

    /// Records that units are written: the share of one rank, or with `None` the units of all ranks.
    pub fn written(&mut self, rank: Option<usize>, cargo: Cargo, first: usize, count: usize) {
        let at = |index| rank.is_none_or(|rank| rank == index);
        for (_, written) in self.ranks.iter_mut().enumerate().filter(|(index, _)| at(*index)) {
            match cargo {
                Cargo::Slot => written.slot = true,
                Cargo::Pages | Cargo::Embeddings => written.pages[first..first + count].fill(true),
            }
        }
    }

    /// The first unit that the rank has not written. The slot counts only if `has_slots` is true.
    pub fn missing_at(&self, rank: usize, has_slots: bool) -> Option<Missing> {
        let written = self.ranks.get(rank)?;
        let page = written.pages.iter().position(|written| !written).map(Missing::Page);
        page.or_else(|| (has_slots && !written.slot).then_some(Missing::Slot))
    }

    /// The first rank other than the leader that has not written all units.
    pub fn awaited_rank(&self, has_slots: bool) -> Option<usize> {
        (1..self.ranks.len()).find(|rank| self.missing_at(*rank, has_slots).is_some())
    }
}

/// A received run that is not written yet.
pub(super) struct Received {
    pub key: GraphKey,
    pub cargo: Cargo,
    pub first: usize,
    pub count: usize,
    /// Bytes to copy on one rank.
    pub bytes: usize,
    pub from: Source,
}

/// The place of a received run's bytes.
pub(super) enum Source {
    /// Whole units, here.
    Whole(Vec<u8>),
    /// This rank's share, here.
    Own(Vec<u8>),
    /// The share of another rank, there.
    Rank(usize),
}

/// Received runs to write to the device, in order of arrival.
#[derive(Default)]
pub(super) struct Unwritten {
    runs: VecDeque<Received>,
    bytes: usize,
}

impl Unwritten {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn push(&mut self, run: Received) {
        self.bytes += run.bytes;
        self.runs.push_back(run);
    }

    /// Takes the next run whose request still waits. The runs of requests that have ended are dropped, because the
    /// requests' pages may then belong to other requests.
    pub fn next(&mut self, waiting: &BTreeMap<GraphKey, Incoming>) -> Option<Received> {
        loop {
            let run = self.runs.pop_front()?;
            self.bytes -= run.bytes;
            if waiting.contains_key(&run.key) {
                return Some(run);
            }
        }
    }

    /// True if a run of this request waits.
    pub fn has(&self, key: GraphKey) -> bool {
        self.runs.iter().any(|run| run.key == key)
    }
}
