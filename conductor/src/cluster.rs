//! All requests and all workers of a conductor, behind one lock that is never held for long.
//!
//! The handler of every event (a submit, a report, a worker's death) takes the lock once, advances state machines, and
//! puts messages into bounded queues without waiting. No code here awaits or does I/O under the lock. One step report
//! of a worker is one event, however many requests it concerns.
//!
//! `State` has three parts, whose methods make the decisions: `Membership` (workers, ranks, groups, the model),
//! `Requests` and `Prefixes`. A fourth part, `Recent`, only records events for operators' pages. [`Cluster`] holds the
//! lock, and carries decisions from one part to another, to metrics and to health.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod groups;
mod launches;
mod membership;
mod model;
mod moves;
mod pace;
mod placement;
mod prefixes;
mod ranks;
mod recent;
mod request_events;
mod requests;
mod roles;
mod slow;
mod standing;
mod status;
mod topology;
mod watchdog;
mod worker_events;
mod workers;

#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    Error,
    health::Health,
    metrics::Metrics,
    output_room::{OutputRoom, OutputRoomMetrics},
};
use tutti_settings::{EngineSettings, FaultSettings, MAX_RANKS, ModelSettings};

use self::{membership::Membership, prefixes::Prefixes, recent::Recent, requests::Requests};
pub use self::{
    membership::{Cause, Exit, Presence},
    topology::{GroupSpec, Topology},
    workers::{Joining, Link},
};
use crate::{
    metrics::ConductorMetrics,
    request::{MAX_MOVES, media::Digest},
};

/// Ids of requests that one of several conductors of the same workers can give. So late messages about a request of the
/// conductor before are never taken for those of a new one.
const IDS_OF_A_LIFE: u64 = 1_000_000_000;

/// Time after which a client that was refused for load may try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The topology and the limits of a cluster.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Groups of workers. The cluster is not ready until all workers that the conductor spawns have loaded the model.
    pub topology: Topology,
    /// The operator's limit on a request's tokens. The model's own limit applies if it is lower.
    pub model: ModelSettings,
    /// The maximum number of requests that each worker runs at a time, and whether workers have a prefix cache.
    pub engine: EngineSettings,
    /// The maximum number of queued requests, the maximum number of replays, and the times after which a silent or
    /// hanging worker is taken for dead.
    pub faults: FaultSettings,
}

impl Limits {
    /// Number of messages that a worker's link must hold so that the link never fills: one launch and one cancel for
    /// each try of each request in flight. A request has one first try, one for each time that it moves before it
    /// begins, and at most `max_replays` more for each of three causes: lost workers, failed hand-overs, and reserved
    /// room that no ready worker can fill. A few further messages are sent once. Unused capacity costs nothing.
    pub fn link_capacity(&self) -> usize {
        let Self { engine, faults, .. } = self;
        2 * (1 + MAX_MOVES as usize + 3 * faults.max_replays as usize)
            * (engine.running_limit() * MAX_RANKS as usize + faults.max_queued_requests as usize)
            + 16
    }

    /// Refuses a rank that belongs to no group.
    fn check_rank(&self, rank: Rank) -> Result<(), Error> {
        let ranks = self.topology.ranks().min(MAX_RANKS);
        if rank.0 >= ranks {
            return Err(Error::invalid("rank", format!("is {rank}, the limit is {}", ranks - 1)));
        }
        Ok(())
    }
}

/// The conductor's own knowledge of the model, before any worker has loaded it.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// The model's names, which clients use in requests. The first is the one in answers.
    pub names: Vec<String>,
    /// True if the checkpoint has a tokenizer.
    pub has_tokenizer: bool,
}

/// All requests and all workers of one conductor.
#[derive(Debug)]
pub struct Cluster {
    state: Mutex<State>,
    limits: Arc<Limits>,
    metrics: ConductorMetrics,
    /// The room for output that waits for clients.
    unread: OutputRoom,
    health: Health,
    /// Number of requests that have not ended or whose data a worker may still hold.
    in_flight: watch::Sender<usize>,
    /// Computes the digests by which equal media of different requests are found.
    digest: Digest,
    /// The error that ends the cluster. It is set at most once, by a worker's fault that a restart of the worker would
    /// not mend.
    fatal: watch::Sender<Option<Error>>,
    /// Time of the start, in microseconds since the Unix epoch.
    started_us: u64,
}

#[derive(Debug)]
struct State {
    membership: Membership,
    requests: Requests,
    prefixes: Prefixes,
    recent: Recent,
}

impl Cluster {
    /// Creates a cluster without workers.
    pub fn new(limits: Limits, served: Served, metrics: &Metrics, health: Health) -> Self {
        let limits = Arc::new(limits);
        let prefixes = if limits.engine.no_prefix_cache { Prefixes::default() } else { Prefixes::indexed() };
        let membership = Membership::new(limits.clone(), served);
        let cluster = Self {
            state: Mutex::new(State {
                membership,
                prefixes,
                requests: Requests::default(),
                recent: Recent::default(),
            }),
            metrics: ConductorMetrics::new(metrics),
            unread: OutputRoom::new(
                limits.faults.max_unread_bytes,
                metrics.register(OutputRoomMetrics::register),
            ),
            limits,
            health,
            in_flight: watch::Sender::new(0),
            digest: Digest::default(),
            fatal: watch::Sender::new(None),
            started_us: recent::unix_us(),
        };
        cluster.refresh_health(&mut cluster.state.lock());
        cluster
    }

    /// Sets the directory in which TP groups meet.
    #[must_use]
    pub fn meeting_in(mut self, directory: PathBuf) -> Self {
        self.state.get_mut().membership.groups.meet_in(directory);
        self
    }

    /// Lets spawned workers outlive this conductor. They have had `life` conductors before it.
    #[must_use]
    pub fn outlived(mut self, life: u64) -> Self {
        let state = self.state.get_mut();
        state.membership.outlived = true;
        state.requests.begin_after(life.saturating_mul(IDS_OF_A_LIFE));
        self
    }

    /// The cluster's topology and limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Stops taking requests. Requests in flight continue.
    pub fn begin_drain(&self) {
        let mut state = self.state.lock();
        state.membership.draining = true;
        self.refresh_health(&mut state);
    }

    /// True if no request is in flight.
    pub fn is_idle(&self) -> bool {
        *self.in_flight.borrow() == 0
    }

    /// Completes once no request is in flight.
    pub async fn idle(&self) {
        // Waiting fails only if the sender is dropped, and `self` holds the sender.
        let _ = self.in_flight.subscribe().wait_for(|requests| *requests == 0).await;
    }

    /// Tells all workers to leave, and fails the requests that still run.
    pub fn dismiss(&self) {
        let mut state = self.state.lock();
        state.membership.dismissed = true;
        let ids = state.requests.ids();
        self.fail(&mut state, ids, &Error::unavailable("the cluster is shutting down"));
        state.membership.workers.dismiss();
    }

    /// Completes with the error that ends the cluster. Never completes if there is no such error.
    pub async fn fatal(&self) -> Error {
        let mut fatal = self.fatal.subscribe();
        loop {
            if let Some(error) = fatal.borrow_and_update().clone() {
                return error;
            }
            if fatal.changed().await.is_err() {
                // This line is not reached: waiting fails only if the sender is dropped, and `self` holds the sender.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Creates the two ends of a link to a worker.
pub fn link(capacity: usize) -> (Link, mpsc::Receiver<Result<pb::ConductorMessage, tonic::Status>>) {
    mpsc::channel(capacity)
}
