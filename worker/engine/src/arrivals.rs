//! How long the oldest request has waited for its first row.

use std::{
    collections::{HashSet, VecDeque},
    time::{Duration, Instant},
};

use tutti_proto::GraphKey;

/// Entries that may be stale before they are swept out, beyond as many as wait.
const SLACK: usize = 64;

/// Requests that no step has had a row of yet.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    waiting: HashSet<GraphKey>,
    /// Oldest first; those that no longer wait stay until they are in front, or too many.
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

    /// It has a row, or has ended.
    pub fn remove(&mut self, key: GraphKey) {
        self.waiting.remove(&key);
    }

    /// Zero where none waits.
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
mod tests {
    use tutti_proto::cluster::v1 as pb;

    use super::*;

    fn key(request: u64) -> GraphKey {
        pb::GraphKey { request, ..Default::default() }.into()
    }

    #[test]
    fn the_oldest_that_still_waits_counts() {
        let mut arrivals = Arrivals::default();
        arrivals.add(key(1));
        arrivals.add(key(2));
        assert!(arrivals.oldest() > Duration::ZERO);
        arrivals.remove(key(1));
        assert!(arrivals.oldest() > Duration::ZERO);
        arrivals.remove(key(2));
        assert_eq!(arrivals.oldest(), Duration::ZERO);
    }

    #[test]
    fn a_request_that_waits_for_long_keeps_no_trace_of_others() {
        let mut arrivals = Arrivals::default();
        arrivals.add(key(0));
        for request in 1..10_000 {
            arrivals.add(key(request));
            arrivals.remove(key(request));
        }
        assert!(arrivals.queue.len() <= SLACK + 4, "{}", arrivals.queue.len());
    }
}
