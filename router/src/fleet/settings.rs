//! What an operator may set about a router's conductors.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tutti_runtime::Error;

/// Settings of a router before conductors of their own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FleetSettings {
    /// How often a choice that has had no token yet may be sent to another conductor.
    pub max_retries: u32,
    /// How often a choice that has had tokens may go on at another conductor.
    pub max_replays: u32,
    /// How long a choice whose conductor is lost waits for one that can go on with it, in milliseconds.
    pub recovery_ms: u32,
    /// A conductor that has not said how it is within this, in milliseconds, is taken to be unable to.
    pub answer_timeout_ms: u32,
    /// One that has neither accepted nor refused a request within this, in milliseconds, is taken to be lost.
    pub accept_timeout_ms: u32,
    /// How often a connection is tried, in milliseconds. One that does not answer within as long again is broken, and
    /// the streams on it go on elsewhere.
    pub keep_alive_ms: u32,
    /// How often a conductor that is ready is asked for its load, in milliseconds.
    pub poll_ms: u32,
    /// How often the name given by `discover` is looked up, in milliseconds.
    pub discover_ms: u32,
    /// What the index of prompt prefixes may take, in bytes; 0 turns it off.
    pub prefix_index_bytes: usize,
    /// A prefix that was not sent for so many seconds is forgotten.
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
    /// For the one conductor that an embedded router is part of: what it says is final, since it lives and dies with
    /// the router and replays by itself.
    pub fn embedded() -> Self {
        Self { max_retries: 0, max_replays: 0, accept_timeout_ms: u32::MAX, ..Self::default() }
    }

    /// Refuses values under which nothing could be reached.
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
