//! Groups of GPUs: a communicator of NCCL per group, whose collectives are enqueued on the device's stream.
//!
//! The leader makes a [`GroupId`], and the conductor passes it to the other ranks. Every wait is bounded:
//! [`GroupMeeting::patience`] limits the wait for all ranks to join, and [`GroupMeeting::deadline`] the wait for a
//! collective. If a rank stays away, or NCCL reports an asynchronous error, the communicator is aborted, so that the
//! stream can continue. The result is [`DeviceError::Lost`].

mod communicator;
mod in_flight;
mod library;

use std::ffi::c_char;
use std::time::Duration;

use cudarc::nccl::sys;

pub(super) use self::communicator::{Communicator, Reduction};
pub use self::library::collectives;
use crate::DeviceError;
use crate::collective::GroupRank;

/// The id by which the ranks of a group find each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GroupId([u8; Self::BYTES]);

impl GroupId {
    /// Size of an id in bytes.
    pub const BYTES: usize = 128;

    /// Makes an id. The other ranks connect to this process, so this process must live until all ranks have joined.
    pub fn make() -> Result<Self, DeviceError> {
        let nccl = library::open().map_err(|missing| DeviceError::Unsupported(missing.to_string()))?;
        let mut id = sys::ncclUniqueId { internal: [0; Self::BYTES] };
        // SAFETY: the pointer is valid for one id.
        match unsafe { (nccl.ncclGetUniqueId)(&mut id) } {
            library::SUCCESS => Ok(Self(id.internal.map(|byte| byte as u8))),
            code => {
                Err(DeviceError::Lost(format!("NCCL makes no id of a group: {}", nccl.describe(code, None))))
            }
        }
    }

    /// Returns the id of these bytes, which come from [`as_bytes`](Self::as_bytes); `None` if their number is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The id as bytes, to be sent to the other ranks.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn for_nccl(self) -> sys::ncclUniqueId {
        sys::ncclUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}

impl std::fmt::Debug for GroupId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GroupId")
    }
}

/// The data that a rank needs to join its group.
#[derive(Clone, Copy, Debug)]
pub struct GroupMeeting {
    /// The group's id.
    pub id: GroupId,
    /// This rank and the size of the group.
    pub group_rank: GroupRank,
    /// Time limit for all ranks to join.
    pub patience: Duration,
    /// Maximum time that the stream may take from one collective in flight to the next.
    pub deadline: Duration,
}
