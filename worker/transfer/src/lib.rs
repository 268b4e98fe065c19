//! Transfer of requests that are divided between workers. Planes go from the worker that prefills to the worker that
//! decodes. Embeddings go from the worker that encodes to the worker that prefills.
//!
//! ```text
//! prefilling worker                                              decoding worker
//! engine ─▶ staging ─▶ push (task per request) ═══ Push ═══▶ receiver (gRPC) ─▶ engine
//!                        └──────────▶ segment of shared memory ─────┘
//! ```
//!
//! - `units`: pages, slots and rows of embeddings are handled alike, as units of fixed size that are counted from 0. A
//!   [`Run`] describes consecutive units; their bytes are passed separately.
//! - `connector`: the engine decides which units are copied and when, and moves them through a [`Connector`].
//! - `endpoint`: this process's end of all transfers, in the role of a leader or of a follower. Its tasks do not run on
//!   the thread of the steps.
//! - `checksum`: the receiver of a run or hand-over that has changed on the way fails the transfer, so that the request
//!   starts over.
//! - `send`: one task per request that continues on another worker. Staged bytes are bounded. If pages of a request are
//!   computed faster than they are sent, this request waits, and other requests do not.
//! - `receive`: reserved space, and the pushes that fill it.
//! - `segment`: on one host, pages go through shared memory and the stream carries their offsets. Between hosts, the
//!   stream carries the pages. The sender chooses: if it can open the receiver's segment, it uses the segment.
//! - `ranks`: between two TP groups with the same number of ranks, each rank pushes its own share to the rank of the
//!   same number. The leader decides what is sent and written, and learns the outcomes from the ranks' reports. Between
//!   groups of different sizes, the leader of one group pushes whole pages to the leader of the other.
//!
//! Both sides have the same time limit, the lease. A receiver frees its space if its sender is silent for the whole
//! lease. A sender gives up if its receiver takes nothing for the whole lease.

pub mod checksum;
mod connector;
mod credential;
mod endpoint;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod layout;
mod network;
mod ranks;
mod receive;
mod segment;
mod send;
mod units;

use std::time::Duration;

pub use self::{
    connector::{Connector, Event, HandOver, Import, Source},
    endpoint::{Endpoint, Hosts, StreamConnector},
    layout::{PageLayout, PlaneLayout, PlaneStorage, Section},
    network::Network,
    units::{Extent, Filled, Run, UnitIds, UnitKind, UnitLayout, Units},
};

/// Maximum bytes of units per message. If one unit is larger, a message holds one unit.
const FRAME_BYTES: usize = 1 << 20;
/// Flow control window of one stream in bytes: a few messages.
const WINDOW_BYTES: u32 = 4 << 20;
/// Interval between keep-alive pings, and time limit for the answer to a ping.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Maximum bytes of a message apart from its units.
const ENVELOPE_BYTES: usize = 4096;

/// Largest message of a stream, in bytes.
fn message_bytes(unit_bytes: usize) -> usize {
    FRAME_BYTES.max(unit_bytes) + ENVELOPE_BYTES
}
