//! What is sent and when: decided before the first request leaves, and the same for the same seed.

use std::time::Duration;

use serde::Serialize;

/// What a run is made from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Workload {
    /// How many requests are sent.
    pub requests: usize,
    /// Requests a second on average, as a Poisson process; infinite sends all at once.
    pub rate: f64,
    /// Prompt lengths in tokens, drawn evenly from this range, both ends included.
    pub prompt_tokens: (u32, u32),
    /// Tokens asked for; end-of-sequence tokens are ignored, so that this many must come.
    pub max_tokens: u32,
    /// Prompt token ids are drawn below this.
    pub vocab_size: u32,
    /// Where every draw comes from.
    pub seed: u64,
}

/// One request of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// When it leaves, counted from the start of the run.
    pub at: Duration,
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// Its seed, for servers that sample.
    pub seed: u64,
}

impl Workload {
    /// The requests in the order in which they leave.
    pub fn plan(&self) -> Vec<Planned> {
        let mut draw = Draw(self.seed);
        let mut at = 0.0;
        (0..self.requests)
            .map(|_| {
                if self.rate.is_finite() {
                    at += -(1.0 - draw.unit()).ln() / self.rate;
                }
                let (low, high) = self.prompt_tokens;
                let length = low + draw.below(high - low + 1);
                let prompt = (0..length).map(|_| draw.below(self.vocab_size)).collect();
                Planned { at: Duration::from_secs_f64(at), prompt, seed: draw.next() >> 32 }
            })
            .collect()
    }
}

/// The splitmix64 sequence (Steele, Lea and Flood, 2014).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, limit: u32) -> u32 {
        (self.unit() * f64::from(limit)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> Workload {
        Workload {
            requests: 20_000,
            rate: 50.0,
            prompt_tokens: (1, 3),
            max_tokens: 8,
            vocab_size: 7,
            seed: 1,
        }
    }

    #[test]
    fn the_seed_decides_everything() {
        assert_eq!(workload().plan(), workload().plan());
        assert_ne!(workload().plan(), Workload { seed: 2, ..workload() }.plan());
    }

    #[test]
    fn arrivals_are_poisson() {
        let plan = workload().plan();
        let gaps: Vec<f64> = plan.windows(2).map(|w| (w[1].at - w[0].at).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // An exponential distribution's deviation equals its mean; 20,000 draws know both to about 1 %.
        assert!((mean * 50.0 - 1.0).abs() < 0.03, "mean {mean}");
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "deviation {}", variance.sqrt());
    }

    #[test]
    fn prompts_keep_to_their_ranges_and_use_them_whole() {
        let plan = workload().plan();
        let lengths: std::collections::BTreeSet<_> = plan.iter().map(|p| p.prompt.len()).collect();
        let ids: std::collections::BTreeSet<_> = plan.iter().flat_map(|p| p.prompt.clone()).collect();
        assert_eq!(lengths, (1..=3).collect());
        assert_eq!(ids, (0..7).collect());
    }

    #[test]
    fn an_infinite_rate_sends_all_at_once() {
        let plan = Workload { rate: f64::INFINITY, ..workload() }.plan();
        assert!(plan.iter().all(|p| p.at.is_zero()));
    }
}
