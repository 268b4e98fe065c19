//! Times at which an open loop sends its requests, decided before any answer is known.

use std::time::Duration;

use crate::random::Draw;

/// Distribution of the gaps between arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Process {
    /// Independent users: gaps of an exponential distribution.
    Poisson,
    /// Equal gaps.
    Constant,
}

/// The arrival times of an open loop, counted from the start of a run.
#[derive(Clone, Debug)]
pub struct Arrivals {
    process: Process,
    /// Mean seconds between two arrivals.
    gap: f64,
    at: f64,
    draw: Draw,
}

impl Arrivals {
    /// Creates the times of `rate` arrivals per second on average. With an infinite rate, all arrive at once.
    pub fn new(process: Process, rate: f64, seed: u64) -> Self {
        Self { process, gap: 1.0 / rate, at: 0.0, draw: Draw::numbered(seed, u64::MAX) }
    }
}

impl Iterator for Arrivals {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.at += match self.process {
            Process::Poisson => self.gap * self.draw.exponential(),
            Process::Constant => self.gap,
        };
        Some(Duration::from_secs_f64(self.at))
    }
}

#[cfg(test)]
mod tests;
