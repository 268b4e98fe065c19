//! The least time that a prefill takes: what shows that a deadline cannot be met before it has passed.
//!
//! Requests end by it, so it must never be too long, where an estimate may err either way. It counts on two things that
//! hold of every device: a step with more to do takes no less time, and two steps take no less than one with the tokens of
//! both. So prompts that a step computed from their start, with nothing decoding beside them and nothing wanted of any
//! position but the last, bound every step of as many tokens of that walk or more. Only the fastest such step counts, a step
//! that did more in less time lowers what is known of smaller ones, and the rest of what could be luck is left to [`HOPE`].

use std::{collections::BTreeMap, time::Duration};

use tutti_proto::declaration::WalkId;

use crate::{
    step::{Row, StepPlan},
    walks::Walks,
};

/// By how much a device may turn out to be faster than it has ever been.
const HOPE: u32 = 2;

/// How many steps of a size must have been seen: the first ones may be slow for reasons of their own.
const ENOUGH: u32 = 3;

/// What is known of steps, by walk and the binary logarithm of their tokens.
#[derive(Debug, Default)]
pub(crate) struct LeastTime(BTreeMap<(WalkId, u32), Seen>);

#[derive(Debug)]
struct Seen {
    steps: u32,
    /// Of the largest of them: what is known holds from there on.
    tokens: usize,
    fastest: Duration,
}

impl LeastTime {
    /// A step took so long; `scored` tells the rows of which something is wanted of every position.
    pub fn observe(&mut self, step: &StepPlan, walks: &Walks, scored: impl Fn(&Row) -> bool, took: Duration) {
        // Decodes come first, so that this looks at none of a step of decodes alone.
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
            self.see(walk, tokens, bare, took);
        }
    }

    /// A step with so many tokens of a prefill walk took so long; `bare` if it had nothing else to do.
    fn see(&mut self, walk: WalkId, tokens: usize, bare: bool, took: Duration) {
        let Some(size) = tokens.checked_ilog2() else { return };
        if bare {
            let seen = self.0.entry((walk, size)).or_insert(Seen { steps: 0, tokens, fastest: took });
            seen.steps = seen.steps.saturating_add(1);
            seen.tokens = seen.tokens.max(tokens);
            seen.fastest = seen.fastest.min(took);
        }
        for (_, seen) in self.0.range_mut((walk, 0)..=(walk, size)).filter(|(_, seen)| seen.tokens <= tokens)
        {
            seen.fastest = seen.fastest.min(took);
        }
    }

    /// Of so many tokens of one request, of which a step takes at most `most`; zero while nothing is known.
    pub fn of(&self, walk: WalkId, tokens: usize, most: usize) -> Duration {
        let of_step = |tokens| self.of_step(walk, tokens);
        let steps = u32::try_from(tokens / most).unwrap_or(u32::MAX);
        let in_steps = of_step(most).saturating_mul(steps).saturating_add(of_step(tokens % most));
        of_step(tokens).max(in_steps) / HOPE
    }

    /// The same of the walk that takes longest.
    pub fn of_any(&self, tokens: usize, most: usize) -> Duration {
        self.0.keys().map(|&(walk, _)| self.of(walk, tokens, most)).max().unwrap_or_default()
    }

    fn of_step(&self, walk: WalkId, tokens: usize) -> Duration {
        let sizes = self.0.range((walk, 0)..=(walk, u32::MAX)).map(|(_, seen)| seen);
        let known = sizes.filter(|seen| seen.steps >= ENOUGH && seen.tokens <= tokens);
        known.map(|seen| seen.fastest).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALK: WalkId = WalkId(1);

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// So many tokens took so long, often enough to be believed.
    fn after(seen: &[(usize, u64)]) -> LeastTime {
        let mut least = LeastTime::default();
        for &(tokens, took) in seen {
            (0..ENOUGH).for_each(|_| least.see(WALK, tokens, true, ms(took)));
        }
        least
    }

    #[test]
    fn nothing_is_known_until_a_few_steps_have_shown_it() {
        let mut least = LeastTime::default();
        for _ in 1..ENOUGH {
            least.see(WALK, 100, true, ms(10));
            assert_eq!(least.of(WALK, 1000, 100), Duration::ZERO);
        }
        least.see(WALK, 100, true, ms(10));
        assert_eq!(least.of(WALK, 1000, 100), ms(100) / HOPE);
    }

    #[test]
    fn a_prompt_takes_as_many_steps_as_the_budget_makes_of_it() {
        let least = after(&[(64, 8), (16, 4)]);
        assert_eq!(least.of(WALK, 200, 64), ms(3 * 8) / HOPE, "and nothing is known of 8 tokens");
        assert_eq!(least.of(WALK, 216, 64), ms(3 * 8 + 4) / HOPE);
        assert_eq!(
            least.of(WALK, 200, usize::MAX),
            ms(8) / HOPE,
            "at once it may cost no more than 64 tokens"
        );
        assert_eq!((least.of(WALK, 0, 64), least.of(WALK, 15, 64)), (Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn steps_with_other_work_show_that_it_goes_faster_but_not_that_it_does_not() {
        let mut least = after(&[(64, 8)]);
        least.see(WALK, 64, false, ms(80));
        assert_eq!(least.of(WALK, 64, 64), ms(8) / HOPE);
        least.see(WALK, 70, false, ms(6));
        assert_eq!(least.of(WALK, 64, 64), ms(6) / HOPE);
        least.see(WALK, 32, false, ms(1));
        assert_eq!(least.of(WALK, 64, 64), ms(6) / HOPE, "fewer tokens may take less");
    }

    #[test]
    fn one_that_was_slow_for_once_is_no_bound() {
        let mut least = after(&[(64, 800)]);
        least.see(WALK, 64, true, ms(8));
        assert_eq!(least.of(WALK, 64, 64), ms(8) / HOPE);
        // Slow whenever it was seen, but more tokens took less.
        let mut least = after(&[(16, 800)]);
        least.see(WALK, 64, true, ms(8));
        assert_eq!(least.of(WALK, 16, 64), ms(8) / HOPE);
    }

    #[test]
    fn walks_are_apart() {
        let least = after(&[(64, 8)]);
        assert_eq!(least.of(WalkId(0), 64, 64), Duration::ZERO);
        assert_eq!(
            (least.of_any(64, 64), LeastTime::default().of_any(64, 64)),
            (ms(8) / HOPE, Duration::ZERO)
        );
    }
}
