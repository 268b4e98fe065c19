//! The conductor's heart: all requests and all workers behind one short lock.
//!
//! Every event (a submit, a report, a worker's death) takes the lock once, moves state machines, and hands messages to
//! bounded queues without waiting; nothing here awaits or does I/O. One step report of a worker is one event, however
//! many rows it carries.

mod groups;
mod launches;
mod membership;
mod model;
mod placement;
mod prefixes;
mod ranks;
mod requests;
mod roles;
mod status;
mod topology;
mod watchdog;
mod workers;

#[cfg(test)]
mod properties;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tutti_proto::{
    RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
};
use tutti_runtime::{Error, health::Health, metrics::Metrics};

pub use self::{
    membership::{Exit, Joining, Presence},
    topology::{GroupSpec, Topology},
    workers::Link,
};
use self::{model::ServedModel, prefixes::Prefixes, ranks::Ranks, workers::Workers};
use crate::{
    metrics::ConductorMetrics,
    request::{Request, media::Digest},
};

/// Ranks are places in a cluster of at most this many workers.
pub const MAX_WORKERS: u32 = 1024;

/// The bounds a cluster works under.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Who runs what. All workers that the conductor spawns must have been ready once before `/ready` is.
    pub topology: Topology,
    /// Requests that one worker runs at a time.
    pub max_running_requests: u32,
    /// Requests beyond those that may wait at the workers.
    pub max_queued_requests: u32,
    /// The most tokens of a request, prompt and output together, where that is fewer than the model's own limit.
    pub max_model_len: Option<u32>,
    /// Whether workers keep what they computed of prompts, so that it matters who has had which.
    pub prefix_cache: bool,
    /// How often a request whose worker died is tried again, and one that could not be handed over.
    pub max_replays: u32,
    /// How long the two sides of a hand-over may keep each other waiting.
    pub transfer_timeout: Duration,
    /// A worker that says nothing for longer is taken for dead.
    pub heartbeat_timeout: Duration,
    /// A worker that has work and makes no step for longer is taken for dead.
    pub hang_timeout: Duration,
}

/// All requests and all workers of one conductor.
#[derive(Debug)]
pub struct Cluster {
    state: Mutex<State>,
    /// Where the ranks of TP groups meet.
    meeting_places: PathBuf,
    limits: Limits,
    metrics: ConductorMetrics,
    health: Health,
    /// The name clients use, and whether there is a tokenizer: what the conductor knows of the model before any worker.
    served: Served,
    /// Requests that some worker may still hold something of.
    in_flight: watch::Sender<usize>,
    /// Tells requests' media apart.
    digest: Digest,
    /// Set once, where starting again unchanged would fail again.
    fatal: watch::Sender<Option<Error>>,
}

/// What the conductor knows of the model before any worker has loaded it.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// The name clients use.
    pub name: String,
    /// Whether the checkpoint has a tokenizer.
    pub has_tokenizer: bool,
}

#[derive(Debug, Default)]
struct State {
    workers: Workers,
    requests: BTreeMap<RequestId, Request>,
    /// Those that no worker could take when they needed one.
    waiting: BTreeSet<RequestId>,
    prefixes: Prefixes,
    next_request: u64,
    /// Set by the first worker to be ready; the others must declare the same.
    model: Option<ServedModel>,
    ranks: Ranks,
    /// Groups that have been formed so far, each at a place of its own.
    groups_formed: u64,
    /// The secrets of groups whose leaders have not said yet where they listen.
    forming: BTreeMap<WorkerId, [u8; 16]>,
    /// Whether all spawned workers have been ready at once.
    started: bool,
    draining: bool,
    /// The workers have been told to leave.
    dismissed: bool,
}

impl Cluster {
    /// A cluster without workers.
    pub fn new(limits: Limits, served: Served, metrics: &Metrics, health: Health) -> Self {
        let workers = Workers::of(limits.topology.clone());
        let prefixes = Prefixes::new(limits.prefix_cache);
        let cluster = Self {
            state: Mutex::new(State { workers, prefixes, ..State::default() }),
            meeting_places: std::env::temp_dir(),
            metrics: ConductorMetrics::new(metrics),
            limits,
            health,
            served,
            in_flight: watch::Sender::new(0),
            digest: Digest::default(),
            fatal: watch::Sender::new(None),
        };
        cluster.refresh_health(&mut cluster.state.lock());
        cluster
    }

    /// The same cluster, whose TP groups meet in this directory.
    #[must_use]
    pub fn meeting_in(self, meeting_places: PathBuf) -> Self {
        Self { meeting_places, ..self }
    }

    /// How many messages a worker's link must hold so that it cannot be full: a launch and a cancel for each try of each
    /// graph of each request that can be in flight, and a few that come once. Tries are lost with workers or in hand-overs, and as often
    /// again room is held for a prefill that nobody is there to do. Room in a link costs nothing until it is used.
    pub fn link_capacity(&self) -> usize {
        let Limits { max_running_requests, max_queued_requests, max_replays, .. } = self.limits;
        2 * (1 + 3 * max_replays as usize)
            * (max_running_requests as usize * MAX_WORKERS as usize + max_queued_requests as usize)
            + 16
    }

    /// Ranks below this belong to workers that the conductor spawns.
    pub(crate) fn spawned_workers(&self) -> u32 {
        self.limits.topology.spawned_workers()
    }

    /// Stops taking requests; those in flight go on.
    pub fn begin_drain(&self) {
        let mut state = self.state.lock();
        state.draining = true;
        self.refresh_health(&mut state);
    }

    /// Completes once nothing is in flight.
    pub async fn idle(&self) {
        // The sender lives in self, so this cannot fail while self is borrowed.
        let _ = self.in_flight.subscribe().wait_for(|requests| *requests == 0).await;
    }

    /// Tells all workers to leave, failing what still runs.
    pub fn dismiss(&self) {
        let mut state = self.state.lock();
        state.dismissed = true;
        self.fail_all(&mut state, "the cluster is shutting down");
        let ids: Vec<WorkerId> = state.workers.iter().map(|(id, _)| id).collect();
        for id in ids {
            if !state.workers.leaves_with_its_leader(id) {
                state.workers.send(id, ToWorker::Drain(pb::Drain {}));
            }
            if let Some(worker) = state.workers.get_mut(id) {
                worker.phase = pb::WorkerPhase::Draining;
            }
        }
    }

    /// Completes with the error that ends the cluster, if one ever does.
    pub async fn fatal(&self) -> Error {
        let mut fatal = self.fatal.subscribe();
        loop {
            if let Some(error) = fatal.borrow_and_update().clone() {
                return error;
            }
            if fatal.changed().await.is_err() {
                // Cannot happen while self, which holds the sender, is borrowed.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// How long a client that was turned away for load should stay away.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A new link's two ends.
pub fn link(capacity: usize) -> (Link, mpsc::Receiver<Result<pb::ConductorMessage, tonic::Status>>) {
    mpsc::channel(capacity)
}
