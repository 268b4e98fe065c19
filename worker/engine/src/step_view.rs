//! A view of a committed step before its report is made, for records of single rows.

use std::time::{Instant, SystemTime};

use tutti_proto::{StepNumber, declaration::WalkId};

use crate::{RowRecord, StepOutput, StepTimes, engine_core::CommittedStep};

impl StepOutput {
    /// Returns a view of the step; `None` if no step ran.
    pub fn step(&self) -> Option<StepView<'_>> {
        self.step.as_ref().map(|step| StepView { number: self.number, step })
    }
}

/// A committed step whose report is not made yet.
#[derive(Clone, Copy)]
pub struct StepView<'a> {
    number: StepNumber,
    step: &'a CommittedStep,
}

impl StepView<'_> {
    /// Step number, counted from 0 over the engine's life.
    pub fn number(&self) -> StepNumber {
        self.number
    }

    /// Wall-clock time at which planning began.
    pub fn started(&self) -> SystemTime {
        self.step.started
    }

    /// Time at which the results were collected from the device.
    pub fn collected(&self) -> Instant {
        self.step.collected
    }

    /// Durations of the step's phases.
    pub fn times(&self) -> StepTimes {
        self.step.times
    }

    /// Walk that the engine ran for all rows together.
    pub fn batch_walk(&self) -> WalkId {
        self.step.batch_walk
    }

    /// The rows that had an effect.
    pub fn rows(&self) -> impl Iterator<Item = RowRecord> {
        self.step.rows.iter().map(|(commit, _)| commit).filter(|commit| !commit.is_void).map(RowRecord::from)
    }
}
