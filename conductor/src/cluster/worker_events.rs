//! Events of workers, from joining to loss, with their consequences for requests and metrics.

use std::time::Instant;

use tutti_proto::{CacheSalt, Rank, WorkerId, cluster::v1 as pb};
use tutti_runtime::{
    Error, ErrorKind,
    memory::{self, FreeMemory},
    prefix_index::{PromptPieces, block_tokens},
    token::random_bytes,
};

use super::{
    Cause, Cluster, Exit, Joining, Link, Presence, State, membership::Removed, ranks::Manner,
    topology::Replica,
};

impl Cluster {
    /// Adds a worker. Its `link` must hold [`super::Limits::link_capacity`] messages.
    pub fn join(&self, joining: Joining, link: Link) -> Result<WorkerId, Error> {
        self.limits.check_rank(joining.rank)?;
        let tp = self.limits.topology.tp_of(joining.rank);
        let secret = if tp > 1 { random_bytes()? } else { [0; 16] };
        self.state.lock().membership.admit(joining, link, secret)
    }

    /// Records that a worker loads the model.
    pub fn on_loading(&self, id: WorkerId) {
        if let Some(worker) = self.state.lock().membership.workers.hear(id)
            && worker.phase == pb::WorkerPhase::Starting
        {
            worker.phase = pb::WorkerPhase::Loading;
        }
    }

    /// Handles a worker that has loaded the model. The worker takes requests from now on. If its model differs from the
    /// model of the other workers, the worker is turned away.
    pub fn on_ready(&self, id: WorkerId, ready: pb::Ready) {
        let state = &mut *self.state.lock();
        let Some(rank) = state.membership.workers.hear(id).map(|worker| worker.rank) else { return };
        let outcome = state.membership.accept_model(rank, &ready);
        let Some(worker) = state.membership.workers.get_mut(id) else { return };
        match outcome {
            Ok(_) if worker.phase == pb::WorkerPhase::Draining => {}
            Ok(model) => {
                worker.phase = pb::WorkerPhase::Ready;
                worker.model = Some(model);
                worker.running_limit = ready.running_limit;
                self.metrics.memory(rank, &ready);
                worker.device = ready.device;
                worker.load.kv_pages_total = ready.kv_pages_total;
                self.metrics.load(rank, &worker.load);
                let pb::Ready { weight_bytes, kv_bytes, step_bytes, .. } = ready;
                let group = self.limits.topology.group_name_of(rank);
                tracing::info!(worker = rank.0, group, weight_bytes, kv_bytes, step_bytes, "worker is ready");
                state.membership.ranks.entry(rank).ready();
                self.place_waiting(state);
            }
            Err(error) => {
                worker.turn_away(error.clone());
                state.membership.ranks.entry(rank).report_trouble(error.to_string());
                if !self.ends_start(state, rank, &error) {
                    tracing::error!(worker = rank.0, %error, "worker turned away");
                }
            }
        }
        self.refresh_health(state);
    }

    /// Handles the prompts that a worker keeps from its requests of an earlier conductor: their requests are placed
    /// there if they come again.
    pub fn on_held_prompts(&self, id: WorkerId, held: pb::HeldPrompts) {
        let model = self.state.lock().membership.model_view();
        let Ok(model) = model.map(|model| model.description) else { return };
        if self.limits.engine.no_prefix_cache {
            return;
        }
        // Cutting long prompts takes long, so the lock is not held.
        let cut = |prompt: pb::HeldPrompt| {
            let salt = CacheSalt::from_message(&prompt.cache_salt).ok()?;
            Some((PromptPieces::new(&prompt.tokens, salt, block_tokens(&model)), prompt.tokens))
        };
        let prompts: Vec<_> = held.prompts.into_iter().filter_map(cut).collect();
        let (now, mut state) = (Instant::now(), self.state.lock());
        if state.membership.workers.hear(id).is_some() {
            for (pieces, tokens) in &prompts {
                state.prefixes.insert_held(pieces, tokens, id, now);
            }
        }
    }

