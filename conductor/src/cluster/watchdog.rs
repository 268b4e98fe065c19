//! Detects dead workers whose stream is still open.
//!
//! There are two cases. A *stopped* process (or machine, or network path) sends nothing. Workers send heartbeats from
//! the thread of their stream, which only passes messages on, so a few missing heartbeats are enough to detect a
//! stopped process. A process whose step *hangs* still sends heartbeats, but the counters in the heartbeats do not
//! change while the process has work. A correct step may take long, so the time limit for a hanging step is much
//! longer. A long prefill does not appear to hang: it consists of many forward passes, and the counters advance with
//! each one.
//!
//! Time is counted in the watchdog's own ticks. A conductor that was itself stopped for a while therefore does not take
//! its workers for dead. `slow` compares the workers that are alive at the same ticks.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tutti_proto::WorkerId;
use tutti_runtime::Error;

use super::{Cluster, Limits, ranks::Manner, roles::GroupRole, workers::Worker};

/// Time between two checks.
const TICK: Duration = Duration::from_millis(250);
/// Time without a check after which the conductor itself counts as dead.
const PATIENCE: Duration = Duration::from_secs(30);

impl Cluster {
    /// Checks the workers for as long as the future is polled.
    pub async fn watch(&self) {
        let pulse = self.health.pulse("the watchdog over workers", PATIENCE);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            // The check takes the lock that every request takes. If a holder of the lock is stuck, the watchdog's beats
            // stop.
            self.tick(TICK);
            pulse.beat();
        }
    }

    /// Checks the workers, `time` after the previous check. Also fails waiting requests for which no worker is
    /// expected.
    pub fn tick(&self, time: Duration) {
        let mut state = self.state.lock();
        let dead: Vec<(WorkerId, Silence)> = state
            .membership
            .workers
            .iter_mut()
            .filter_map(|(id, worker)| Some((id, Silence::of(worker, time, &self.limits)?)))
            .collect();
        for (id, silence) in dead {
            self.metrics.fenced(silence.label());
            self.lose(&mut state, id, &silence.describe(&self.limits), Manner::Fenced);
        }
        self.judge_paces(&mut state, time);
        self.move_waiting(&mut state);
        let membership = &state.membership;
        let hopeless = membership.is_hopeless();
        if state.requests.any_waiting() && (hopeless || membership.is_hopeless_for(GroupRole::Encode)) {
            let ids = state.requests.waiting_where(|request| hopeless || request.has_media());
            let why = membership.why_not_ready();
            let error =
                Error::unavailable(format!("the request lost its worker, and there is no other: {why}"));
            self.fail(&mut state, ids, &error);
        }
    }
}

/// The kind of a dead worker's silence.
#[derive(Clone, Copy, Debug)]
enum Silence {
    Stopped,
    Hangs,
}

impl Silence {
    /// Adds `time` to a worker's time without messages and to its time without progress. Returns the kind of silence if
    /// either time exceeds its limit.
    fn of(worker: &mut Worker, time: Duration, limits: &Limits) -> Option<Self> {
        worker.silent += time;
        worker.stuck = if worker.bookings.have_work() { worker.stuck + time } else { Duration::ZERO };
        if worker.silent > limits.faults.heartbeat_timeout() {
            return Some(Self::Stopped);
        }
        (worker.stuck > limits.faults.hang_timeout()).then_some(Self::Hangs)
    }

    fn label(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Hangs => "hangs",
        }
    }

    fn describe(self, limits: &Limits) -> String {
        match self {
            Self::Stopped => format!("it has sent nothing for {:?}", limits.faults.heartbeat_timeout()),
            Self::Hangs => {
                format!("it has work, and has made no step for {:?}", limits.faults.hang_timeout())
            }
        }
    }
}
