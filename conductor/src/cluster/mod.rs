//! The conductor's heart: all requests and all workers behind one short lock.
//!
//! Every event (a submit, a report, a worker's death) takes the lock once, moves state machines, and hands messages to
//! bounded queues without waiting; nothing here awaits or does I/O. One step report of a worker is one event, however
//! many rows it carries.

mod groups;
mod requests;
mod status;
mod workers;

use std::{collections::BTreeMap, fmt, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tutti_proto::{
    Rank, RequestId, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
    walks::ModelDeclaration,
};
use tutti_runtime::{Error, ErrorKind, health::Health, metrics::Metrics};

pub use self::workers::Link;
use self::workers::Workers;
use crate::{
    backend::random_bytes,
    metrics::ConductorMetrics,
    request::{GraphPlan, Request, text_walks, worker_graphs},
};

/// Ranks are places in a cluster of at most this many workers.
const MAX_WORKERS: u32 = 1024;

/// The bounds a cluster works under.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Ranks of a TP group: neighbours, of which the lowest leads and alone is given requests. 1 where each worker holds
    /// the whole model.
    pub tp: u32,
    /// Worker processes that the conductor spawns, ranks 0 and on; all must have been ready once before `/ready` is.
    pub spawned_workers: u32,
    /// Requests that one worker runs at a time.
    pub max_running_requests: u32,
    /// Requests beyond those that may wait at the workers.
    pub max_queued_requests: u32,
    /// The most tokens of a request, prompt and output together, where that is fewer than the model's own limit.
    pub max_model_len: Option<u32>,
}

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
    next_request: u64,
    /// Set by the first worker to be ready; the others must declare the same.
    model: Option<ServedModel>,
    /// Why the worker of a rank is not there, for operators.
    troubles: BTreeMap<Rank, Trouble>,
    /// The process of each rank whose stream has ended and that has not come back.
    left: BTreeMap<Rank, u32>,
    /// Groups that have been formed so far, each at a place of its own.
    groups_formed: u64,
    /// The secrets of groups whose leaders have not said yet where they listen.
    forming: BTreeMap<WorkerId, [u8; 16]>,
    /// Whether all spawned workers have been ready at once.
    started: bool,
    draining: bool,
}

/// What is wrong with a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Trouble {
    /// In its own words, or in those that it was turned away with.
    Told(String),
    /// As seen from outside: the latest sign of it says most.
    Seen(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Told(why) | Self::Seen(why)) = self;
        f.write_str(why)
    }
}

impl State {
    /// A sign that the worker is gone. What it said itself says more.
    fn see_trouble(&mut self, rank: Rank, why: String) {
        if !matches!(self.troubles.get(&rank), Some(Trouble::Told(_))) {
            self.troubles.insert(rank, Trouble::Seen(why));
        }
    }
}

#[derive(Debug)]
struct ServedModel {
    /// Its `max_request_tokens` is the smallest of the ready workers'.
    description: Arc<pb::ModelDescription>,
    /// The worker graphs of a text request.
    graphs: Vec<GraphPlan>,
}