    /// Handles a worker that cannot load the model. At the cluster's start, a fault that a restart of the worker cannot
    /// mend ends the cluster.
    pub fn on_load_failed(&self, id: WorkerId, fault: pb::Fault) {
        let error = Error::from(fault);
        let mut state = self.state.lock();
        let Some(rank) = state.membership.workers.hear(id).map(|worker| worker.rank) else { return };
        state.membership.ranks.entry(rank).report_trouble(error.to_string());
        if !self.ends_start(&state, rank, &error) {
            tracing::error!(worker = rank.0, %error, "worker could not load the model");
        }
        self.refresh_health(&mut state);
    }

    /// Handles a worker that wants to leave: its TP group gets no new requests, and leaves once its current requests
    /// are finished.
    pub fn on_leaving(&self, id: WorkerId) {
        let mut state = self.state.lock();
        if let Some(worker) = state.membership.workers.hear(id) {
            tracing::info!(worker = worker.rank.0, "worker wants to leave");
            state.membership.drain_group_of(id);
            self.refresh_health(&mut state);
        }
    }

    /// Drains the worker of this rank and the worker's TP group. The workers leave once their requests are finished,
    /// and spawned processes are not started again.
    pub fn drain_worker(&self, rank: Rank) -> Result<pb::WorkerPhase, Error> {
        let mut state = self.state.lock();
        let phase = state.membership.drain_rank(rank)?;
        self.refresh_health(&mut state);
        Ok(phase)
    }

    /// True if an operator has drained this rank for good.
    pub fn is_drained(&self, rank: Rank) -> bool {
        self.state.lock().membership.is_drained(rank)
    }

    /// Handles the end of a spawned worker's process.
    pub fn on_exit(&self, rank: Rank, exit: &Exit) {
        // Reads files, so not under the lock.
        let free = (exit.cause == Cause::Killed).then(memory::allocatable).flatten();
        let mut state = self.state.lock();
        if state.membership.dismissed {
            return;
        }
        let record = state.membership.ranks.entry(rank);
        record.observe_trouble(format!("its process ended: {}", exit.status));
        record.ended(exit.early_exits);
        if exit.cause != Cause::Killed {
            record.ended_unkilled();
        }
        match exit.cause {
            Cause::Usage => {
                let message = format!("worker {rank} refused its settings ({})", exit.status);
                self.ends_start(&state, rank, &Error::new(ErrorKind::InvalidArgument, message));
            }
            Cause::Killed => self.on_killed(&mut state, rank, free.as_ref()),
            Cause::Other => {}
        }
        self.refresh_health(&mut state);
    }

    /// Handles a spawned process that was killed. If loading the model kills a rank's processes again and again, the
    /// rank's replica is given up for a long while. At its start the cluster ends.
    fn on_killed(&self, state: &mut State, rank: Rank, free: Option<&FreeMemory>) {
        let ranks = &mut state.membership.ranks;
        if !ranks.entry(rank).killed() {
            return;
        }
        let replica = self.limits.topology.replica_of(rank);
        let gives_up = replica.is_some_and(|replica| ranks.are_killed_by_loading(replica));
        let free = free.map_or(String::new(), |free| format!("; now that it has ended, {free}"));
        tracing::error!(
            worker = rank.0,
            gives_up,
            "worker was killed while loading the model, likely for memory{free}"
        );
        if !gives_up {
            return;
        }
        let of_replica = replica.into_iter().flat_map(Replica::ranks);
        of_replica.for_each(|rank| state.membership.ranks.entry(rank).given_up = true);
        for (_, id) in state.membership.workers.group_of(rank) {
            self.lose(state, id, &format!("worker {rank} of its group is given up"), Manner::Fenced);
        }
        let message = format!(
            "worker {rank} was killed while loading (signal 9), likely for memory, and so were the restarts of its \
             replica{free}: take --quantize int8 or int4, fewer workers, a smaller --kv-cache-memory or more memory"
        );
        self.ends_start(state, rank, &Error::invalid("model", message));
    }

