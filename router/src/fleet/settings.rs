//! Settings about a router's conductors.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tutti_runtime::Error;

/// Settings about the conductors of a router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FleetSettings {
    /// Maximum number of times that a choice without tokens is sent to another conductor.
    pub max_retries: u32,
    /// Maximum number of times that a choice with tokens continues on another conductor.
    pub max_replays: u32,
    /// Time in milliseconds that a choice waits for another conductor after its own is lost.
    pub recovery_ms: u32,
    /// Time in milliseconds that a conductor has to answer a poll. Without an answer it counts as lost.
    pub answer_timeout_ms: u32,
    /// Time in milliseconds that a conductor has to accept or refuse a request. Without an answer it counts as lost.
    pub accept_timeout_ms: u32,
    /// Interval of connection probes in milliseconds. A connection that does not answer a probe within the same time is
    /// broken, and its streams continue on other conductors.
    pub keep_alive_ms: u32,
    /// Interval in milliseconds at which a ready conductor is polled for its load.
    pub poll_ms: u32,
    /// Interval in milliseconds at which the name in `discover` is looked up.
    pub discover_ms: u32,
    /// Maximum size of the index of prompt prefixes in bytes; 0 turns the index off.
    pub prefix_index_bytes: usize,
    /// Seconds after which an unused prefix is removed from the index.
    pub prefix_index_age_s: u32,
}

impl Default for FleetSettings {
    fn default() -> Self {
        Self {
            max_retries: 2,
            max_replays: 2,
            recovery_ms: 30_000,
            answer_timeout_ms: 5_000,
            accept_timeout_ms: 15_000,
            keep_alive_ms: 5_000,
            poll_ms: 1_000,
            discover_ms: 5_000,
            prefix_index_bytes: 64 << 20,
            prefix_index_age_s: 900,
        }
    }
}

impl FleetSettings {
    /// Settings of an embedded router. Its only conductor runs in the same process and replays requests by itself, so
    /// the conductor's errors are final.
    pub fn embedded() -> Self {
        Self { max_retries: 0, max_replays: 0, accept_timeout_ms: u32::MAX, ..Self::default() }
    }

    /// Refuses times of zero, with which no conductor could be reached.
    pub fn validate(&self) -> Result<(), Error> {
        let times = [
            ("fleet.answer_timeout_ms", self.answer_timeout_ms),
            ("fleet.accept_timeout_ms", self.accept_timeout_ms),
            ("fleet.keep_alive_ms", self.keep_alive_ms),
            ("fleet.poll_ms", self.poll_ms),
            ("fleet.discover_ms", self.discover_ms),
        ];
        match times.into_iter().find(|(_, time)| *time == 0) {
            Some((field, _)) => Err(Error::invalid(field, "is 0, but must be at least 1")),
            None => Ok(()),
        }
    }

    pub(super) fn answer_timeout(&self) -> Duration {
        Duration::from_millis(self.answer_timeout_ms.into())
    }

    pub(super) fn accept_timeout(&self) -> Duration {
        Duration::from_millis(self.accept_timeout_ms.into())
    }

    pub(super) fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms.into())
    }

    pub(super) fn poll(&self) -> Duration {
        Duration::from_millis(self.poll_ms.into())
    }

    pub(super) fn discover(&self) -> Duration {
        Duration::from_millis(self.discover_ms.into())
    }

    pub(super) fn prefix_index_age(&self) -> Duration {
        Duration::from_secs(self.prefix_index_age_s.into())
    }

    /// See `recovery_ms`.
    pub fn recovery(&self) -> Duration {
        Duration::from_millis(self.recovery_ms.into())
    }
}

#[cfg(test)]
mod tests;
