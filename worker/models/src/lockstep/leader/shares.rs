//! Plans that make each rank read or write its own share of a request. No bytes of other ranks pass through the leader.

use tutti_kernels::{DeviceError, collective::GroupRank};
use tutti_proto::cluster::v1::{self as pb, group_plan::Action};
use tutti_transfer::{Run, UnitIds};

use super::Leader;
use crate::{GroupShares, IdleModel, PausedPages};

impl Leader {
    fn check_units(&self, ids: &UnitIds) -> Result<(), DeviceError> {
        match ids {
            UnitIds::Pages(pages) => self.tables.check_pages(pages.len()),
            UnitIds::Slot(slot) => self.tables.check_slot(*slot).map(drop),
        }
        .map_err(DeviceError::Misuse)
    }
}

impl GroupShares for Leader {
    fn group_rank(&self) -> GroupRank {
        self.plans.group_rank()
    }

    fn order(&mut self, orders: Vec<pb::RankOrder>) -> Result<(), DeviceError> {
        self.send(Action::Orders(pb::RankOrders { orders })).map(drop)
    }

    fn read(&mut self, run: &Run, ids: &UnitIds, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.check_units(ids)?;
        self.send(Action::SendShare(pb::SendShare { run: Some(run.message(ids)) }))?;
        IdleModel(&mut *self.model).read_units(ids, out)
    }

    fn write(&mut self, ids: &UnitIds, data: &[u8]) -> Result<(), DeviceError> {
        IdleModel(&mut *self.model).write_units(ids, data)
    }

    fn write_on_ranks(&mut self, runs: &[(usize, Run, UnitIds)]) -> Result<(), DeviceError> {
        runs.iter().try_for_each(|(_, _, ids)| self.check_units(ids))?;
        let write = |(rank, run, ids): &(usize, Run, UnitIds)| pb::RankWrite {
            rank: *rank as u32,
            run: Some(run.message(ids)),
        };
        self.send(Action::WriteShares(pb::WriteShares { writes: runs.iter().map(write).collect() })).map(drop)
    }
}