    /// Lets a replica that was given up start once more. Another kill while loading gives it up again at once.
    pub fn retry_given_up(&self, rank: Rank) {
        let mut state = self.state.lock();
        let of_replica = self.limits.topology.replica_of(rank).into_iter().flat_map(Replica::ranks);
        of_replica.for_each(|rank| state.membership.ranks.entry(rank).given_up = false);
        self.refresh_health(&mut state);
    }

    /// True if this rank's processes are not started now, because loading the model kills them.
    pub fn is_given_up(&self, rank: Rank) -> bool {
        self.state.lock().membership.is_given_up(rank)
    }

    /// Records that a spawned worker's process has run long enough to end a crash loop.
    pub fn on_well(&self, rank: Rank) {
        let mut state = self.state.lock();
        state.membership.ranks.entry(rank).well();
        self.refresh_health(&mut state);
    }

    /// Checks an error of a spawned worker. If the cluster has not started yet and the error would recur after a
    /// restart, the cluster ends and the result is true. Only the first such error is kept, since later ones are most
    /// likely the same.
    fn ends_start(&self, state: &State, rank: Rank, error: &Error) -> bool {
        let ends = state.membership.ends_start(rank, error);
        if ends {
            self.fatal.send_if_modified(|fatal| fatal.is_none() && fatal.replace(error.clone()).is_none());
        }
        ends
    }

    /// Handles the end of a worker's stream. Requests that the worker held start over or fail.
    pub fn on_lost(&self, id: WorkerId, why: &str) {
        self.lose(&mut self.state.lock(), id, why, Manner::Left);
    }

    /// Removes a worker and the other ranks of its TP group from the cluster.
    pub(super) fn lose(&self, state: &mut State, id: WorkerId, why: &str, manner: Manner) {
        let Some(Removed { worker, expected }) = state.membership.remove(id, why, manner) else { return };
        let rank = worker.rank;
        self.metrics.gone(rank);
        state.recent.gone(rank);
        let why = format!("worker {rank}: {why}");
        for request in worker.bookings.requests() {
            if let Some(held) = state.requests.get_mut(request) {
                let effects = held.on_worker_lost(id, &why);
                self.apply(state, request, effects);
            }
        }
        // After an unexpected loss, the other ranks may be waiting for the lost rank and react to no message, so they
        // are fenced.
        let manner = if expected { Manner::Left } else { Manner::Fenced };
        for (_, id) in state.membership.workers.group_of(rank) {
            self.lose(state, id, &format!("worker {rank} of its group is gone"), manner);
        }
        self.refresh_health(state);
    }

    /// Handles a worker's heartbeat.
    pub fn on_heartbeat(&self, id: WorkerId, beat: &pb::Heartbeat) {
        if let Some(worker) = self.state.lock().membership.workers.hear(id) {
            worker.take_heartbeat(beat);
            self.metrics.load(worker.rank, &worker.load);
            if let Some(usage) = &beat.usage {
                worker.resident_bytes = usage.resident_bytes;
                self.metrics.usage(worker.rank, usage);
            }
            if let Some(memory) = &beat.device_memory {
                self.metrics.device_memory(worker.rank, memory);
            }
        }
    }

    /// Handles a leader that is ready to meet the other ranks of its TP group.
    pub fn on_group_listening(&self, leader: WorkerId, listening: pb::GroupListening) {
        self.state.lock().membership.meet_leader(leader, listening);
    }

    /// State of the process `pid` that was spawned for this rank.
    pub fn presence(&self, rank: Rank, pid: u32) -> Presence {
        self.state.lock().membership.presence(rank, pid)
    }

    /// Counts the restart of a worker's process.
    pub fn on_restart(&self, rank: Rank) {
        self.metrics.restarted(rank);
    }
}
