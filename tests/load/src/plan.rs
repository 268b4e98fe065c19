//! The plan of a run: requests and their times. It is drawn from a seed before the first request is sent.

use std::time::Duration;

use serde::Serialize;
use tutti_bench::random::Draw;

/// Parameters of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Workload {
    /// Number of requests.
    pub requests: usize,
    /// Requests per second on average, as a Poisson process. An infinite rate sends all requests at once.
    pub rate: f64,
    /// Range of prompt lengths in tokens, both ends included. Lengths are drawn uniformly.
    pub prompt_tokens: (u32, u32),
    /// Number of tokens to generate per request. A served request has exactly this many, because end-of-sequence tokens
    /// are ignored.
    pub max_tokens: u32,
    /// Exclusive bound of prompt token ids.
    pub vocab_size: u32,
    /// Seed of all draws.
    pub seed: u64,
}

/// One request of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Time of sending, from the start of the run.
    pub at: Duration,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Seed of the request, for servers that sample.
    pub seed: u64,
}

impl Workload {
    /// Returns the requests in the order of sending.
    pub fn plan(&self) -> Vec<Planned> {
        let mut draw = Draw::new(self.seed);
        let mut at = 0.0;
        (0..self.requests)
            .map(|_| {
                if self.rate.is_finite() {
                    at += draw.exponential() / self.rate;
                }
                let (low, high) = self.prompt_tokens;
                let length = low + draw.below(high - low + 1);
                let prompt = (0..length).map(|_| draw.below(self.vocab_size)).collect();
                Planned { at: Duration::from_secs_f64(at), prompt, seed: draw.word() >> 32 }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
