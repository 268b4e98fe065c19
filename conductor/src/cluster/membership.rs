//! The cluster's workers: joined, loading, ready, draining, gone.
//!
//! The methods of [`Membership`] decide from the state of `Membership` alone. `worker_events` carries the decisions to
//! requests and metrics.

use std::sync::Arc;

use tutti_proto::{
    Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
    declaration::WalkId,
};
use tutti_runtime::{Error, ErrorKind, exit};

use super::{
    Limits, Link, RETRY_AFTER, Served,
    groups::GroupFormation,
    model::ServedModel,
    ranks::{Departure, Manner, Ranks},
    roles::GroupRole,
    topology::Replica,
    workers::{Joining, Worker, Workers},
};

/// State of a spawned process in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The process has not joined yet.
    Awaited,
    /// The process has joined, and its stream is open.
    Here,
    /// The process's stream has ended.
    Left,
    /// The process has been taken for dead, and its messages are dropped.
    Fenced,
}

/// The end of a spawned process.
#[derive(Clone, Debug)]
pub struct Exit {
    /// The exit status in words.
    pub status: String,
    /// The cause of the end.
    pub cause: Cause,
    /// Number of consecutive processes of this rank that ended early, up to and including this one.
    pub early_exits: u32,
}

/// The cause of the end of a spawned process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The process found its settings unusable.
    Usage,
    /// A process other than the conductor, or the kernel, killed the process.
    Killed,
    /// Any other cause.
    Other,
}

/// All workers, their ranks and groups, and the model that they serve.
#[derive(Debug)]
pub(super) struct Membership {
    pub limits: Arc<Limits>,
    pub served: Served,
    pub workers: Workers,
    pub ranks: Ranks,
    pub groups: GroupFormation,
    /// The served model, as declared by the first worker that loaded it. All other workers must declare the same model.
    pub model: Option<ServedModel>,
    /// True once all spawned workers have had the model loaded at the same time.
    pub started: bool,
    /// True once the cluster takes no new requests.
    pub draining: bool,
    /// True once the workers have been told to leave.
    pub dismissed: bool,
    /// True if spawned workers outlive a conductor, so that their processes join more than once.
    pub outlived: bool,
}

/// A worker that was removed from the cluster.
pub(super) struct Removed {
    pub worker: Worker,
    /// True if the worker was told to leave.
    pub expected: bool,
}

impl Membership {
    pub fn new(limits: Arc<Limits>, served: Served) -> Self {
        Self {
            workers: Workers::new(limits.topology.clone()),
            limits,
            served,
            ranks: Ranks::default(),
            groups: GroupFormation::default(),
            model: None,
            started: false,
            draining: false,
            dismissed: false,
            outlived: false,
        }
    }

    /// Number of workers that the conductor spawns. Their ranks are all ranks below this number.
    pub fn spawned_workers(&self) -> u32 {
        self.limits.topology.spawned_workers()
    }

    /// Adds a joining worker, and forms its TP group if the group is now complete.
    pub fn admit(&mut self, joining: Joining, link: Link, group_secret: [u8; 16]) -> Result<WorkerId, Error> {
        let (rank, pid) = (joining.rank, joining.pid);
        // While the cluster drains, workers that have died may join again: requests may be waiting for them.
        if self.dismissed {
            return Err(Error::unavailable("the conductor is shutting down"));
        }
        // Its peers have ended, so the worker would wait for them for ever.
        if self.is_given_up(rank) {
            return Err(Error::unavailable(format!("rank {rank} is given up")).with_field("rank"));
        }
        // The process takes the end of its stream for the end of this conductor. The supervisor is about to kill it.
        let left = self.ranks.get(rank).and_then(|record| record.departure);
        let is_spawned = rank.0 < self.spawned_workers();
        if self.outlived && is_spawned && left.is_some_and(|left| left.pid == pid) {
            return Err(Error::internal(format!(
                "the conductor has let go of the process {pid} of rank {rank}"
            )));
        }
        if let Some((_, worker)) = self.workers.by_rank(rank) {
            let message = format!("rank {rank} is taken by the worker with pid {}", worker.pid);
            return Err(Error::unavailable(message).with_field("rank"));
        }
        self.ranks.entry(rank).joined();
        let id = self.workers.join(joining, link);
        tracing::debug!(worker = rank.0, pid, id = id.0, "joined");
        self.form_group(rank, group_secret);
        Ok(id)
    }

    /// Removes a worker whose stream has ended or that is fenced. A fenced worker may still send messages.
    pub fn remove(&mut self, id: WorkerId, why: &str, manner: Manner) -> Option<Removed> {
        self.groups.forget(id);
        let worker = self.workers.remove(id)?;
        let (rank, pid) = (worker.rank, worker.pid);
        let drained = worker.phase == pb::WorkerPhase::Draining && manner == Manner::Left;
        let expected = self.dismissed || drained;
        let record = self.ranks.entry(rank);
        // A recorded fault was logged when it was recorded, so the worker's departure after the fault is not logged as
        // a second warning.
        if expected || (record.has_trouble() && manner == Manner::Left) {
            tracing::debug!(worker = rank.0, why, "worker left");
        } else {
            tracing::warn!(worker = rank.0, pid, why, "worker lost");
            record.observe_trouble(why.to_owned());
        }
        record.departure = Some(Departure { pid, manner });
        Some(Removed { worker, expected })
    }

