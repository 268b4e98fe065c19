//! A step as planned, as run, and as committed.

use std::{ops::Range, sync::Arc, time::Duration};

use tutti_proto::{Epoch, GraphKey, StepNumber, declaration::WalkId};

use crate::{pages::PageId, request::Ticket, stopping::Finish};

/// What the scheduler decided: who is no longer there, and what to run.
#[derive(Debug)]
#[must_use]
pub struct Turn {
    /// Requests that were cancelled or whose time is up. Their pages are free.
    pub endings: Vec<Ending>,
    /// Requests that gave up their pages and wait for new ones, to compute everything again.
    pub preempted: Vec<GraphKey>,
    /// Requests that now hold the pages that another worker is to fill.
    pub reserved: Vec<Reserved>,
    /// None when nothing can run now.
    pub step: Option<StepPlan>,
}

/// Room for planes that another worker computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Whose.
    pub key: GraphKey,
    /// The pages of its prefill, in order. It holds them until it ends, or is handed over.
    pub pages: Vec<PageId>,
    /// How many of them, from the first on, hold what they should: others read them, and nobody writes to them. The rest
    /// are its own, to be filled; at least one.
    pub known: usize,
    /// Tokens that they are to hold.
    pub tokens: usize,
}

/// One forward over one batch, complete: whoever runs it applies it and chooses nothing.
///
/// Goes back to the scheduler exactly once, by [`Scheduler::commit`](crate::Scheduler::commit) or
/// [`Scheduler::abort`](crate::Scheduler::abort); until then its requests stay where they were.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its requests wait until the step is committed or aborted"]
pub struct StepPlan {
    /// Counted from 0 over the scheduler's life; an aborted step's number is not used again.
    pub number: StepNumber,
    /// What the engine runs: the decode walk when every row decodes, the mixed walk otherwise. Completions are never
    /// routed by it.
    pub batch_walk: WalkId,
    /// Decodes first, then prefill.
    pub rows: Vec<Row>,
}

impl StepPlan {
    /// Tokens that the step computes.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.positions.len()).sum()
    }
}

/// One request's share of a step.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    /// Whose share.
    pub key: GraphKey,
    /// The row's own walk, whatever the batch's.
    pub walk: WalkId,
    /// Which pass of the worker graph this is.
    pub epoch: Epoch,
    /// The positions it computes: those before stand in the planes already.
    pub positions: Range<usize>,
    /// Whether its last position is sampled.
    pub terminality: Terminality,
    /// The request's pages, covering `positions` and everything before.
    pub block_table: Arc<[PageId]>,
    pub(crate) ticket: Ticket,
}

impl Row {
    /// True if a token is sampled from the row's last position: the row is a decode, or the last chunk of a prompt.
    pub fn is_terminal(&self) -> bool {
        matches!(self.terminality, Terminality::Terminal { .. })
    }
}

/// Whether a row's last token is to be sampled. The only such flag there is: LM head, random numbers, emission and
/// the way back into the queue all follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Terminality {
    /// More prompt follows, or no output is wanted: no LM head, no sample.
    NotTerminal,
    /// A decode, or the last chunk of a prompt.
    Terminal {
        /// Ids that must not be sampled now.
        forbidden: Arc<[u32]>,
    },
}

/// What became of one row when its step ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowOutcome {
    /// Its positions stand in the planes; the only success of a row that is not terminal.
    Computed,
    /// And this token was sampled; the only success of a terminal row.
    Sampled(u32),
    /// The request cannot go on; why.
    Failed(String),
}

/// What a commit made of one row.
#[derive(Debug)]
#[must_use]
pub struct RowCommit {
    /// The row as planned.
    pub row: Row,
    /// The token that the output has grown by.
    pub sampled: Option<OutputToken>,
    /// Prompt tokens that were not computed, since another request had.
    pub cached_tokens: u32,
    /// Set when this was the request's last row.
    pub ending: Option<Ending>,
}

/// A token and its place in its request's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputToken {
    /// Vocabulary id.
    pub token: u32,
    /// Counted from 0, over all incarnations.
    pub index: u32,
}

/// The end of a request. There is one for each that was accepted, because making one consumes the request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "somebody waits for it"]
pub struct Ending {
    /// Whose end.
    pub key: GraphKey,
    /// Passes that were committed: the last row's epoch plus one.
    pub passes: Epoch,
    /// Prompt tokens that were not computed, since another request had.
    pub cached_tokens: u32,
    /// How it ended.
    pub outcome: Outcome,
}

/// Why planes did not get across.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The other side is gone, or too slow: nothing is wrong with the request.
    #[error("{0}")]
    Lost(String),
    /// What was to be handed over is not what the other side waits for.
    #[error("{0}")]
    Refused(String),
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should.
    Finished {
        /// Why its output ended.
        reason: Finish,
        /// Tokens of output, over all incarnations.
        generated: u32,
    },
    /// As it should, for its prefill: another worker has its planes, or soon will.
    HandedOver {
        /// Tokens of output, over all incarnations.
        generated: u32,
    },
    /// Its planes did not get across.
    TransferFailed(TransferError),
    /// Somebody took it back.
    Cancelled,
    /// Its deadline came first.
    DeadlineExceeded,
    /// Its deadline would have come before its first token, even if it had run alone from here on.
    DeadlineUnreachable {
        /// The least time that the rest of its prefill takes.
        needed: Duration,
        /// What was left, which is less.
        left: Duration,
    },
    /// The engine could not run it; why.
    Failed(String),
}
