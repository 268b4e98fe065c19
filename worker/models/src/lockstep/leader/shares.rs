//! Reads and writes of shares by plans. Each rank keeps its own bytes.

use tutti_kernels::DeviceError;
use tutti_proto::cluster::v1::{self as pb, group_plan::Action};

use super::Leader;
use crate::{
    LayoutPart,
    shares::{GroupShares, ShareLayout, ShareRun, ShareUnits},
};

impl Leader {
    fn check_units(&self, units: &ShareUnits) -> Result<(), DeviceError> {
        match units {
            ShareUnits::Pages(pages) => self.tables.check_pages(pages.len()),
            ShareUnits::Slot(slot) => self.tables.check_slot(*slot).map(drop),
        }
        .map_err(DeviceError::Misuse)
    }
}

impl GroupShares for Leader {
    fn layout(&self) -> ShareLayout {
        let group_rank = self.plans.group_rank();
        ShareLayout {
            ranks: group_rank.world_size,
            page_bytes: self.layout.share_bytes(LayoutPart::Pages, group_rank),
            slot_bytes: self.layout.share_bytes(LayoutPart::Slots, group_rank),
        }
    }

    fn order(&mut self, orders: Vec<pb::RankOrder>) -> Result<(), DeviceError> {
        self.send(Action::Orders(pb::RankOrders { orders })).map(drop)
    }

    fn read(&mut self, run: &ShareRun, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.check_units(&run.units)?;
        self.send(Action::SendShare(pb::SendShare { run: Some(run.into()) }))?;
        match &run.units {
            ShareUnits::Pages(pages) => self.model.read_pages(pages, out),
            ShareUnits::Slot(slot) => self.model.read_slot(*slot, out),
        }
    }

    fn write(&mut self, units: &ShareUnits, data: &[u8]) -> Result<(), DeviceError> {
        match units {
            ShareUnits::Pages(pages) => self.model.write_pages(pages, data),
            ShareUnits::Slot(slot) => self.model.write_slot(*slot, data),
        }
    }

    fn write_on_ranks(&mut self, runs: &[(usize, ShareRun)]) -> Result<(), DeviceError> {
        runs.iter().try_for_each(|(_, run)| self.check_units(&run.units))?;
        let write =
            |(rank, run): &(usize, ShareRun)| pb::RankWrite { rank: *rank as u32, run: Some(run.into()) };
        self.send(Action::WriteShares(pb::WriteShares { writes: runs.iter().map(write).collect() })).map(drop)
    }
}
