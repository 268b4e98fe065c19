//! Course of a run, in a fixed number of intervals.

use std::time::Duration;

use serde::Serialize;

/// Maximum number of intervals. When a run needs more, each pair of intervals is merged into one.
const MAX_BINS: usize = 600;

/// The course of a run.
#[derive(Clone, Debug)]
pub struct Timeline {
    width: Duration,
    bins: Vec<Bin>,
}

/// Counts of one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bin {
    /// Requests sent.
    pub sent: u64,
    /// Requests that were answered completely.
    pub served: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Tokens that have arrived in answers of served requests.
    pub tokens: u64,
    /// Maximum number of requests in flight.
    pub in_flight: u64,
    /// Sum of the times to the first token of served requests. A time counts in the interval in which its token
    /// arrived.
    pub ttft_sum: Duration,
    /// Number of times in `ttft_sum`.
    pub ttft_count: u64,
    /// Longest time in `ttft_sum`.
    pub ttft_max: Duration,
}

/// An interval in a report.
#[derive(Clone, Debug, Serialize)]
pub struct Interval {
    pub start_s: f64,
    pub sent: u64,
    pub served: u64,
    pub failed: u64,
    pub output_tokens: u64,
    pub max_in_flight: u64,
    pub ttft_mean_ms: Option<f64>,
    pub ttft_max_ms: Option<f64>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { width: Duration::from_secs(1), bins: Vec::new() }
    }
}

impl Timeline {
    /// Returns the interval that contains a time, which counts from the start of the run.
    pub fn at(&mut self, time: Duration) -> &mut Bin {
        while time.as_nanos() / self.width.as_nanos() >= MAX_BINS as u128 {
            self.width *= 2;
            self.bins = self.bins.chunks(2).map(|bins| bins.iter().fold(Bin::default(), Bin::plus)).collect();
        }
        let index = (time.as_nanos() / self.width.as_nanos()) as usize;
        if index >= self.bins.len() {
            self.bins.resize(index + 1, Bin::default());
        }
        &mut self.bins[index]
    }

    /// Length of an interval.
    pub fn width(&self) -> Duration {
        self.width
    }

    /// Returns all intervals.
    pub fn intervals(&self) -> Vec<Interval> {
        let interval = |(index, bin): (usize, &Bin)| Interval {
            start_s: self.width.as_secs_f64() * index as f64,
            sent: bin.sent,
            served: bin.served,
            failed: bin.failed,
            output_tokens: bin.tokens,
            max_in_flight: bin.in_flight,
            ttft_mean_ms: (bin.ttft_count > 0)
                .then(|| bin.ttft_sum.as_secs_f64() * 1e3 / bin.ttft_count as f64),
            ttft_max_ms: (bin.ttft_count > 0).then_some(bin.ttft_max.as_secs_f64() * 1e3),
        };
        self.bins.iter().enumerate().map(interval).collect()
    }
}

impl Bin {
    /// Counts a time to the first token.
    pub fn first_token(&mut self, ttft: Duration) {
        self.ttft_sum += ttft;
        self.ttft_count += 1;
        self.ttft_max = self.ttft_max.max(ttft);
    }

    fn plus(self, other: &Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            served: self.served + other.served,
            failed: self.failed + other.failed,
            tokens: self.tokens + other.tokens,
            in_flight: self.in_flight.max(other.in_flight),
            ttft_sum: self.ttft_sum + other.ttft_sum,
            ttft_count: self.ttft_count + other.ttft_count,
            ttft_max: self.ttft_max.max(other.ttft_max),
        }
    }
}

#[cfg(test)]
mod tests;
