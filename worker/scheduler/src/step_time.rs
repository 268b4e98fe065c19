//! An estimate of how long a step takes, learnt from past steps.
//!
//! A device's time for a step is close to a sum of five terms: a fixed cost, a cost per decode row, per token that
//! decodes attend to, per prefill token, and per token that prefill tokens attend to. These costs differ a thousandfold
//! between devices and drift with other load on the machine, so they are fitted to the last few steps by Kaczmarz's
//! method: each step in turn moves the costs along the shortest path towards the values that give the step's duration
//! exactly. Costs that the last few steps do not distinguish keep their earlier ratio. No cost is negative, since more
//! work makes no step faster.

use std::{collections::VecDeque, ops::Range, time::Duration};

/// The work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    decodes: usize,
    /// Number of tokens that each decode attends to, itself included, summed over the decodes.
    decode_attended: usize,
    prefill: usize,
    /// Number of tokens that each prefill token attends to, itself included, summed over the prefill tokens.
    prefill_attended: usize,
}

impl Work {
    pub fn add_decode(&mut self, position: usize) {
        self.decodes += 1;
        self.decode_attended += position + 1;
    }

    pub fn add_prefill(&mut self, positions: Range<usize>) {
        let (start, tokens) = (positions.start, positions.len());
        self.prefill += tokens;
        self.prefill_attended += tokens * start + tokens * (tokens + 1) / 2;
    }

    pub fn decodes(&self) -> usize {
        self.decodes
    }

    pub fn prefill(&self) -> usize {
        self.prefill
    }

    fn terms(&self) -> Terms {
        let counts = [1, self.decodes, self.decode_attended, self.prefill, self.prefill_attended];
        std::array::from_fn(|i| counts[i] as f64 / UNITS[i])
    }
}

const TERMS: usize = 5;
type Terms = [f64; TERMS];

/// The unit of each term: the count that costs about as much as the fixed cost of a step. The units decide which term
/// an error is attributed to while no step distinguishes the terms.
const UNITS: Terms = [1.0, 16.0, 16.0 * 8192.0, 64.0, 64.0 * 8192.0];
/// Number of steps that the fit uses.
const WINDOW: usize = 16;
/// Number of times that the fit goes over the last [`WINDOW`] steps after each new step.
const PASSES: usize = 4;
/// Fraction of a step's error that one update of the costs corrects. A smaller gain is steadier, a larger one adapts
/// faster.
const GAIN: f64 = 0.3;
/// Once the window is full, a step's duration is clamped to at most this factor above or below its estimate, since a
/// stall says nothing about other steps.
const MAX_DEVIATION: f64 = 2.0;

/// The costs of a step's terms.
#[derive(Debug, Default)]
pub(crate) struct StepTime {
    /// Seconds per unit of each term; [`UNITS`] has the units.
    seconds: Terms,
    /// The terms of the last [`WINDOW`] steps, with the steps' durations in seconds.
    recent: VecDeque<(Terms, f64)>,
}

impl StepTime {
    /// Records the duration of a step, and fits the costs.
    pub fn observe(&mut self, work: &Work, took: Duration) {
        let (expected, mut took) = (self.of(work), took.as_secs_f64());
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
            if expected > 0.0 {
                took = took.clamp(expected / MAX_DEVIATION, expected * MAX_DEVIATION);
            }
        }
        self.recent.push_back((work.terms(), took));
        for (terms, took) in std::iter::repeat_n(&self.recent, PASSES).flatten() {
            let error = took - dot(&self.seconds, terms);
            let gain = GAIN * error / dot(terms, terms);
            for (seconds, term) in self.seconds.iter_mut().zip(terms) {
                *seconds = (*seconds + gain * term).max(0.0);
            }
        }
    }

    /// Estimated duration of a step in seconds; 0 before the first observation.
    pub fn of(&self, work: &Work) -> f64 {
        dot(&self.seconds, &work.terms())
    }

    /// Seconds per prefill token, and seconds per pair of a prefill token and a token that it attends to.
    pub fn of_prefill_token(&self) -> (f64, f64) {
        (self.seconds[3] / UNITS[3], self.seconds[4] / UNITS[4])
    }
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
