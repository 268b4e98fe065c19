//! Shares: what one rank of a TP group holds of a request's pages and slot.
//!
//! Between groups of as many ranks, each rank sends its own share to the rank of the same number, so that no rank
//! handles more bytes than it holds. The leader decides which runs are sent and written, through [`GroupShares`], and
//! the other ranks exchange the bytes with their [`RankCourier`].

use tutti_kernels::{DeviceError, PageId, SlotId};
use tutti_proto::{GraphKey, cluster::v1 as pb};

/// The division of pages and slots among the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareLayout {
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes per page of one rank's share. All ranks have shares of the same size.
    pub page_bytes: usize,
    /// Bytes per slot of one rank's share. 0 without slot planes.
    pub slot_bytes: usize,
}

impl ShareLayout {
    /// The layout of a worker without a group, which exchanges no shares.
    pub const ALONE: Self = Self { ranks: 1, page_bytes: 0, slot_bytes: 0 };

    /// True if this group and one of `ranks` ranks exchange shares, and not whole pages.
    pub fn is_shared_with(&self, ranks: usize) -> bool {
        self.ranks > 1 && self.ranks == ranks
    }
}

/// Consecutive pages of a request, or its slot, of which each rank holds a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareRun {
    /// The request's graph.
    pub key: GraphKey,
    /// Index of the first page within the request. 0 for a slot.
    pub first: usize,
    /// The place of the units on the device, the same on all ranks.
    pub units: ShareUnits,
}

/// The units of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShareUnits {
    /// Pages.
    Pages(Vec<PageId>),
    /// One slot.
    Slot(SlotId),
}

impl ShareUnits {
    /// Number of pages or slots.
    pub fn count(&self) -> usize {
        match self {
            Self::Pages(pages) => pages.len(),
            Self::Slot(_) => 1,
        }
    }
}

impl From<&ShareRun> for pb::ShareRun {
    fn from(ShareRun { key, first, units }: &ShareRun) -> Self {
        let (pages, slot) = match units {
            ShareUnits::Pages(pages) => (pages.iter().map(|page| page.0).collect(), None),
            ShareUnits::Slot(slot) => (Vec::new(), Some(slot.0)),
        };
        Self { key: Some((*key).into()), first: *first as u32, pages, slot }
    }
}

impl From<pb::ShareRun> for ShareRun {
    fn from(pb::ShareRun { key, first, pages, slot }: pb::ShareRun) -> Self {
        let units = match slot {
            Some(slot) => ShareUnits::Slot(SlotId(slot)),
            None => ShareUnits::Pages(pages.into_iter().map(PageId).collect()),
        };
        Self { key: key.unwrap_or_default().into(), first: first as usize, units }
    }
}

/// The shares of a whole group, as its leader directs them. The device's thread calls these methods between two steps.
pub trait GroupShares {
    /// The division among the ranks.
    fn layout(&self) -> ShareLayout;
    /// Gives orders to the couriers of the other ranks.
    fn order(&mut self, orders: Vec<pb::RankOrder>) -> Result<(), DeviceError>;
    /// Reads a run on every rank. Appends the leader's share to `out`. Each other rank gives its share to its courier.
    fn read(&mut self, run: &ShareRun, out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// Writes the leader's share of units.
    fn write(&mut self, units: &ShareUnits, data: &[u8]) -> Result<(), DeviceError>;
    /// Lets ranks other than the leader write runs that their couriers hold. Each run comes with its rank.
    fn write_on_ranks(&mut self, runs: &[(usize, ShareRun)]) -> Result<(), DeviceError>;
}

/// The courier of a rank that follows its leader. No method blocks for long: the group's step waits meanwhile.
pub trait RankCourier {
    /// Takes an order of the leader. An error ends the rank: it says why the leader can no longer learn what becomes of
    /// the rank's shares.
    fn order(&mut self, order: pb::RankOrder) -> Result<(), String>;
    /// Sends the rank's share of a run. The content is final.
    fn send(&mut self, run: &ShareRun, data: Vec<u8>);
    /// Takes the share of a run that has arrived and that the leader was told of. `None` if there is no such share.
    fn take(&mut self, run: &ShareRun) -> Option<Vec<u8>>;
}

/// The courier of a rank whose leader exchanges no shares.
pub struct NoCourier;

impl RankCourier for NoCourier {
    fn order(&mut self, _: pb::RankOrder) -> Result<(), String> {
        Ok(())
    }

    fn send(&mut self, _: &ShareRun, _: Vec<u8>) {}

    fn take(&mut self, _: &ShareRun) -> Option<Vec<u8>> {
        None
    }
}
