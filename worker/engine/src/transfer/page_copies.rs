//! Copies of pages and slots between device and host.

use tutti_kernels::DeviceError;
use tutti_models::{GroupShares, PausedPages, ShareRun, ShareUnits};
use tutti_proto::cluster::v1 as pb;

use super::outgoing::Extent;

/// Copies of pages and slots that the device's thread runs between two steps or in a pause of a step.
#[derive(Default)]
pub(crate) struct PageCopies {
    /// Orders for the couriers of the group's other ranks. They come before the copies.
    pub(super) orders: Vec<pb::RankOrder>,
    pub(super) reads: Vec<UnitCopy>,
    pub(super) writes: Vec<UnitCopy>,
    /// Runs of which other ranks write the shares that have arrived there, each with its rank and bytes.
    pub(super) rank_writes: Vec<(usize, ShareRun, usize)>,
}

/// A copy of consecutive pages of a request, or of its slot.
pub(super) struct UnitCopy {
    pub run: ShareRun,
    pub extent: Extent,
    /// The bytes to write, or room for the bytes to read.
    pub data: Vec<u8>,
}

impl PageCopies {
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
            && self.reads.is_empty()
            && self.writes.is_empty()
            && self.rank_writes.is_empty()
    }

    /// Bytes that the copies move on one rank.
    pub fn bytes(&self) -> usize {
        let reads: usize = self.reads.iter().map(|copy| copy.data.capacity()).sum();
        let writes: usize = self.writes.iter().map(|copy| copy.data.len()).sum();
        let there = |rank: usize| -> usize {
            let of = self.rank_writes.iter().filter(|(other, ..)| *other == rank);
            of.map(|(.., bytes)| bytes).sum()
        };
        let there = self.rank_writes.iter().map(|(rank, ..)| there(*rank)).max();
        reads + writes.max(there.unwrap_or(0))
    }

    /// Runs the copies. An error ends the worker, because copied and uncopied pages cannot be told apart.
    pub fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError> {
        let failed = |e| DeviceError::Lost(format!("cannot copy pages for another worker: {e}"));
        if !self.orders.is_empty() {
            shares(pages)?.order(std::mem::take(&mut self.orders)).map_err(failed)?;
        }
        for UnitCopy { run, extent, data } in &mut self.reads {
            match (extent, &run.units) {
                (Extent::Share, _) => shares(pages)?.read(run, data),
                (Extent::Whole, ShareUnits::Pages(ids)) => pages.read_pages(ids, data),
                (Extent::Whole, ShareUnits::Slot(slot)) => pages.read_slot(*slot, data),
            }
            .map_err(failed)?;
        }
        if !self.rank_writes.is_empty() {
            let runs: Vec<_> = self.rank_writes.iter().map(|(rank, run, _)| (*rank, run.clone())).collect();
            shares(pages)?.write_on_ranks(&runs).map_err(failed)?;
        }
        for UnitCopy { run, extent, data } in &self.writes {
            match (extent, &run.units) {
                (Extent::Share, units) => shares(pages)?.write(units, data),
                (Extent::Whole, ShareUnits::Pages(ids)) => pages.write_pages(ids, data),
                (Extent::Whole, ShareUnits::Slot(slot)) => pages.write_slot(*slot, data),
            }
            .map_err(failed)?;
        }
        Ok(())
    }
}

fn shares(pages: &mut dyn PausedPages) -> Result<&mut dyn GroupShares, DeviceError> {
    pages.group_shares().ok_or_else(|| DeviceError::Lost("shares are copied without a group".into()))
}
