//! The types of a step: its plan, its results, and the effects of its commit.

use std::{ops::Range, sync::Arc, time::Duration};

use tutti_planes::{PageId, SlotCopy, SlotId};
use tutti_proto::{Epoch, GraphKey, StepNumber, declaration::WalkId};

use crate::{stopping::Finish, ticket::Ticket};

/// The scheduler's decisions of one turn.
#[derive(Debug)]
#[must_use]
pub struct Turn {
    /// Requests that ended because they were cancelled, because their deadline cannot be met, or because a transfer
    /// failed. Their pages are released.
    pub endings: Vec<Ending>,
    /// Requests that were preempted: their pages are released. They wait for new pages, and then compute their
    /// positions again.
    pub preempted: Vec<GraphKey>,
    /// Pages newly reserved for planes that another worker computes.
    pub reserved: Vec<Reserved>,
    /// The next step. None if nothing can run now.
    pub step: Option<StepPlan>,
}

/// Pages of one request, reserved for planes that another worker computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// The request that holds the pages.
    pub key: GraphKey,
    /// The pages of the prefill, in order. The request holds them until it ends.
    pub pages: Vec<PageId>,
    /// The first `known` pages already hold the prefill's planes and are read-only, since other requests share them.
    /// The other pages, at least one, belong to this request alone, and the other worker fills them.
    pub known: usize,
    /// The request's slot, which the other worker fills too.
    pub slot: SlotId,
    /// Number of tokens of the prefill.
    pub tokens: usize,
}

/// The plan of one forward pass over one batch. The plan is complete: the engine applies it and makes no decision of
/// its own.
///
/// Each plan goes back to the scheduler exactly once, by [`Scheduler::commit`](crate::Scheduler::commit) or
/// [`Scheduler::abort`](crate::Scheduler::abort). Until then the plan's requests do not advance.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its requests wait until the step is committed or aborted"]
pub struct StepPlan {
    /// Counted from 0 over the scheduler's life. The number of an aborted step is not used again.
    pub number: StepNumber,
    /// The walk that the engine runs the batch as: a decode walk if every row is a decode of that walk, else a mixed
    /// walk. Completions are routed by each row's own `walk`, never by `batch_walk`.
    pub batch_walk: WalkId,
    /// Slot copies to perform in this order before any row: saves of snapshots, then initial states of requests.
    /// Empty if the model has no planes in slots.
    pub copies: Vec<SlotCopy>,
    /// The rows: decodes first, then prefills.
    pub rows: Vec<Row>,
    /// The rows with slot copies, in the order of the rows.
    pub(crate) row_copies: Vec<RowCopies>,
}

impl StepPlan {
    /// Number of tokens that the step computes.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.positions.len()).sum()
    }
}

/// One request's share of a step.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    /// The request's worker graph.
    pub key: GraphKey,
    /// The row's own walk, which may differ from the step's `batch_walk`.
    pub walk: WalkId,
    /// Index of the forward pass among all passes of the request's worker graph, counted from 0.
    pub epoch: Epoch,
    /// The positions that the row computes. The planes of all earlier positions are already computed.
    pub positions: Range<usize>,
    /// The kind of the row: terminal, with the data for sampling, or not terminal. [`Row::is_terminal`] is the flag
    /// alone.
    pub terminality: Terminality,
    /// The request's pages, which cover `positions` and all earlier positions.
    pub block_table: Arc<[PageId]>,
    /// The request's slot.
    pub slot: SlotId,
    /// True if the request's previous row samples this row's first token, and the step of that previous row is not
    /// committed yet.
    pub continues: bool,
    pub(crate) ticket: Ticket,
}

/// The copies of one row's slot at the head of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowCopies {
    /// Index of the row in the step.
    pub row: usize,
    /// The source of the copy that gives the request's slot its initial state. If it is not the null slot, the request
    /// is a reader of this snapshot until the step is committed.
    pub initial: Option<SlotId>,
    /// The slot that the request's slot is saved to.
    pub save: Option<SlotId>,
}

