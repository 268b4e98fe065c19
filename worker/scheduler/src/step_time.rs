//! How long a step takes, learnt from those that ran.
//!
//! A device's time for a step is close to a sum of five terms: one for being a step at all, one for each decode row, one
//! for each token that those attend to, one for each prefill token, one for each token that those attend to. What each
//! costs differs a thousandfold between devices and drifts with whatever else a machine does, so it is fitted to the last
//! few steps, by Kaczmarz's method: each of them in turn moves the costs, by the shortest way, to where they explain it
//! better. What these steps do not tell apart stays as earlier ones left it. No cost is negative: more work is not faster.

use std::{collections::VecDeque, ops::Range, time::Duration};

/// What a step has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    decodes: usize,
    /// Tokens that the decodes attend to, themselves included.
    decode_attended: usize,
    prefill: usize,
    /// The same, of each prefill token.
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

/// How many of each are about as much work as a step is by itself. They decide which term an error is put down to as long
/// as no step tells the terms apart.
const UNITS: Terms = [1.0, 16.0, 16.0 * 8192.0, 64.0, 64.0 * 8192.0];
/// Steps that are remembered.
const WINDOW: usize = 16;
/// How often each of them moves the costs after each step.
const PASSES: usize = 4;
/// How much of an error one move makes up for. Smaller is steadier, larger is quicker.
const GAIN: f64 = 0.3;
/// By what factor a step may be off and still be believed, once others have run: one that stalled tells nothing.
const BELIEVED: f64 = 2.0;

/// What steps cost.
#[derive(Debug, Default)]
pub(crate) struct StepTime {
    /// Seconds for a unit of each term.
    seconds: Terms,
    /// The last steps, and what they took in seconds.
    recent: VecDeque<(Terms, f64)>,
}

impl StepTime {
    /// A step took so long.
    pub fn observe(&mut self, work: &Work, took: Duration) {
        let (expected, mut took) = (self.of(work), took.as_secs_f64());
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
            if expected > 0.0 {
                took = took.clamp(expected / BELIEVED, expected * BELIEVED);
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

    /// Seconds that a step takes; 0 before anything is known.
    pub fn of(&self, work: &Work) -> f64 {
        dot(&self.seconds, &work.terms())
    }

    /// Seconds of each prefill token, and of each token that one attends to.
    pub fn of_prefill_token(&self) -> (f64, f64) {
        (self.seconds[3] / UNITS[3], self.seconds[4] / UNITS[4])
    }
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
