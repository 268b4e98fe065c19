//! Limits for workers that die, hang or fall silent, and for the end of a process.

use std::time::Duration;

use crate::AddressSettings;

settings! {
    /// Timeouts that detect faults, and limits on the work that a fault may cost.
    pub struct FaultSettings {
        "Scheduling" => {
            /// Requests that may wait beyond the running ones; further ones get HTTP status 503
            max_queued_requests: u32 = 1024, unit "N", at most 1 << 20;
            /// Bytes of tokens and logprobs that wait for clients; beyond it, the request with most of them ends
            max_unread_bytes: usize = 256 << 20, unit "BYTES", at least 1;
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
            /// Time for which workers wait for the next conductor after theirs has died; with --state-directory
            successor_timeout: u32 = 60, unit "SECONDS", at least 1, at most 3600;
            /// A worker whose steps take this many times as long as those of its peers gets no new requests for a
            /// while; at least 2, or 0: then no worker is set aside, and only its cost in placement grows
            slow_worker_ratio: u32 = 4, unit "TIMES", at most 1000;
            /// Number of a worker's last steps that are compared with those of its peers
            slow_worker_steps: u32 = 64, unit "STEPS", at least 8, at most 1024;
            /// Time after which a slow worker is tried again; doubles each time that it is slow again, up to 16 times
            slow_worker_pause: u32 = 60, unit "SECONDS", at least 1, at most 86_400;
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

    /// `slow_worker_pause` as a duration.
    pub fn slow_worker_pause(&self) -> Duration {
        Duration::from_secs(self.slow_worker_pause.into())
    }

    /// `hang_timeout` as a duration.
    pub fn hang_timeout(&self) -> Duration {
        Duration::from_secs(self.hang_timeout.into())
    }
}

settings! {
    /// Draining of requests before a process ends.
    pub struct DrainSettings {
        "Faults" => {
            /// Time that running requests have to finish after the first Ctrl-C or SIGTERM
            drain_timeout: u32 = 30, unit "SECONDS", changes live;
            /// Time after that signal for which new requests are served while /ready says no, so that load balancers
            /// notice
            lame_duck: Option<u32> = None, unit "SECONDS", default "5 if other machines can connect, else 0", at most 600, changes live;
        }
    }
}

impl DrainSettings {
    /// `drain_timeout` as a duration.
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_secs(self.drain_timeout.into())
    }

    /// `lame_duck` as a duration, for a process that serves clients at these addresses.
    pub fn lame_duck(&self, addresses: &AddressSettings) -> Duration {
        // Load balancers poll `/ready` every few seconds. On loopback there are no load balancers, and a developer who
        // presses Ctrl-C does not want to wait.
        let is_local = addresses.http.ip().is_loopback() && addresses.grpc.ip().is_loopback();
        Duration::from_secs(self.lame_duck.unwrap_or(if is_local { 0 } else { 5 }).into())
    }
}
