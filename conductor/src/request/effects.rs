//! What an event leads to, for whoever moves the state machine.

use tutti_proto::{GraphKey, WorkerId};
use tutti_runtime::ErrorKind;

/// Why a message was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dropped {
    /// Of an earlier try, graph or pass.
    Stale,
    /// Said before.
    Duplicate,
    /// Of nothing that this worker was ever given.
    Unknown,
}

/// What became of a row.
#[derive(Debug, Default, PartialEq)]
pub struct RowOutcome {
    /// Tokens that were new.
    pub taken: usize,
    /// Tokens that were not, and are gone.
    pub dropped: usize,
    /// What the row led to where it broke the request.
    pub effects: Effects,
}

/// An ending without its contents, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndingKind {
    /// Ran to its end.
    Finished,
    /// Taken back by its client.
    Cancelled,
    /// Failed, and how.
    Failed(ErrorKind),
    /// Turned away at a worker's door, and why.
    Refused(ErrorKind),
}

/// What the caller has to do after an event.
#[derive(Debug, Default, PartialEq)]
pub struct Effects {
    /// Tell these workers to let go of these graphs.
    pub cancel: Vec<(WorkerId, GraphKey)>,
    /// These workers hold nothing of these graphs any more.
    pub released: Vec<(WorkerId, GraphKey)>,
    /// The prefill was handed over.
    pub handed_over: bool,
    /// These workers were waiting to be handed these graphs, and go on with them from here.
    pub begun: Vec<(WorkerId, GraphKey)>,
    /// Find a place for the request.
    pub needs_placement: bool,
    /// The request starts over, at the next place that it is given.
    pub replayed: bool,
    /// The client has been told this ending.
    pub ended: Option<EndingKind>,
    /// The message was dropped.
    pub dropped: Option<Dropped>,
}
