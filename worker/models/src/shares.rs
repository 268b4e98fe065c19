//! Shares: the parts of a request's pages and slot that one rank of a TP group holds.
//!
//! If two groups have the same number of ranks, each rank sends its own share to the rank with the same index in the
//! other group, so that no rank handles other ranks' bytes. Through [`GroupShares`], the leader decides which runs are
//! sent and written. Each other rank moves the bytes with its own [connector](tutti_transfer::Connector).

use tutti_kernels::{DeviceError, collective::GroupRank};
use tutti_proto::cluster::v1 as pb;
use tutti_transfer::{Run, UnitIds};

/// The leader's control over the shares of all ranks. The device's thread calls these methods between two steps.
pub trait GroupShares {
    /// The leader's rank, and the size of the group.
    fn group_rank(&self) -> GroupRank;
    /// Sends orders to the connectors of the other ranks.
    fn order(&mut self, orders: Vec<pb::RankOrder>) -> Result<(), DeviceError>;
    /// Reads a run on every rank. Appends the leader's share to `out`. Each other rank gives its share to its
    /// connector.
    fn read(&mut self, run: &Run, ids: &UnitIds, out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// Writes the leader's share to pages or to a slot.
    fn write(&mut self, ids: &UnitIds, data: &[u8]) -> Result<(), DeviceError>;
    /// Makes ranks other than the leader write runs that their connectors have received. An element is (rank, run, ids
    /// of the pages or the slot to write).
    fn write_on_ranks(&mut self, runs: &[(usize, Run, UnitIds)]) -> Result<(), DeviceError>;
}
