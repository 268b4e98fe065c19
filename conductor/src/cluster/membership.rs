//! The lives of workers as the cluster sees them: joined, loading, ready, draining, gone.

use std::net::IpAddr;

use tutti_proto::{
    Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::{Error, ErrorKind};

use super::{Cluster, Link, MAX_WORKERS, State, ranks::Departure, topology::Replica};
use crate::backend::random_bytes;

/// What a joining worker shows of itself.
#[derive(Clone, Copy, Debug)]
pub struct Joining {
    /// Its place.
    pub rank: Rank,
    /// Its process.
    pub pid: u32,
    /// Where it dials from.
    pub host: IpAddr,
}

/// Where a spawned process is in its life as a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It has not joined yet.
    Awaited,
    /// It holds its stream.
    Here,
    /// Its stream has ended.
    Left,
    /// It has been taken for dead: whatever it still does is for nobody.
    Fenced,
}

/// How a spawned process ended.
#[derive(Clone, Debug)]
pub struct Exit {
    /// In words.
    pub status: String,
    /// It found its settings unusable.
    pub usage: bool,
    /// Processes of this rank in a row that ended early, this one included.
    pub early_exits: u32,
}

impl Cluster {
    /// Takes in a worker. Its `link` must hold [`Cluster::link_capacity`] messages.
    pub fn join(&self, joining: Joining, link: Link) -> Result<WorkerId, Error> {
        let Joining { rank, pid, host } = joining;
        let ranks = self.limits.topology.ranks().min(MAX_WORKERS);
        if rank.0 >= ranks {
            return Err(Error::invalid("rank", format!("is {rank}, the limit is {}", ranks - 1)));
        }
        // Before the lock, since it is read from a file.
        let secret = if self.tp(rank) > 1 { random_bytes()? } else { [0; 16] };
        let mut state = self.state.lock();
        // Until then a worker that died is needed again, for the requests that wait for it.
        if state.dismissed {
            return Err(Error::unavailable("the conductor is shutting down"));
        }
        if let Some((_, worker)) = state.workers.by_rank(rank) {
            let message = format!("rank {rank} is taken by the worker with pid {}", worker.pid);
            return Err(Error::unavailable(message).with_field("rank"));
        }
        state.ranks.of(rank).joined();
        let id = state.workers.join(rank, pid, host, link);
        tracing::debug!(worker = %rank, pid, %id, "joined");
        self.form_group(&mut state, rank, secret);
        Ok(id)
    }

    /// Takes a worker's loading into account.
    pub fn on_loading(&self, id: WorkerId) {
        if let Some(worker) = self.state.lock().workers.hear(id)
            && worker.phase == pb::WorkerPhase::Starting
        {
            worker.phase = pb::WorkerPhase::Loading;
        }
    }

    /// The worker takes requests from here on, unless it serves another model than the rest.
    pub fn on_ready(&self, id: WorkerId, ready: pb::Ready) {
        let mut state = self.state.lock();
        let Some(rank) = state.workers.hear(id).map(|worker| worker.rank) else { return };
        let outcome = self.take_model(&mut state, rank, &ready);
        let Some(worker) = state.workers.get_mut(id) else { return };
        match outcome {
            Ok(_) if worker.phase == pb::WorkerPhase::Draining => {}
            Ok(model) => {
                worker.phase = pb::WorkerPhase::Ready;
                worker.model = Some(model);
                worker.load.kv_pages_total = ready.kv_pages_total;
                self.metrics.load(rank, &worker.load);
                let pb::Ready { weight_bytes, kv_bytes, step_bytes, .. } = ready;
                let said = [("weights", weight_bytes), ("kv", kv_bytes), ("step", step_bytes)];
                self.metrics.memory(rank, said);
                let group = self.group_name(rank);
                tracing::info!(worker = %rank, group, weight_bytes, kv_bytes, step_bytes, "ready");
                state.ranks.of(rank).ready();
                self.place_waiting(&mut state);
            }
            Err(error) => {
                worker.turn_away(error.clone());
                state.ranks.of(rank).tell_trouble(error.to_string());
                if !self.ends_start(&state, rank, &error) {
                    tracing::error!(worker = %rank, %error, "turned away");
                }
            }
        }
        self.refresh_health(&mut state);
    }

    /// The worker cannot load the model. At the cluster's start that ends it where trying again is useless.
    pub fn on_load_failed(&self, id: WorkerId, fault: pb::Fault) {
        let error = Error::from(fault);
        let mut state = self.state.lock();
        let Some(worker) = state.workers.hear(id) else { return };
        let rank = worker.rank;
        state.ranks.of(rank).tell_trouble(error.to_string());
        if !self.ends_start(&state, rank, &error) {
            tracing::error!(worker = %rank, %error, "could not load");
        }
        self.refresh_health(&mut state);
    }

    /// The worker wants to go: it gets nothing new, and goes once what it has is done.
    pub fn on_leaving(&self, id: WorkerId) {
        let mut state = self.state.lock();
        if let Some(worker) = state.workers.hear(id) {
            tracing::info!(worker = %worker.rank, "wants to leave");
            self.drain(&mut state, id);
        }
    }