    /// Tells all workers of this worker's TP group to leave after their current requests.
    pub fn drain_group_of(&mut self, id: WorkerId) {
        let Some(rank) = self.workers.get_mut(id).map(|worker| worker.rank) else { return };
        for (_, id) in self.workers.group_of(rank) {
            let Some(worker) = self.workers.get_mut(id) else { continue };
            if std::mem::replace(&mut worker.phase, pb::WorkerPhase::Draining) != pb::WorkerPhase::Draining
                && !self.workers.leaves_with_its_leader(id)
            {
                self.workers.send(id, ToWorker::Drain(pb::Drain {}));
            }
        }
    }

    /// Drains the worker of this rank and its TP group for good: spawned processes are not started again. Returns the
    /// worker's new phase.
    pub fn drain_rank(&mut self, rank: Rank) -> Result<pb::WorkerPhase, Error> {
        let id = self.workers.by_rank(rank).map(|(id, _)| id);
        let spawned = rank.0 < self.spawned_workers();
        if id.is_none() && !spawned {
            let error = Error::new(ErrorKind::NotFound, format!("there is no worker {rank}"));
            return Err(error.with_field("worker"));
        }
        // Only spawned ranks are marked as drained, because a worker that joined by hand may join again under the same
        // rank.
        if spawned {
            let group = self.limits.topology.replica_of(rank);
            group.into_iter().flat_map(Replica::ranks).for_each(|rank| self.ranks.entry(rank).drained = true);
        }
        tracing::info!(worker = rank.0, "draining the worker");
        let Some(id) = id else { return Ok(pb::WorkerPhase::Drained) };
        self.drain_group_of(id);
        Ok(pb::WorkerPhase::Draining)
    }

    pub fn is_drained(&self, rank: Rank) -> bool {
        self.ranks.get(rank).is_some_and(|record| record.drained)
    }

    /// True if this rank's processes are not started now, because loading the model kills them.
    pub fn is_given_up(&self, rank: Rank) -> bool {
        self.ranks.get(rank).is_some_and(|record| record.given_up)
    }

    /// State of the process `pid` that was spawned for this rank.
    pub fn presence(&self, rank: Rank, pid: u32) -> Presence {
        let departure = self.ranks.get(rank).and_then(|record| record.departure);
        match (self.workers.by_rank(rank), departure.filter(|departure| departure.pid == pid)) {
            (Some((_, worker)), _) if worker.pid == pid => Presence::Here,
            (_, Some(Departure { manner: Manner::Fenced, .. })) => Presence::Fenced,
            (_, Some(Departure { manner: Manner::Left, .. })) => Presence::Left,
            (_, None) => Presence::Awaited,
        }
    }

    /// True if this error of a spawned worker ends the cluster: the cluster has not started yet, and the worker would
    /// fail in the same way after a restart.
    pub fn ends_start(&self, rank: Rank, error: &Error) -> bool {
        let useless = exit::code(error) == exit::USAGE;
        useless && !self.started && rank.0 < self.spawned_workers()
    }

    /// Refuses a request that no worker can run now, or that exceeds the limit on requests in flight. `encoders` are
    /// the walks that encode the request's media; empty for a request of text.
    pub fn check_admission(&self, encoders: &[WalkId], in_flight: usize) -> Result<(), Error> {
        let encodes = encoders.is_empty() || self.workers.ready_for(GroupRole::Encode).next().is_some();
        let (Some(limit), true, false) = (self.requests_limit(), encodes, self.draining) else {
            return Err(Error::unavailable(self.why_not_ready()));
        };
        if in_flight >= limit {
            let message = format!("{in_flight} requests are in flight, the limit is {limit}");
            return Err(Error::overloaded(message, RETRY_AFTER));
        }
        Ok(())
    }

    /// Maximum number of requests in flight, running and queued; `None` if no worker runs requests.
    pub fn requests_limit(&self) -> Option<usize> {
        self.running_limits().map(|running| running + self.limits.faults.max_queued_requests as usize)
    }

    /// Sum of the numbers of requests that the ready replicas run at a time; `None` if no replica generates output.
    /// Replicas that only prefill add nothing. Replicas that only decode count only while a replica that prefills is
    /// ready.
    fn running_limits(&self) -> Option<usize> {
        let limit = |(_, worker): (_, &Worker)| worker.running_limit(self.limits.engine.running_limit());
        let prefills = self.workers.ready_for(GroupRole::Prefill).next().is_some();
        let decode = self.workers.ready_for(GroupRole::Decode).filter(|_| prefills).map(limit);
        self.workers.ready_for(GroupRole::Whole).map(limit).chain(decode).reduce(|sum, limit| sum + limit)
    }

    /// True if no request can run, now or later: no worker runs whole requests, and prefills or decodes have no worker
    /// either. See [`Self::is_hopeless_for`].
    pub fn is_hopeless(&self) -> bool {
        let hopeless = |role| self.is_hopeless_for(role);
        hopeless(GroupRole::Whole) && (hopeless(GroupRole::Prefill) || hopeless(GroupRole::Decode))
    }

    /// True if no worker of this role takes requests, now or later: all present workers of the role are draining, and
    /// no further worker is expected.
    pub fn is_hopeless_for(&self, role: GroupRole) -> bool {
        let has_role = |rank| self.workers.duties(rank).include(role);
        let here = self.workers.iter().any(|(_, worker)| {
            has_role(worker.rank) && worker.link.is_some() && worker.phase != pb::WorkerPhase::Draining
        });
        let mut spawned = (0..self.spawned_workers()).map(Rank).filter(|rank| has_role(*rank));
        !here && spawned.all(|rank| self.ranks.get(rank).is_some_and(|record| record.is_hopeless()))
    }
}
