//! Who is taken for dead though its stream is open.
//!
//! Two silences are told apart. A process that is *stopped* (or its machine, or the way to it) says nothing at all:
//! heartbeats come from a thread that does nothing else, so a few of them missing are enough. A process whose step
//! *hangs* goes on with its heartbeats, and the counters in them stand still while it has work: an honest step may take
//! long, so that bound is much longer. Counters move with each forward, of which a long prefill has many.
//!
//! Time is counted in ticks of the watchdog's own, so that a conductor that was stopped itself, or starved, does not take
//! its own silence for that of its workers.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tutti_proto::{Rank, WorkerId, cluster::v1 as pb};

use super::{Cluster, State, roles::GroupRole, workers::Worker};

/// Between two looks.
const TICK: Duration = Duration::from_millis(250);

impl Cluster {
    /// Looks after the workers for as long as it is polled.
    pub async fn watch(&self) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.tick(TICK);
        }
    }

    /// So much time has passed since the last look.
    pub fn tick(&self, time: Duration) {
        let mut state = self.state.lock();
        let dead: Vec<(WorkerId, Silence)> = state
            .workers
            .iter_mut()
            .filter_map(|(id, worker)| Some((id, self.silence(worker, time)?)))
            .collect();
        for (id, silence) in dead {
            self.metrics.fenced(silence.label());
            self.lose(&mut state, id, &silence.describe(self), true);
        }
        let hopeless = self.is_hopeless(&state);
        if !state.waiting.is_empty() && (hopeless || self.is_hopeless_for(&state, GroupRole::Encode)) {
            let why = self.why_not_ready(&state);
            self.fail_waiting(&mut state, &why, |request| hopeless || request.has_media());
        }
    }

    fn silence(&self, worker: &mut Worker, time: Duration) -> Option<Silence> {
        worker.silent += time;
        worker.stuck = if worker.has_work() { worker.stuck + time } else { Duration::ZERO };
        if worker.silent > self.limits.heartbeat_timeout {
            return Some(Silence::Stopped);
        }
        (worker.stuck > self.limits.hang_timeout).then_some(Silence::Hangs)
    }

    /// Whether no request can run, now or later: nobody is here or to be expected for some part of it.
    fn is_hopeless(&self, state: &State) -> bool {
        let hopeless = |role| self.is_hopeless_for(state, role);
        hopeless(GroupRole::Whole) && (hopeless(GroupRole::Prefill) || hopeless(GroupRole::Decode))
    }

    /// Whether no worker of this role is here that could take a request, now or later, and none is to be expected.
    fn is_hopeless_for(&self, state: &State, role: GroupRole) -> bool {
        let is_for = |rank| state.workers.duties(rank).include(role);
        let here = state.workers.iter().any(|(_, worker)| {
            is_for(worker.rank) && worker.link.is_some() && worker.phase != pb::WorkerPhase::Draining
        });
        let mut spawned = (0..self.spawned_workers()).map(Rank).filter(|rank| is_for(*rank));
        !here && spawned.all(|rank| state.ranks.get(rank).is_some_and(|record| record.is_hopeless()))
    }
}

/// Of which kind.
#[derive(Clone, Copy, Debug)]
enum Silence {
    Stopped,
    Hangs,
}

impl Silence {
    fn label(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Hangs => "hangs",
        }
    }

    fn describe(self, cluster: &Cluster) -> String {
        match self {
            Self::Stopped => format!("it has said nothing for {:?}", cluster.limits.heartbeat_timeout),
            Self::Hangs => {
                format!("it has work, and has made no step for {:?}", cluster.limits.hang_timeout)
            }
        }
    }
}
