//! Age of the oldest request that has not run in any step yet.

use std::{
    collections::{HashSet, VecDeque},
    time::{Duration, Instant},
};

use tutti_proto::GraphKey;

/// The queue is compacted when its stale entries outnumber the waiting requests by more than this number.
const SLACK: usize = 64;

/// Requests that have not run in any step yet.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    waiting: HashSet<GraphKey>,
    /// Requests and their arrival times, oldest first. A request that no longer waits stays queued until it reaches the
    /// front or the queue is compacted.
    queue: VecDeque<(GraphKey, Instant)>,
}

impl Arrivals {
    pub fn add(&mut self, key: GraphKey) {
        if self.queue.len() > 2 * self.waiting.len() + SLACK {
            self.queue.retain(|(key, _)| self.waiting.contains(key));
        }
        self.waiting.insert(key);
        self.queue.push_back((key, Instant::now()));
    }

    /// Removes a request that now runs in a step or has ended.
    pub fn remove(&mut self, key: GraphKey) {
        self.waiting.remove(&key);
    }

    /// Returns the time for which the oldest waiting request has waited; zero if no request waits.
    pub fn oldest(&mut self) -> Duration {
        while let Some((key, since)) = self.queue.front() {
            if self.waiting.contains(key) {
                return since.elapsed();
            }
            self.queue.pop_front();
        }
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests;
