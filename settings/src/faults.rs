//! Limits for workers that die, hang or fall silent, and for the end of a process.

use std::time::Duration;

settings! {
    /// Limits of patience, and of the work that a fault may cost.
    pub struct FaultSettings {
        "Scheduling" => {
            /// Requests that may wait beyond the running ones; further ones get HTTP status 503
            max_queued_requests: u32 = 1024, unit "N", at most 1 << 20;
        }
        "Faults" => {
            /// Replays of a request after its worker died or its hand-over failed
            max_replays: u32 = 2, unit "N", at most 100;
            /// Time that the two workers of a hand-over may keep each other waiting
            transfer_timeout: u32 = 30, unit "SECONDS", at least 1, at most 3600;
            /// Silence after which a worker is killed; it sends one heartbeat per second
            heartbeat_timeout: u32 = 5, unit "SECONDS", at least 2;
            /// Time without a step after which a worker with work is killed; must exceed its longest step
            hang_timeout: u32 = 120, unit "SECONDS", at least 1;
        }
    }
}

impl FaultSettings {
    /// `transfer_timeout` as a duration.
    pub fn transfer_timeout(&self) -> Duration {
        Duration::from_secs(self.transfer_timeout.into())
    }

    /// `heartbeat_timeout` as a duration.
    pub fn heartbeat_timeout(&self) -> Duration {
        Duration::from_secs(self.heartbeat_timeout.into())
    }

    /// `hang_timeout` as a duration.
    pub fn hang_timeout(&self) -> Duration {
        Duration::from_secs(self.hang_timeout.into())
    }
}

settings! {
    /// The end of a process.
    pub struct DrainSettings {
        "Faults" => {
            /// Time that running requests have to finish after the first Ctrl-C or SIGTERM
            drain_timeout: u32 = 30, unit "SECONDS";
        }
    }
}

impl DrainSettings {
    /// `drain_timeout` as a duration.
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_secs(self.drain_timeout.into())
    }
}