    /// Sends the worker of this rank away once what it has is done. The rank's process is not started again.
    pub fn drain_worker(&self, rank: Rank) -> Result<pb::WorkerPhase, Error> {
        let mut state = self.state.lock();
        let id = state.workers.by_rank(rank).map(|(id, _)| id);
        if id.is_none() && rank.0 >= self.spawned_workers() {
            return Err(
                Error::new(ErrorKind::NotFound, format!("there is no worker {rank}")).with_field("worker")
            );
        }
        // Whoever comes by hand may come again under the same rank.
        if rank.0 < self.spawned_workers() {
            let group = self.limits.topology.replica_of(rank);
            group.into_iter().flat_map(Replica::ranks).for_each(|rank| state.ranks.of(rank).drained = true);
        }
        tracing::info!(worker = %rank, "draining");
        match id {
            Some(id) => self.drain(&mut state, id),
            None => self.refresh_health(&mut state),
        }
        Ok(if id.is_some() { pb::WorkerPhase::Draining } else { pb::WorkerPhase::Drained })
    }

    /// Whether an operator has sent the rank's worker away for good.
    pub fn is_drained(&self, rank: Rank) -> bool {
        self.state.lock().ranks.get(rank).is_some_and(|record| record.drained)
    }

    fn drain(&self, state: &mut State, id: WorkerId) {
        let Some(rank) = state.workers.get_mut(id).map(|worker| worker.rank) else { return };
        // A group goes as a whole.
        for (_, id) in state.workers.group_of(rank) {
            let Some(worker) = state.workers.get_mut(id) else { continue };
            if std::mem::replace(&mut worker.phase, pb::WorkerPhase::Draining) != pb::WorkerPhase::Draining
                && !state.workers.leaves_with_its_leader(id)
            {
                state.workers.send(id, ToWorker::Drain(pb::Drain {}));
            }
        }
        self.refresh_health(state);
    }

    /// A spawned worker's process has ended.
    pub fn on_exit(&self, rank: Rank, exit: &Exit) {
        let mut state = self.state.lock();
        if state.dismissed {
            return;
        }
        let record = state.ranks.of(rank);
        record.see_trouble(format!("its process ended: {}", exit.status));
        record.ended(exit.early_exits);
        if exit.usage {
            let message = format!("worker {rank} refused its settings ({})", exit.status);
            self.ends_start(&state, rank, &Error::new(ErrorKind::InvalidArgument, message));
        }
        self.refresh_health(&mut state);
    }

    /// A spawned worker's process has lived for a while.
    pub fn on_well(&self, rank: Rank) {
        let mut state = self.state.lock();
        state.ranks.of(rank).well();
        self.refresh_health(&mut state);
    }

    /// Whether a spawned worker's error ends the cluster: at its start, where trying again unchanged is useless. The
    /// first such error is told; others are most likely the same.
    fn ends_start(&self, state: &State, rank: Rank, error: &Error) -> bool {
        let useless = tutti_runtime::exit::code(error) == tutti_runtime::exit::USAGE;
        let ends = useless && !state.started && rank.0 < self.spawned_workers();
        if ends {
            self.fatal.send_if_modified(|fatal| fatal.is_none() && fatal.replace(error.clone()).is_none());
        }
        ends
    }

    /// The worker's stream has ended: all it held is lost, and requests on it start over elsewhere.
    pub fn on_lost(&self, id: WorkerId, why: &str) {
        self.lose(&mut self.state.lock(), id, why, false);
    }

    /// Takes a worker out of the cluster. One that is fenced may still be there, and talk; nobody listens any more.
    pub(super) fn lose(&self, state: &mut State, id: WorkerId, why: &str, fenced: bool) {
        state.forming.remove(&id);
        let Some(worker) = state.workers.remove(id) else { return };
        let (rank, pid) = (worker.rank, worker.pid);
        let expected = state.dismissed || (worker.phase == pb::WorkerPhase::Draining && !fenced);
        let record = state.ranks.of(rank);
        // One that has said why it cannot stay has been heard.
        if expected || (record.has_trouble() && !fenced) {
            tracing::debug!(worker = %rank, why, "left");
        } else {
            tracing::warn!(worker = %rank, pid, why, "lost");
            record.see_trouble(why.to_owned());
        }
        record.departure = Some(Departure { pid, fenced });
        self.metrics.gone(rank);
        self.replay_requests_of(state, id, &worker, &format!("worker {rank}: {why}"));
        self.disband(state, rank, !expected);
        self.refresh_health(state);
    }

    /// A worker's own count of what it does.
    pub fn on_heartbeat(&self, id: WorkerId, beat: &pb::Heartbeat) {
        if let Some(worker) = self.state.lock().workers.hear(id) {
            worker.take_heartbeat(beat);
            self.metrics.load(worker.rank, &worker.load);
        }
    }

    /// What is known of the process that was spawned for this rank.
    pub fn presence(&self, rank: Rank, pid: u32) -> Presence {
        let state = self.state.lock();
        match (state.workers.by_rank(rank), state.ranks.get(rank).and_then(|record| record.departure)) {
            (Some((_, worker)), _) if worker.pid == pid => Presence::Here,
            (_, Some(departure)) if departure.pid == pid && departure.fenced => Presence::Fenced,
            (_, Some(departure)) if departure.pid == pid => Presence::Left,
            _ => Presence::Awaited,
        }
    }

    /// A worker's process was started again.
    pub fn on_restart(&self, rank: Rank) {
        self.metrics.restarted(rank);
    }
}
