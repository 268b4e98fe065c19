//! What a step was, for metrics and for whoever watches the scheduler at work.

use std::{
    ops::Range,
    time::{Duration, Instant, SystemTime},
};

use tutti_proto::{
    GraphKey, StepNumber,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId, WalkKind},
};
use tutti_scheduler::{Outcome, RowCommit};

/// Watches an engine's steps, on its thread: it must neither wait nor fail.
pub trait StepObserver: Send {
    /// A step has been committed.
    fn observe(&mut self, step: StepRecord);
    /// How many steps it had no room to take.
    fn lost(&self) -> u64;
}

/// A committed step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    /// Counted from 0 over the engine's life.
    pub number: StepNumber,
    /// What the engine ran.
    pub batch_walk: WalkId,
    /// In the step's order.
    pub rows: Vec<RowRecord>,
    /// When planning began, by the wall clock.
    pub started: SystemTime,
    /// How long it took.
    pub times: StepTimes,
    /// Pages held once it was committed.
    pub kv_pages_used: u32,
    /// Pages that could be.
    pub kv_pages_total: u32,
}

/// One request's share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRecord {
    /// Whose.
    pub key: GraphKey,
    /// The row's own walk.
    pub walk: WalkId,
    /// Computed by the row.
    pub positions: Range<usize>,
    /// Whether a token was to be sampled.
    pub terminal: bool,
    /// Whether the request could not go on.
    pub failed: bool,
}

/// Where a step's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Preparing what to run while the step before ran, so that nothing waited for it.
    pub plan_ahead: Duration,
    /// Deciding what to run, between that step and this one.
    pub plan: Duration,
    /// Filling the step's inputs, and the device.
    pub run: Duration,
    /// Taking in what came of it.
    pub commit: Duration,
}

/// Measures consecutive parts of a step.
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Since the start or the last lap.
    pub fn lap(&mut self) -> Duration {
        let last = std::mem::replace(&mut self.0, Instant::now());
        self.0 - last
    }
}

impl From<&RowCommit> for RowRecord {
    fn from(commit: &RowCommit) -> Self {
        let row = &commit.row;
        let outcome = commit.ending.as_ref().map(|ending| &ending.outcome);
        Self {
            key: row.key,
            walk: row.walk,
            positions: row.positions.clone(),
            terminal: row.is_terminal(),
            failed: matches!(outcome, Some(Outcome::Failed(_))),
        }
    }
}

/// The same in numbers, as the conductor counts it.
pub(crate) fn work<'a>(
    rows: impl Iterator<Item = &'a RowCommit>,
    model: &ModelDeclaration,
    times: StepTimes,
    budget: usize,
) -> pb::StepWork {
    let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    let mut work = pb::StepWork {
        plan_us: us(times.plan),
        run_us: us(times.run),
        commit_us: us(times.commit),
        budget_tokens: budget as u32,
        ..Default::default()
    };
    for RowCommit { row, .. } in rows {
        work.tokens += row.positions.len() as u32;
        let decode = matches!(model.walk(row.walk).map(|walk| walk.kind), Some(WalkKind::Decode { .. }));
        match (decode, row.is_terminal()) {
            (true, _) => work.decode_rows += 1,
            (false, true) => work.last_prefill_rows += 1,
            (false, false) => work.prefill_rows += 1,
        }
    }
    work
}
