//! Records of steps, for metrics and for observers of the scheduler.

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

/// Observes an engine's steps, on the thread that makes the reports. An observer must neither block nor fail.
pub trait StepObserver: Send {
    /// Observes a committed step.
    fn observe(&mut self, step: StepRecord);
    /// Number of steps that the observer has dropped.
    fn lost(&self) -> u64;
}

/// A committed step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    /// Step number, counted from 0 over the engine's life.
    pub number: StepNumber,
    /// Walk that the engine ran for all rows together.
    pub batch_walk: WalkId,
    /// Rows in the step's order.
    pub rows: Vec<RowRecord>,
    /// Wall-clock time at which planning began.
    pub started: SystemTime,
    /// Durations of the step's phases.
    pub times: StepTimes,
    /// KV pages in use after the commit.
    pub kv_pages_used: u32,
    /// KV pages that requests can hold.
    pub kv_pages_total: u32,
    /// Slots in use after the commit.
    pub slots_used: u32,
    /// Slots that requests and snapshots can hold.
    pub slots_total: u32,
    /// Slots with a snapshot that no request reads.
    pub snapshots: u32,
    /// Number of rows without an effect, because their requests had ended. `rows` does not contain them.
    pub void_rows: u32,
    /// Number of tokens of padding that the device computed in addition to the tokens of the rows.
    pub padding_tokens: u32,
}

/// Record of a row, which is one request's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRecord {
    /// The row's graph.
    pub key: GraphKey,
    /// The row's own walk, which may differ from the batch walk.
    pub walk: WalkId,
    /// Positions that the row computed.
    pub positions: Range<usize>,
    /// True if a token is sampled from the row's last position.
    pub terminal: bool,
    /// True if the row failed and ended its request.
    pub failed: bool,
}

/// Durations of a step's phases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Time spent preparing the plan while the previous step ran. The device did not wait for this preparation.
    pub plan_ahead: Duration,
    /// Time spent planning between the previous step and this one.
    pub plan: Duration,
    /// Time until the results were collected. It counts from the filling of the step's inputs, or from the collection
    /// of the previous step if that was later.
    pub run: Duration,
    /// Time spent committing the results.
    pub commit: Duration,
}

/// Measures consecutive phases of a step.
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time of the last lap, or of the start if there was none.
    pub fn began(&self) -> Instant {
        self.0
    }

    /// Time since the last lap, or since the start if this is the first lap.
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
            failed: matches!(outcome, Some(Outcome::Failed(_) | Outcome::ConstraintFailed(_))),
        }
    }
}

/// Summarizes the rows and times of a step in numbers, for the conductor's metrics.
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
        let Range { start, end } = row.positions.clone();
        work.tokens += (end - start) as u32;
        work.attended_tokens += ((start + 1 + end) * (end - start) / 2) as u64;
        match (is_decode(row.walk, model), row.is_terminal()) {
            (true, _) => work.decode_rows += 1,
            (false, true) => work.last_prefill_rows += 1,
            (false, false) => work.prefill_rows += 1,
        }
    }
    work
}

/// Returns the prefill rows of a step. Allocates nothing for a step that only decodes.
pub(crate) fn prefills<'a>(
    rows: impl Iterator<Item = &'a RowCommit>,
    model: &ModelDeclaration,
) -> Vec<pb::PrefillRow> {
    let prefills = rows.map(|commit| &commit.row).filter(|row| !is_decode(row.walk, model));
    let tokens = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
    prefills
        .map(|row| pb::PrefillRow { request: row.key.request.0, tokens: tokens(row.positions.len()) })
        .collect()
}

fn is_decode(walk: WalkId, model: &ModelDeclaration) -> bool {
    matches!(model.walk(walk).map(|walk| walk.kind), Some(WalkKind::Decode { .. }))
}