impl Cluster {
    /// A cluster without workers.
    pub fn new(limits: Limits, served: Served, metrics: &Metrics, health: Health) -> Self {
        let workers = Workers::in_groups_of(limits.tp);
        let cluster = Self {
            state: Mutex::new(State { workers, ..State::default() }),
            meeting_places: std::env::temp_dir(),
            metrics: ConductorMetrics::new(metrics),
            limits,
            health,
            served,
            in_flight: watch::Sender::new(0),
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

    /// How many messages a worker's link must hold so that it cannot be full: a launch and a cancel for each request
    /// that can be in flight, and a few that come once. Room in a link costs nothing until it is used.
    pub fn link_capacity(&self) -> usize {
        let Limits { max_running_requests, max_queued_requests, .. } = self.limits;
        2 * (max_running_requests as usize * MAX_WORKERS as usize + max_queued_requests as usize) + 16
    }

    /// Takes in a worker. Its `link` must hold [`Cluster::link_capacity`] messages.
    pub fn join(&self, joining: Joining, link: Link) -> Result<WorkerId, Error> {
        let Joining { rank, pid, host } = joining;
        if rank.0 >= MAX_WORKERS {
            return Err(Error::invalid("rank", format!("is {rank}, the limit is {}", MAX_WORKERS - 1)));
        }
        // Before the lock, since it is read from a file.
        let secret = if self.limits.tp > 1 { random_bytes()? } else { [0; 16] };
        let mut state = self.state.lock();
        if state.draining {
            return Err(Error::unavailable("the conductor is draining"));
        }
        if let Some((_, worker)) = state.workers.by_rank(rank) {
            let message = format!("rank {rank} is taken by the worker with pid {}", worker.pid);
            return Err(Error::unavailable(message).with_field("rank"));
        }
        state.troubles.remove(&rank);
        state.left.remove(&rank);
        let id = state.workers.join(rank, pid, host, link);
        tracing::debug!(worker = %rank, pid, %id, "joined");
        self.form_group(&mut state, rank, secret);
        Ok(id)
    }

    /// Takes a worker's loading into account.
    pub fn on_loading(&self, id: WorkerId) {
        if let Some(worker) = self.state.lock().workers.get_mut(id) {
            worker.phase = pb::WorkerPhase::Loading;
        }
    }

    /// The worker takes requests from here on, unless it serves another model than the rest.
    pub fn on_ready(&self, id: WorkerId, ready: pb::Ready) {
        let mut state = self.state.lock();
        let outcome = self.take_model(&mut state, ready.model.unwrap_or_default());
        let Some(worker) = state.workers.get_mut(id) else { return };
        let rank = worker.rank;
        match outcome {
            Ok(model) => {
                worker.phase = pb::WorkerPhase::Ready;
                worker.model = Some(model);
                worker.load.kv_pages_total = ready.kv_pages_total;
                self.metrics.load(rank, &worker.load);
                let (weights, kv) = (ready.weight_bytes, ready.kv_bytes);
                tracing::info!(worker = %rank, weight_bytes = weights, kv_bytes = kv, "ready");
            }
            Err(error) => {
                worker.link = None;
                state.troubles.insert(rank, Trouble::Told(error.to_string()));
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
        let Some(worker) = state.workers.get_mut(id) else { return };
        let rank = worker.rank;
        state.troubles.insert(rank, Trouble::Told(error.to_string()));
        if !self.ends_start(&state, rank, &error) {
            tracing::error!(worker = %rank, %error, "could not load");
        }
        self.refresh_health(&mut state);
    }

    /// A spawned worker ended before it could say why.
    pub fn on_exit(&self, rank: Rank, status: &str, usage: bool) {
        let mut state = self.state.lock();
        if state.draining {
            return;
        }
        state.see_trouble(rank, format!("its process ended: {status}"));
        if usage {
            let message = format!("worker {rank} refused its settings ({status})");
            self.ends_start(&state, rank, &Error::new(ErrorKind::InvalidArgument, message));
        }
        self.refresh_health(&mut state);
    }

    /// Whether a spawned worker's error ends the cluster: at its start, where trying again unchanged is useless. The
    /// first such error is told; others are most likely the same.
    fn ends_start(&self, state: &State, rank: Rank, error: &Error) -> bool {
        let useless = tutti_runtime::exit::code(error) == tutti_runtime::exit::USAGE;
        let ends = useless && !state.started && rank.0 < self.limits.spawned_workers;
        if ends {
            self.fatal.send_if_modified(|fatal| fatal.is_none() && fatal.replace(error.clone()).is_none());
        }
        ends
    }

    /// The worker's stream has ended: all it held is lost, and requests on it fail.
    pub fn on_lost(&self, id: WorkerId, why: &str) {
        let mut state = self.state.lock();
        let Some(rank) = state.workers.get_mut(id).map(|worker| worker.rank) else { return };
        self.lose(&mut state, id, why);
        self.disband(&mut state, rank);
        self.refresh_health(&mut state);
    }

    fn lose(&self, state: &mut State, id: WorkerId, why: &str) {
        state.forming.remove(&id);
        let Some(worker) = state.workers.remove(id) else { return };
        let rank = worker.rank;
        // One that has said why it cannot stay has been heard.
        if state.draining || state.troubles.contains_key(&rank) {
            tracing::debug!(worker = %rank, why, "left");
        } else {
            tracing::warn!(worker = %rank, pid = worker.pid, why, "lost");
            state.see_trouble(rank, why.to_owned());
        }
        state.left.insert(rank, worker.pid);
        self.metrics.gone(rank);
        self.fail_requests_of(state, id, &format!("worker {rank} was lost while it ran the request"));
    }

    /// A worker's own count of what it does.
    pub fn on_heartbeat(&self, id: WorkerId, load: pb::WorkerLoad) {
        if let Some(worker) = self.state.lock().workers.get_mut(id) {
            self.metrics.load(worker.rank, &load);
            worker.load = load;
        }
    }

    /// What is known of the process that was spawned for this rank.
    pub fn presence(&self, rank: Rank, pid: u32) -> Presence {
        let state = self.state.lock();
        match state.workers.by_rank(rank) {
            Some((_, worker)) if worker.pid == pid => Presence::Here,
            _ if state.left.get(&rank) == Some(&pid) => Presence::Left,
            _ => Presence::Awaited,
        }
    }

    /// A worker's process was started again.
    pub fn on_restart(&self, rank: Rank) {
        self.metrics.restarted(rank);
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

    /// Fills in what the conductor knows better, and holds later workers to the first one's declaration.
    fn take_model(
        &self,
        state: &mut State,
        mut description: pb::ModelDescription,
    ) -> Result<pb::ModelDescription, Error> {
        description.served_name.clone_from(&self.served.name);
        description.has_tokenizer = self.served.has_tokenizer;
        if let Some(asked) = self.limits.max_model_len {
            let most = description.max_context_tokens;
            if asked > most {
                let message = format!("is {asked}, but the model's context holds {most} tokens");
                return Err(Error::invalid("max_model_len", message));
            }
            description.max_context_tokens = asked;
        }
        match &state.model {
            Some(first) => {
                let expected = pb::ModelDescription {
                    max_request_tokens: description.max_request_tokens,
                    ..first.description.as_ref().clone()
                };
                if expected != description {
                    return Err(Error::internal("it serves another model than the workers before it"));
                }
            }
            None => {
                let declaration = description.declaration.clone().unwrap_or_default();
                let declaration = ModelDeclaration::try_from(declaration).map_err(|e| {
                    Error::internal(format!("its model's declaration does not hold together: {e}"))
                })?;
                // Every worker serves every node: one group, one graph.
                let graphs = worker_graphs(&text_walks(&declaration)?, |_| ());
                state.model = Some(ServedModel { description: Arc::new(description.clone()), graphs });
            }
        }
        Ok(description)
    }
}

/// How long a client that was turned away for load should stay away.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A new link's two ends.
pub fn link(capacity: usize) -> (Link, mpsc::Receiver<Result<pb::ConductorMessage, tonic::Status>>) {
    mpsc::channel(capacity)
}
