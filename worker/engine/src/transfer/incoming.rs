//! Requests that are prefilled elsewhere and decoded here, and the received runs on their way to the device.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use tutti_proto::GraphKey;
use tutti_scheduler::{PageId, Reserved, SlotId};
use tutti_transfer::{Filled, Run, Source};

/// A request that is prefilled elsewhere and decoded here.
pub(super) struct Incoming {
    pub pages: Arc<[PageId]>,
    pub slot: SlotId,
    /// Index of the first page that belongs to this request alone. The pages before this index are shared and valid,
    /// and are never written.
    first_own: usize,
    /// The units that each rank of the group has written.
    ranks: Vec<Filled>,
}

impl Incoming {
    /// Creates the entry of a request that holds reserved pages on a group of `ranks` ranks.
    pub fn new(Reserved { pages, known, slot, .. }: Reserved, ranks: usize) -> Self {
        let filled = Filled::new(pages.len(), known);
        Self { pages: pages.into(), slot, first_own: known, ranks: vec![filled; ranks] }
    }

    /// True if the `count` pages from index `first` on belong to the request and none of them is shared.
    pub fn may_write(&self, first: usize, count: usize) -> bool {
        first >= self.first_own && first.saturating_add(count) <= self.pages.len()
    }

    /// Records that the units of `run` are written: by `rank` its own part of each unit, or by all ranks if it is
    /// `None`.
    pub fn written(&mut self, rank: Option<usize>, run: &Run) {
        match rank {
            Some(rank) => self.ranks.get_mut(rank).into_iter().for_each(|filled| filled.fill(run)),
            None => self.ranks.iter_mut().for_each(|filled| filled.fill(run)),
        }
    }

    /// Units that this rank, the leader, has written.
    pub fn own(&self) -> &Filled {
        &self.ranks[0]
    }

    /// True if this rank has written all units, but another rank has not. The slot counts only if `with_slot` is true.
    pub fn awaits_ranks(&self, with_slot: bool) -> bool {
        self.own().is_complete(with_slot) && self.ranks.iter().any(|filled| !filled.is_complete(with_slot))
    }
}

/// Received runs to write to the device, in order of arrival.
#[derive(Default)]
pub(super) struct Unwritten {
    /// Each run, its source, and the number of bytes to copy on one rank.
    runs: VecDeque<(Run, Source, usize)>,
    bytes: usize,
}

impl Unwritten {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn push(&mut self, run: Run, source: Source, bytes: usize) {
        self.bytes += bytes;
        self.runs.push_back((run, source, bytes));
    }

    /// Takes the next run whose request still waits. The runs of requests that have ended are dropped, because the
    /// requests' pages may then belong to other requests.
    pub fn next(&mut self, waiting: &BTreeMap<GraphKey, Incoming>) -> Option<(Run, Source, usize)> {
        loop {
            let (run, source, bytes) = self.runs.pop_front()?;
            self.bytes -= bytes;
            if waiting.contains_key(&run.key) {
                return Some((run, source, bytes));
            }
        }
    }

    /// True if a run of this request waits to be written.
    pub fn has(&self, key: GraphKey) -> bool {
        self.runs.iter().any(|(run, ..)| run.key == key)
    }
}
