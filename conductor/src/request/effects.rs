//! The consequences of an event, which the cluster carries out.

use tutti_proto::{GraphKey, WorkerId};
use tutti_runtime::ErrorKind;

/// Why a message was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dropped {
    /// About an earlier try, graph or epoch.
    Stale,
    /// Received before.
    Duplicate,
    /// About a graph that this worker was never given.
    Unknown,
}

/// The outcome of a row.
#[derive(Debug, Default, PartialEq)]
pub struct RowOutcome {
    /// Tokens that were new and are delivered.
    pub taken: usize,
    /// Tokens that were dropped.
    pub dropped: usize,
    /// Effects of a row that broke the request.
    pub effects: Effects,
}

/// An ending without its contents, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndingKind {
    /// Ran to its end.
    Finished,
    /// Cancelled by its client.
    Cancelled,
    /// Failed with this kind of error.
    Failed(ErrorKind),
    /// Refused by a worker's admission with this kind of error.
    Refused(ErrorKind),
}

/// The caller's tasks after an event.
#[derive(Debug, Default, PartialEq)]
pub struct Effects {
    /// Graphs to cancel, each at its worker.
    pub cancel: Vec<(WorkerId, GraphKey)>,
    /// Graphs that their workers no longer hold.
    pub released: Vec<(WorkerId, GraphKey)>,
    /// True if a prefill was handed over.
    pub handed_over: bool,
    /// Graphs that have received what they waited for and now take part in steps.
    pub begun: Vec<(WorkerId, GraphKey)>,
    /// True if the request needs a placement.
    pub needs_placement: bool,
    /// True if the request starts over at its next placement.
    pub replayed: bool,
    /// The ending that the client has received.
    pub ended: Option<EndingKind>,
    /// Why the message was dropped.
    pub dropped: Option<Dropped>,
}