impl Row {
    /// True if a token is sampled from the row's last position: the row is a decode, or the last chunk of a prefill
    /// whose output is wanted. No other flag decides whether the LM head runs, a random number is drawn, a token is
    /// emitted and the request is queued again.
    pub fn is_terminal(&self) -> bool {
        matches!(self.terminality, Terminality::Terminal { .. })
    }
}

/// The kind of a row, by whether a token is sampled from its last position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Terminality {
    /// More of the prefill follows, or no output is wanted. No token is sampled.
    NotTerminal,
    /// A decode, or the last chunk of a prefill.
    Terminal {
        /// Token ids that must not be sampled from this row.
        forbidden: Arc<[u32]>,
    },
}

/// The result of one row of a step that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowOutcome {
    /// The planes of the row's positions were computed. Every successful row from which no token is sampled ends this
    /// way.
    Computed,
    /// The positions were computed and this token was sampled. Every successful terminal row ([`Row::is_terminal`])
    /// ends this way.
    Sampled(u32),
    /// The positions of a terminal row were computed, but no token was sampled.
    NotSampled(NotSampled),
    /// The request cannot continue, for this reason.
    Failed(String),
}

/// The reason for which no token was sampled from a terminal row of a request whose output follows a constraint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotSampled {
    /// The mask was not ready in time, or the step ran several forwards and could not wait for a token in flight, on
    /// which the mask depends. The row is planned again.
    Late,
    /// The row did not run, because it continues a row from which no token was sampled. The request's earlier row
    /// decides what follows.
    Void,
    /// The output is complete: no token can follow.
    Complete,
    /// The constraint cannot be followed.
    ConstraintFailed(ConstraintFailure),
}

/// The reason for which a constraint cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintFailure {
    /// The cause.
    pub cause: FailureCause,
    /// The reason in words.
    pub why: String,
}

/// The cause of a [`ConstraintFailure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// The constraint: it exceeds a limit of work, or allows no token.
    Constraint,
    /// The memory that all requests share: a later try may succeed.
    Memory,
    /// A fault of the worker.
    Worker,
}

/// The effect of a commit on one row's request.
#[derive(Debug)]
#[must_use]
pub struct RowCommit {
    /// The row as planned.
    pub row: Row,
    /// The token that this row added to the output, if any.
    pub sampled: Option<OutputToken>,
    /// Number of the request's prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
    /// True if the request had ended before this row was committed. The row then has no effect: its token is dropped.
    pub is_void: bool,
    /// The request's ending, if this row ended the request.
    pub ending: Option<Ending>,
}

/// A token of a request's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputToken {
    /// Vocabulary id.
    pub token: u32,
    /// Index in the output, counted from 0 over all incarnations.
    pub index: u32,
}

/// The end of a request. Each accepted request has exactly one, because making an ending consumes the request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "the conductor waits for every ending"]
pub struct Ending {
    /// The request's worker graph.
    pub key: GraphKey,
    /// Number of committed forward passes: the epoch of the last committed row, plus one.
    pub passes: Epoch,
    /// Number of the request's prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
    /// The request's outcome.
    pub outcome: Outcome,
}

/// The reason for which planes were not transferred.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The other worker is gone or too slow. The request itself is sound.
    #[error("{0}")]
    Lost(String),
    /// The receiver refuses the planes, because they are not the planes that it waits for.
    #[error("{0}")]
    Refused(String),
}

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The output is complete.
    Finished {
        /// The reason for which the output ended.
        reason: Finish,
        /// Number of output tokens, over all incarnations.
        generated: u32,
    },
    /// The prefill or the encoding is complete, and another worker has the planes or the embeddings.
    HandedOver {
        /// Number of output tokens, over all incarnations.
        generated: u32,
    },
    /// The planes were not transferred.
    TransferFailed(TransferError),
    /// The request was cancelled.
    Cancelled,
    /// The deadline passed.
    DeadlineExceeded,
    /// The deadline would pass before the first token even if the request ran alone from now on.
    DeadlineUnreachable {
        /// Lower bound on the time that the rest of the prefill takes.
        needed: Duration,
        /// Time left until the deadline, which is less than `needed`.
        left: Duration,
    },
    /// The constraint of the output cannot be followed.
    ConstraintFailed(ConstraintFailure),
    /// The engine could not run the request, for this reason.
    Failed(String),
}
