//! The consequences of an event, which the cluster carries out.

use tutti_proto::{GraphKey, WorkerId};
use tutti_runtime::ErrorKind;

/// Why a message was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dropped {
    /// The message is about an earlier try, graph or epoch.
    Stale,
    /// The message was received before.
    Duplicate,
    /// The message is about a graph that this worker was never given.
    Unknown,
}

/// The outcome of a row. A row is a worker's report of one request's share of a step.
#[derive(Debug, Default, PartialEq)]
pub struct RowOutcome {
    /// Number of new tokens, which are delivered to the client.
    pub taken: usize,
    /// Number of tokens that were dropped.
    pub dropped: usize,
    /// Effects of the request's failure, if the row made the request fail; otherwise empty.
    pub effects: Effects,
}

/// The kind of a request's ending, without the ending's contents, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndingKind {
    /// The request ran to its end.
    Finished,
    /// The client cancelled the request.
    Cancelled,
    /// The request failed with this kind of error.
    Failed(ErrorKind),
    /// A worker's admission refused the request with this kind of error.
    Refused(ErrorKind),
}

/// The consequences of an event, which the caller carries out.
#[derive(Debug, Default, PartialEq)]
pub struct Effects {
    /// Graphs to cancel, each with the worker that runs it.
    pub cancel: Vec<(WorkerId, GraphKey)>,
    /// Graphs that their workers no longer hold.
    pub released: Vec<(WorkerId, GraphKey)>,
    /// True if a prefill on one worker was handed over to the worker that decodes.
    pub handed_over: bool,
    /// Graphs that have received what they waited for and now take part in steps.
    pub begun: Vec<(WorkerId, GraphKey)>,
    /// True if the request needs a placement.
    pub needs_placement: bool,
    /// True if the request starts over, because its worker was lost or its hand-over failed.
    pub replayed: bool,
    /// The kind of the request's ending, if the client has received it through this event.
    pub ended: Option<EndingKind>,
    /// The message of the error with which the request ended; empty without one.
    pub cause: String,
    /// The reason, if the event's message was dropped.
    pub dropped: Option<Dropped>,
}
