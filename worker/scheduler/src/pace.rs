//! How much prefill a step has time for beside its decodes, where these have a target to keep.
//!
//! What a step takes is estimated ([`StepTime`]), and what the estimate misses is made up for by feedback: steps that take
//! longer than estimated, by jitter or because something has changed, make the next ones smaller until that is over. At
//! first nothing is known, so prefill beside decodes begins with as little as there can be and at most doubles. There is
//! no clock here: whoever ran the step says how long it took.

use std::time::Duration;

use crate::step_time::{StepTime, Work};

/// How much of what steps were over their estimate is still allowed for after another step.
const FADING: f64 = 0.9;
/// The most that is allowed for, since a step that stalled says nothing about the next; and what is at first.
const MOST_OVER: f64 = 1.25;

#[derive(Debug)]
pub(crate) struct Pace {
    target: Option<Duration>,
    time: StepTime,
    /// By what factor steps have lately been over their estimate, at least 1.
    over: f64,
    /// The most tokens that a step has prefilled.
    most_prefill: usize,
}

impl Pace {
    /// Steps that decode should last no longer than `target`; without one they may last as long as they do.
    pub fn new(target: Option<Duration>) -> Self {
        Self { target, time: StepTime::default(), over: MOST_OVER, most_prefill: 0 }
    }

    /// A step took so long.
    pub fn observe(&mut self, work: &Work, took: Duration) {
        if work.decodes() > 0 && work.prefill() > 0 {
            // Infinite before anything is known.
            let over = took.as_secs_f64() / self.time.of(work);
            self.over = over.min(MOST_OVER).max(1.0 + (self.over - 1.0) * FADING);
        }
        self.most_prefill = self.most_prefill.max(work.prefill());
        self.time.observe(work, took);
    }

    /// What a step with these decodes has for prefill: at least `least` tokens, so that prefill goes on where the decodes
    /// alone take longer than they should. Everything where nothing decodes.
    pub fn beside(&self, decodes: &Work, least: usize) -> Allowance {
        let Some(target) = self.target.filter(|_| decodes.decodes() > 0) else { return Allowance::ALL };
        let (token, attended) = self.time.of_prefill_token();
        Allowance {
            seconds: target.as_secs_f64() / self.over - self.time.of(decodes),
            token,
            attended,
            most: self.most_prefill.saturating_mul(2).max(least),
            least,
        }
    }
}

/// The prefill that a step has time for, less what was given of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    seconds: f64,
    /// Seconds a token.
    token: f64,
    /// Seconds for each token that one attends to.
    attended: f64,
    most: usize,
    least: usize,
}

impl Allowance {
    /// No bound.
    pub const ALL: Self =
        Self { seconds: f64::INFINITY, token: 0.0, attended: 0.0, most: usize::MAX, least: usize::MAX };

    /// How many tokens from position `start` on there is time for.
    pub fn tokens(&self, start: usize) -> usize {
        // n tokens attend to n * start + n² / 2: the root of a parabola, in the form that suits small curvatures.
        let slope = self.token + self.attended * start as f64;
        let seconds = self.seconds.max(0.0);
        let tokens = 2.0 * seconds / (slope + (slope * slope + 2.0 * self.attended * seconds).sqrt());
        // A float beyond the range becomes the range's end; nothing for nothing, which is no number, becomes 0.
        (tokens as usize).max(self.least).min(self.most)
    }

    /// So many of them have been given.
    pub fn spend(&mut self, start: usize, tokens: usize) {
        let (start, n) = (start as f64, tokens as f64);
        self.seconds -= self.token * n + self.attended * n * (start + n / 2.0);
        self.most = self.most.saturating_sub(tokens);
        self.least = self.least.saturating_sub(tokens);
    }
}

#[cfg(test)]
mod tests;
