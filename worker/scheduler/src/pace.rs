//! How long steps take, learnt from those that ran, so that prefill takes no more of a step than decodes can bear.
//!
//! The model is a line: a step lasts as long as its decodes, plus a cost for each prefill token beside them. Both are
//! moving averages, so they follow the batch and the lengths of its contexts. There is no clock here: whoever ran the
//! step says how long it took.

use std::time::Duration;

/// The weight of the newest step. Small enough that one late step does not halve the prefill, large enough that a
/// handful of steps is enough to learn from.
const NEWEST: f64 = 0.2;

#[derive(Debug, Default)]
pub(crate) struct Pace {
    target: Option<Duration>,
    /// Seconds of a step that only decodes.
    decodes: Average,
    /// Seconds of each prefill token.
    prefill_token: Average,
}

#[derive(Debug, Default)]
struct Average(Option<f64>);

impl Average {
    fn add(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |old| old + NEWEST * (value - old)));
    }
}

impl Pace {
    /// Steps that decode should last no longer than `target`; without one they may last as long as they do.
    pub fn new(target: Option<Duration>) -> Self {
        Self { target, ..Self::default() }
    }

    /// A step of so many decode rows and prefill tokens took so long.
    pub fn observe(&mut self, decodes: usize, prefill_tokens: usize, took: Duration) {
        let took = took.as_secs_f64();
        match (decodes, prefill_tokens) {
            (0, 0) => {}
            (_, 0) => self.decodes.add(took),
            // Until a step has decoded alone, all of its time counts as the prefill's: rather too little prefill.
            (_, tokens) => {
                let beside = if decodes == 0 { 0.0 } else { self.decodes.0.unwrap_or(0.0) };
                self.prefill_token.add((took - beside).max(0.0) / tokens as f64);
            }
        }
    }

    /// The most prefill tokens for a step that decodes; at least `least`, so that prefill goes on where the decodes
    /// alone take longer than they should.
    pub fn prefill_tokens(&self, least: usize) -> usize {
        let (Some(target), Some(token)) = (self.target, self.prefill_token.0) else { return usize::MAX };
        let spare = target.as_secs_f64() - self.decodes.0.unwrap_or(0.0);
        // A float beyond the range becomes the range's end.
        ((spare / token) as usize).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn prefill_gets_the_time_that_decodes_leave() {
        let mut pace = Pace::new(Some(ms(30)));
        assert_eq!(pace.prefill_tokens(16), usize::MAX, "nothing is known yet");
        for _ in 0..50 {
            pace.observe(4, 0, ms(10));
            pace.observe(4, 100, ms(20)); // 0.1 ms a token
        }
        let tokens = pace.prefill_tokens(16);
        assert!((195..=205).contains(&tokens), "20 ms are left, which is 200 tokens, not {tokens}");
    }

    #[test]
    fn it_follows_a_cost_that_grows() {
        let mut pace = Pace::new(Some(ms(30)));
        for cost in [1, 4] {
            for _ in 0..50 {
                pace.observe(4, 0, ms(10));
                pace.observe(4, 10, ms(10 + 10 * cost));
            }
        }
        assert_eq!(pace.prefill_tokens(1), 5);
    }

    #[test]
    fn decodes_that_are_too_slow_alone_do_not_stop_prefill() {
        let mut pace = Pace::new(Some(ms(5)));
        pace.observe(4, 0, ms(10));
        pace.observe(4, 100, ms(20));
        assert_eq!(pace.prefill_tokens(16), 16);
    }

    #[test]
    fn without_a_target_there_is_no_bound() {
        let mut pace = Pace::new(None);
        pace.observe(1, 100, ms(1000));
        assert_eq!(pace.prefill_tokens(1), usize::MAX);
    }
}
