//! Collective operations of the ranks of a TP (tensor parallel) group.
//!
//! [`Collective`] is the interface to a transport: a model calls its device for a sum over ranks, and the device calls
//! its group. Ranks on one machine use shared memory ([`SharedMemory`]), and ranks on several machines use TCP
//! ([`Tcp`]). A group of GPUs has collectives of its own, which the device enqueues: see `cuda/nccl.rs`. A group of
//! GPUs uses [`Collective`] only to broadcast the plans of steps.
//!
//! Every rank makes the same calls in the same order. Sums are computed in f32 and in the order of ranks, whatever the
//! transport and the order of arrival. For a given number of ranks, every run therefore gives the same bits. Each call
//! has a deadline. When the deadline passes, the call fails and names the missing rank. After any error the group is
//! unusable.

mod mapping;
mod shared_memory;
mod tcp;

use std::{ops::Range, time::Duration};

pub use self::{
    shared_memory::SharedMemory,
    tcp::{PlainLinks, RankLinks, RankStream, Tcp, Terms},
};
use crate::DeviceError;

/// A rank and the size of its TP group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRank {
    /// Index of the rank, below `world_size`. Rank 0 is the leader.
    pub rank: usize,
    /// Number of ranks in the group, at least 1.
    pub world_size: usize,
}

impl GroupRank {
    /// The only rank of a group of one.
    pub const ALONE: Self = Self { rank: 0, world_size: 1 };

    /// True if this rank is the whole group.
    pub fn is_alone(self) -> bool {
        self.world_size == 1
    }

    /// True for rank 0.
    pub fn is_leader(self) -> bool {
        self.rank == 0
    }
}

/// Returns a rank's share of `units`. With more ranks than units, neighbouring ranks hold the same unit. The caller has
/// checked that the number of units is a multiple or a divisor of the number of ranks.
pub fn share(units: usize, group_rank: GroupRank) -> Range<usize> {
    let first = group_rank.rank * units / group_rank.world_size;
    first..first + (units / group_rank.world_size).max(1)
}

/// The time limit for the start of a broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// The group's deadline, as for all other collectives.
    Deadline,
    /// No limit: rank 0 may be idle for hours.
    Forever,
}

/// One rank's endpoint of a group.
pub trait Collective: Send {
    /// This rank and the size of its group.
    fn group_rank(&self) -> GroupRank;
    /// Name of the transport, for logs.
    fn transport(&self) -> &'static str;
    /// Replaces every rank's `data` with the elementwise sum of all ranks' `data`, in the order of ranks.
    fn all_reduce(&mut self, data: &mut [f32]) -> Result<(), CollectiveError>;
    /// Concatenates all ranks' `part` in the order of ranks, into `out` at rank 0. All parts have the same length. Only
    /// rank 0 passes an `out`.
    fn gather(&mut self, part: &[f32], out: Option<&mut [f32]>) -> Result<(), CollectiveError>;
    /// Does the same as [`gather`](Self::gather) for bytes.
    fn gather_bytes(&mut self, part: &[u8], out: Option<&mut [u8]>) -> Result<(), CollectiveError>;
    /// Fills each rank's `part` with its part of rank 0's `parts`, which holds the parts of all ranks end to end. All
    /// parts have the same length. Only rank 0 passes `parts`.
    fn scatter_bytes(&mut self, parts: Option<&[u8]>, part: &mut [u8]) -> Result<(), CollectiveError>;
    /// Replaces every rank's `out` with the concatenation of all ranks' `part` in the order of ranks. All parts have
    /// the same length.
    fn all_gather(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), CollectiveError>;
    /// Replaces every rank's `message` with rank 0's.
    fn broadcast(&mut self, message: &mut Vec<u8>, patience: Patience) -> Result<(), CollectiveError>;
    /// Returns once all ranks have called `barrier`.
    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.all_gather(&[], &mut Vec::new())
    }
}

/// An error of a collective. The error leaves the group unusable, except for [`CollectiveError::Misuse`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A rank did not join a collective within the deadline.
    #[error("rank {rank} of {size} did not come to a collective ({operation}) within {deadline:?}")]
    Missing {
        /// The first missing rank.
        rank: usize,
        /// Number of ranks in the group.
        size: usize,
        /// The collective that the other ranks had joined.
        operation: Operation,
        /// Duration of the wait.
        deadline: Duration,
    },
    /// A collective that the transport runs on its own (NCCL) has not ended within the limit, because some rank has not
    /// joined it.
    #[error("a collective ({operation}) has not ended at rank {rank} of {size} within {limit:?}")]
    Unfinished {
        /// The rank that waited.
        rank: usize,
        /// Number of ranks in the group.
        size: usize,
        /// The collective that the rank had joined.
        operation: Operation,
        /// Duration of the wait.
        limit: Duration,
    },
    /// A rank has left the group.
    #[error("rank {rank} of {size} has left the group")]
    Left {
        /// The rank that left.
        rank: usize,
        /// Number of ranks in the group.
        size: usize,
    },
    /// Two ranks made different calls, which is a bug.
    #[error("rank {rank} is at {theirs}, while this rank is at {ours}")]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// The other rank's call.
        theirs: String,
        /// This rank's call.
        ours: String,
    },
    /// An argument that violates the contract of [`Collective`].
    #[error("misuse of a collective: {0}")]
    Misuse(String),
    /// The transport could not be set up, or failed.
    #[error("{0}")]
    Transport(String),
}

impl From<CollectiveError> for DeviceError {
    fn from(error: CollectiveError) -> Self {
        // The error leaves the state of the other ranks unknown, so the device is unusable.
        Self::Lost(error.to_string())
    }
}

/// The kind of a collective. Ranks compare the kinds of their calls, to detect that two ranks made different calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// The formation of the group.
    Forming = 1,
    /// [`Collective::all_reduce`].
    AllReduce,
    /// [`Collective::gather`] and [`Collective::gather_bytes`].
    Gather,
    /// [`Collective::all_gather`].
    AllGather,
    /// [`Collective::broadcast`].
    Broadcast,
    /// [`Collective::scatter_bytes`].
    Scatter,
}

impl Operation {
    fn from_code(code: u8) -> Option<Self> {
        use Operation::{AllGather, AllReduce, Broadcast, Forming, Gather, Scatter};
        [Forming, AllReduce, Gather, AllGather, Broadcast, Scatter]
            .into_iter()
            .find(|operation| *operation as u8 == code)
    }
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Forming => "forming the group",
            Self::AllReduce => "all-reduce",
            Self::Gather => "gather",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Scatter => "scatter",
        })
    }
}

/// Checks that rank 0 passes the parts of all ranks, end to end, and that no other rank passes any. The lengths are in
/// elements.
fn check_parts(
    group_rank: GroupRank,
    what: &str,
    part: usize,
    parts: Option<usize>,
) -> Result<(), CollectiveError> {
    let wanted = group_rank.is_leader().then_some(part * group_rank.world_size);
    if parts == wanted {
        return Ok(());
    }
    Err(CollectiveError::Misuse(format!("{what} {parts:?} elements at {group_rank:?}, wanted {wanted:?}")))
}
