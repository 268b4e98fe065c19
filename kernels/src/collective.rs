//! What the ranks of a TP group compute together.
//!
//! [`Collective`] is the seam: models ask their device for a sum over ranks, the device asks its group. Ranks of one
//! machine meet in shared memory ([`SharedMemory`]), ranks apart over TCP ([`Tcp`]); a group of GPUs will have its
//! library's own, enqueued by its device.
//!
//! Every rank makes the same calls in the same order. Sums are taken in f32 and in the order of ranks, whatever the
//! transport and whoever comes first: for a given number of ranks the bits never differ from run to run. Each call has a
//! deadline; past it the call fails and names who is missing. After any error the group is of no use any more.

mod mapping;
mod shared_memory;
mod tcp;

use std::time::Duration;

pub use self::{shared_memory::SharedMemory, tcp::Tcp};
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

/// How long to wait for a broadcast to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// The deadline of every collective.
    Deadline,
    /// For as long as it takes: rank 0 may have nothing to say for hours.
    Forever,
}

/// One rank's end of a group.
pub trait Collective: Send {
    /// This rank and the size of its group.
    fn group_rank(&self) -> GroupRank;
    /// The transport, for logs.
    fn transport(&self) -> &'static str;
    /// Element by element the sum of all ranks' `data`, in the order of ranks, left in every rank's `data`.
    fn all_reduce(&mut self, data: &mut [f32]) -> Result<(), CollectiveError>;
    /// All ranks' `part`, equally long, end to end in the order of ranks: to rank 0, which alone gives an `out` for it.
    fn gather(&mut self, part: &[f32], out: Option<&mut [f32]>) -> Result<(), CollectiveError>;
    /// All ranks' `part`, equally long, end to end in the order of ranks: to every rank, in place of what `out` held.
    fn all_gather(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), CollectiveError>;
    /// Rank 0's message to every rank, in place of what theirs held.
    fn broadcast(&mut self, message: &mut Vec<u8>, patience: Patience) -> Result<(), CollectiveError>;
    /// Returns once all ranks have called it.
    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.all_gather(&[], &mut Vec::new())
    }
}

/// Why a group is of no use any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A rank has not come within the deadline.
    #[error("rank {rank} of {size} did not come to a collective ({operation}) within {deadline:?}")]
    Missing {
        /// The first that was missed.
        rank: usize,
        /// Ranks of the group.
        size: usize,
        /// What the others were at.
        operation: Operation,
        /// How long they waited.
        deadline: Duration,
    },
    /// A rank has ended.
    #[error("rank {rank} of {size} has left the group")]
    Left {
        /// Which.
        rank: usize,
        /// Ranks of the group.
        size: usize,
    },
    /// Two ranks are at different calls: a fault of ours.
    #[error("rank {rank} is at {theirs}, while this rank is at {ours}")]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// Its call.
        theirs: String,
        /// This rank's.
        ours: String,
    },
    /// An argument that the seam does not allow.
    #[error("misuse of a collective: {0}")]
    Misuse(String),
    /// The transport cannot be set up, or failed.
    #[error("{0}")]
    Transport(String),
}

impl From<CollectiveError> for DeviceError {
    fn from(error: CollectiveError) -> Self {
        // What other ranks hold cannot be known any more.
        Self::Lost(error.to_string())
    }
}

/// Which collective, as ranks compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// The ranks meet for the first time.
    Forming = 1,
    /// [`Collective::all_reduce`].
    AllReduce,
    /// [`Collective::gather`].
    Gather,
    /// [`Collective::all_gather`].
    AllGather,
    /// [`Collective::broadcast`].
    Broadcast,
}

impl Operation {
    fn from_code(code: u8) -> Option<Self> {
        [Self::Forming, Self::AllReduce, Self::Gather, Self::AllGather, Self::Broadcast]
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
        })
    }
}

/// `out` must hold what all ranks bring, and only at rank 0.
fn check_gather(group_rank: GroupRank, part: &[f32], out: Option<&[f32]>) -> Result<(), CollectiveError> {
    let (got, wanted) =
        (out.map(<[f32]>::len), group_rank.is_leader().then_some(part.len() * group_rank.world_size));
    if got == wanted {
        return Ok(());
    }
    Err(CollectiveError::Misuse(format!("gather into {got:?} elements at {group_rank:?}, wanted {wanted:?}")))
}
