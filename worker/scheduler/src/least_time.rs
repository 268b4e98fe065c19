//! A lower bound on the time that a prefill takes. It proves in advance that a deadline cannot be met.
//!
//! A request is ended if the bound exceeds the time until the request's deadline. So the bound must never be too high,
//! whereas an estimate may err either way. The bound rests on two properties of every device: a step with more work
//! takes no less time, and two steps take no less time than one step with the tokens of both. The bound therefore comes
//! from steps that did the least work for their number of tokens. Such a step computed prefills from position 0 on and
//! no decodes, and needed logits only at each prefill's last position. The duration of such a step is a lower bound for
//! every step of the same walk with at least as many tokens. Of the steps of one size, only the fastest counts. A step
//! that did more work in less time lowers the bound of smaller steps. [`MARGIN`] allows for a device that becomes
//! faster.

use std::{collections::BTreeMap, time::Duration};

use tutti_proto::declaration::WalkId;

use crate::{
    step::{Row, StepPlan},
    walks::Walks,
};

/// Factor by which a device may become faster than its fastest step so far.
const MARGIN: u32 = 2;

/// Number of steps of one size that must have run before the bound uses that size. The first steps may be slow for
/// transient reasons, such as cold caches.
const MIN_STEPS: u32 = 3;

/// The fastest steps so far, by walk and by the base-2 logarithm (rounded down) of the step's number of tokens.
#[derive(Debug, Default)]
pub(crate) struct LeastTime(BTreeMap<(WalkId, u32), Fastest>);

#[derive(Debug)]
struct Fastest {
    steps: u32,
    /// Largest number of tokens that a step counted in `steps` computed. `took` is a lower bound for steps with at
    /// least this many tokens.
    tokens: usize,
    took: Duration,
}

impl LeastTime {
    /// Records the duration of a step. `scored` tells whether a row's request wants logits of every position.
    pub fn observe(&mut self, step: &StepPlan, walks: &Walks, scored: impl Fn(&Row) -> bool, took: Duration) {
        // Decodes come first in a step, so reading from the end visits the prefills only.
        let prefills = step.rows.iter().rev().take_while(|row| !walks.is_decode(row.walk));
        let mut tokens = BTreeMap::<WalkId, usize>::new();
        let (mut rows, mut plain) = (0, true);
        for row in prefills {
            *tokens.entry(row.walk).or_default() += row.positions.len();
            rows += 1;
            plain &= row.positions.start == 0 && !scored(row);
        }
        let bare = plain && rows == step.rows.len() && tokens.len() == 1;
        for (walk, tokens) in tokens {
            self.record(walk, tokens, bare, took);
        }
    }

    /// Records a step that computed `tokens` tokens of a prefill walk. `bare` is true if the step did the least work
    /// for these tokens; the module documentation says which steps do.
    fn record(&mut self, walk: WalkId, tokens: usize, bare: bool, took: Duration) {
        let Some(size) = tokens.checked_ilog2() else { return };
        if bare {
            let fastest = self.0.entry((walk, size)).or_insert(Fastest { steps: 0, tokens, took });
            fastest.steps = fastest.steps.saturating_add(1);
            fastest.tokens = fastest.tokens.max(tokens);
            fastest.took = fastest.took.min(took);
        }
        let no_larger = self.0.range_mut((walk, 0)..=(walk, size)).filter(|(_, f)| f.tokens <= tokens);
        for (_, fastest) in no_larger {
            fastest.took = fastest.took.min(took);
        }
    }

    /// Lower bound on the time to prefill `tokens` tokens of one request, if a step computes at most `most` of them.
    /// The bound is zero until enough steps have been recorded.
    pub fn of(&self, walk: WalkId, tokens: usize, most: usize) -> Duration {
        let of_step = |tokens| self.of_step(walk, tokens);
        let steps = u32::try_from(tokens / most).unwrap_or(u32::MAX);
        let in_steps = of_step(most).saturating_mul(steps).saturating_add(of_step(tokens % most));
        of_step(tokens).max(in_steps) / MARGIN
    }

    /// The largest value of [`of`](Self::of) over all walks.
    pub fn of_any(&self, tokens: usize, most: usize) -> Duration {
        self.0.keys().map(|&(walk, _)| self.of(walk, tokens, most)).max().unwrap_or_default()
    }

    fn of_step(&self, walk: WalkId, tokens: usize) -> Duration {
        let sizes = self.0.range((walk, 0)..=(walk, u32::MAX)).map(|(_, fastest)| fastest);
        let known = sizes.filter(|fastest| fastest.steps >= MIN_STEPS && fastest.tokens <= tokens);
        known.map(|fastest| fastest.took).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
