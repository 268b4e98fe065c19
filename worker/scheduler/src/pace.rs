//! Limits the prefill tokens of a step that has decodes, so that the step meets the target for the time between tokens,
//! and so that the prefill of one share does not slow the decodes of another one by more than [`SLOWER`].
//!
//! [`StepTime`] estimates the duration of a step. Feedback corrects the estimate: after a step that took longer than
//! estimated, the next steps get fewer prefill tokens until the estimate is right again. Before the first measurement
//! there is no estimate. So prefill beside decodes begins with the smallest chunk and at most doubles from step to
//! step. This module reads no clock; the caller measures each step.

use std::time::Duration;

use crate::step_time::{StepTime, Work};

/// Factor by which `Pace::overrun - 1` shrinks at each measured step. If the step's own overrun is larger than the
/// shrunken value, the step's own overrun replaces it, up to [`MAX_OVERRUN`].
const DECAY: f64 = 0.9;
/// Upper limit and initial value of [`Pace::overrun`]. The limit exists because one stalled step says nothing about the
/// next one.
const MAX_OVERRUN: f64 = 1.25;

/// How much longer, as a factor, the prefill of one share may make a step in which another share decodes. With 2.5 the
/// share that decodes beside a flood keeps 40 percent of its speed, and the flood has 60 percent of the time.
const SLOWER: f64 = 2.5;
/// In one of so many consecutive steps with prefill beside decodes, no share has prefill beside the decodes of another
/// one, so that the time of the decodes alone is measured. Without such steps among the last ones, all of which are
/// alike, the estimate would take more and more of a step's time for that of the decodes. `step_time` remembers 16.
pub const MEASURED_EVERY: u32 = 8;

/// The target for the duration of steps with decodes, and the measurements that determine how many prefill tokens meet
/// this target.
#[derive(Debug)]
pub(crate) struct Pace {
    target: Option<Duration>,
    time: StepTime,
    /// Factor by which recent steps exceeded their estimate, at least 1.
    overrun: f64,
    /// Largest number of tokens that any step so far has prefilled.
    most_prefill: usize,
    /// Number of steps since the last one that had decodes alone.
    mixed: u32,
}

impl Pace {
    /// Makes a pace with `target` as the maximum duration of a step with decodes. Without a target, prefill is not
    /// bounded.
    pub fn new(target: Option<Duration>) -> Self {
        Self { target, time: StepTime::default(), overrun: MAX_OVERRUN, most_prefill: 0, mixed: 0 }
    }

    /// Records the duration of a step.
    pub fn observe(&mut self, work: &Work, took: Duration) {
        if work.decodes() > 0 && work.prefill() > 0 {
            // Before the first observation the estimate is 0, so this quotient is infinite and the next line clamps it.
            let overrun = took.as_secs_f64() / self.time.of(work);
            self.overrun = overrun.min(MAX_OVERRUN).max(1.0 + (self.overrun - 1.0) * DECAY);
        }
        match (work.decodes(), work.prefill()) {
            (0, _) => (),
            (_, 0) => self.mixed = 0,
            _ => self.mixed = self.mixed.wrapping_add(1),
        }
        self.most_prefill = self.most_prefill.max(work.prefill());
        self.time.observe(work, took);
    }

    /// The prefill that a step with these decodes has time for: at least `least` tokens, so that prefill advances even
    /// if the decodes alone miss the target. The prefill is unbounded if the step has no decodes or there is no target.
    pub fn allowance(&self, decodes: &Work, least: usize) -> Allowance {
        let Some(target) = self.target.filter(|_| decodes.decodes() > 0) else { return Allowance::ALL };
        self.within(target.as_secs_f64(), decodes, least)
    }

    /// The prefill that one share may have in a step with these decodes, among which are some of another share: at
    /// least `least` tokens, or none if this step measures the decodes. Unbounded before the first measurement.
    pub fn allowance_beside(&self, decodes: &Work, least: usize) -> Allowance {
        let alone = self.time.of(decodes);
        match self.mixed % MEASURED_EVERY {
            _ if alone == 0.0 => Allowance::ALL,
            last if last == MEASURED_EVERY - 1 => Allowance::NONE,
            _ => self.within(SLOWER * alone, decodes, least),
        }
    }

    /// The prefill that makes a step with these decodes last `seconds`.
    fn within(&self, seconds: f64, decodes: &Work, least: usize) -> Allowance {
        let (token, attended) = self.time.of_prefill_token();
        Allowance {
            seconds: seconds / self.overrun - self.time.of(decodes),
            token,
            attended,
            most: self.most_prefill.saturating_mul(2).max(least),
            least,
        }
    }
}

/// The prefill that a step still has time for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    seconds: f64,
    /// Seconds per prefill token.
    token: f64,
    /// Seconds per pair of a prefill token and a token that it attends to.
    attended: f64,
    most: usize,
    least: usize,
}

impl Allowance {
    /// An allowance without a bound.
    pub const ALL: Self =
        Self { seconds: f64::INFINITY, token: 0.0, attended: 0.0, most: usize::MAX, least: usize::MAX };

    /// An allowance of nothing.
    pub const NONE: Self = Self { seconds: 0.0, token: 0.0, attended: 0.0, most: 0, least: 0 };

    /// Number of prefill tokens from position `start` on for which the step has time.
    pub fn tokens(&self, start: usize) -> usize {
        // A prefill of n tokens from `start` on attends to about n * start + n² / 2 tokens, so its time is quadratic in
        // n. `tokens` is the n whose time is `seconds`: the root of the quadratic, in the form that is stable if
        // `attended` is small.
        let slope = self.token + self.attended * start as f64;
        let seconds = self.seconds.max(0.0);
        let tokens = 2.0 * seconds / (slope + (slope * slope + 2.0 * self.attended * seconds).sqrt());
        // The cast saturates, and turns the NaN of 0 / 0 into 0.
        (tokens as usize).max(self.least).min(self.most)
    }

    /// Subtracts a prefill of `tokens` tokens that begins at position `start` from the time and the tokens that are
    /// left.
    pub fn spend(&mut self, start: usize, tokens: usize) {
        let (start, n) = (start as f64, tokens as f64);
        self.seconds -= self.token * n + self.attended * n * (start + n / 2.0);
        self.most = self.most.saturating_sub(tokens);
        self.least = self.least.saturating_sub(tokens);
    }
}

#[cfg(test)]
mod tests;
