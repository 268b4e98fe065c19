//! The last minutes of this router's metrics, for the web page.
//!
//! A task reads the metrics every two seconds and keeps the differences. So a history costs no work per request or
//! token, and its size is bounded.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};

use crate::{
    fleet::{Fleet, Queue},
    metrics::{LATENCY_BOUNDS, RouterMetrics, Totals},
};

/// Time between two samples.
const EVERY: Duration = Duration::from_secs(2);
/// Time for which a sample is kept.
const KEPT: Duration = Duration::from_secs(300);

/// Samples of the last minutes.
pub struct History {
    metrics: RouterMetrics,
    fleet: Arc<Fleet>,
    ring: Mutex<Ring>,
}

/// The kept samples, and the state at the last one.
struct Ring {
    /// A random name of this process.
    process: String,
    began: Instant,
    sampled: Instant,
    totals: Totals,
    samples: VecDeque<Sample>,
    /// Number of samples so far.
    newest: u64,
}

/// The events between two times at which the metrics were read, and the state at the second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// Number among all samples of this process, from 1.
    sequence: u64,
    /// Milliseconds from the router's start to the sample.
    at_ms: u64,
    /// Milliseconds since the sample before.
    took_ms: u64,
    #[serde(flatten)]
    events: Totals,
    #[serde(flatten)]
    queue: Queue,
}

/// The samples that a caller does not know yet.
#[derive(Debug, Serialize)]
pub struct Samples {
    /// Seconds for which a sample is kept.
    kept_s: u64,
    /// A random name of the process that took the samples.
    process: String,
    /// Number of the newest sample.
    newest: u64,
    /// Upper bounds of the buckets of latencies, in seconds. A last bucket has no bound.
    bounds_s: &'static [f64],
    samples: Vec<Sample>,
}

impl History {
    /// Creates a history of these metrics that has no sample yet.
    pub fn new(metrics: RouterMetrics, fleet: Arc<Fleet>) -> Self {
        let ring = Mutex::new(Ring::new(metrics.totals(), Instant::now()));
        Self { metrics, fleet, ring }
    }

    /// Takes samples for as long as the future is polled.
    pub async fn follow(self: Arc<Self>) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is at once.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let (totals, queue) = (self.metrics.totals(), self.fleet.queue());
            self.ring.lock().take(totals, queue, Instant::now());
        }
    }

    /// The samples with a number above `after`, or all that are kept if the caller's samples are not of this process.
    pub fn after(&self, process: &str, after: u64) -> Samples {
        self.ring.lock().after(process, after)
    }
}

impl Ring {
    fn new(totals: Totals, now: Instant) -> Self {
        let process = format!("{:016x}", fastrand::u64(..));
        Self { process, began: now, sampled: now, totals, samples: VecDeque::new(), newest: 0 }
    }

    fn take(&mut self, totals: Totals, queue: Queue, now: Instant) {
        self.newest += 1;
        let before = std::mem::replace(&mut self.totals, totals);
        let events = self.totals.since(&before);
        let took = now.saturating_duration_since(self.sampled);
        self.sampled = now;
        self.samples.push_back(Sample {
            sequence: self.newest,
            at_ms: now.saturating_duration_since(self.began).as_millis() as u64,
            took_ms: (took.as_millis() as u64).max(1),
            events,
            queue,
        });
        if self.samples.len() > (KEPT.as_secs() / EVERY.as_secs()) as usize {
            self.samples.pop_front();
        }
    }

    fn after(&self, process: &str, after: u64) -> Samples {
        let is_new = |sample: &&Sample| process != self.process || sample.sequence > after;
        Samples {
            kept_s: KEPT.as_secs(),
            process: self.process.clone(),
            newest: self.newest,
            bounds_s: &LATENCY_BOUNDS,
            samples: self.samples.iter().filter(is_new).cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests;
