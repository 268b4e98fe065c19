//! A cluster whose workers send any messages, for fuzzers.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;
use tutti_proto::{
    GraphKey, Rank, WorkerId,
    cluster::v1::{
        self as pb, conductor_message::Message as ToWorker, worker_message::Message as FromWorker,
    },
};
use tutti_runtime::{health::Health, metrics::Metrics, progress::LoadDisplay};
use tutti_settings::{EngineSettings, FaultSettings, MAX_RANKS, ModelSettings};

use super::{Cluster, GroupSpec, Joining, Limits, Served, Topology, link};
use crate::{request::Origin, submission::Submission, worker_service::Reader};

/// Number of workers of the cluster.
const RANKS: u32 = 3;

/// An event of a cluster.
#[derive(Clone, Debug)]
pub enum Event {
    /// A worker joins with this rank.
    Join(u32),
    /// The worker of this rank sends a message.
    Says(u32, FromWorker),
    /// The worker of this rank sends a message about a graph that it has launched. The second field is the graph's age:
    /// 0 is the latest graph.
    SaysOfGraph(u32, u8, FromWorker),
    /// The stream of this rank's worker ends.
    Leaves(u32),
    /// A client submits a request that continues these output tokens.
    Submit(pb::RequestSpec, Vec<u32>),
    /// The client with this index, modulo the number of clients, leaves.
    Cancel(u8),
    /// All clients read their output.
    Read,
}

struct Worker {
    id: WorkerId,
    inbox: mpsc::Receiver<Result<pb::ConductorMessage, Status>>,
    launched: Vec<(GraphKey, u32)>,
}

/// A client and the part of its output that it has read.
struct Client {
    submission: Submission,
    first: u32,
    tokens: u32,
    most: u32,
    ended: bool,
}

/// Plays events on a cluster whose topology `shape` selects. Checks that each output has its tokens in order and ends
/// once, and that no request or worker is left after all clients and workers have gone.
pub fn play(shape: u8, events: Vec<Event>) {
    let cluster = cluster(shape);
    let mut workers = BTreeMap::new();
    let mut clients: Vec<Client> = Vec::new();
    for event in events {
        match event {
            Event::Join(rank) => join(&cluster, &mut workers, rank),
            Event::Says(rank, message) => says(&cluster, &mut workers, rank, message),
            Event::SaysOfGraph(rank, back, mut message) => {
                if let Some(worker) = workers.get_mut(&rank) {
                    worker.hear();
                    worker.direct(back, &mut message);
                }
                says(&cluster, &mut workers, rank, message);
            }
            Event::Leaves(rank) => {
                if let Some(worker) = workers.remove(&rank) {
                    cluster.on_lost(worker.id, "it left");
                }
            }
            Event::Submit(spec, generated) => {
                let most = spec.stopping.as_ref().map_or(0, |stopping| stopping.max_tokens);
                let first = generated.len() as u32;
                if let Ok(submission) = cluster.resume(spec, None, generated, Origin::default()) {
                    clients.push(Client { submission, first, tokens: 0, most, ended: false });
                }
            }
            Event::Cancel(index) if !clients.is_empty() => {
                clients.swap_remove(usize::from(index) % clients.len());
            }
            Event::Cancel(_) => {}
            Event::Read => clients.iter_mut().for_each(Client::read),
        }
    }
    clients.iter_mut().for_each(Client::read);
    cluster.status();
    cluster.begin_drain();
    drop(clients);
    for worker in workers.into_values() {
        cluster.on_lost(worker.id, "the end");
    }
    let state = cluster.state.lock();
    assert!(
        state.requests.len() == 0 && !state.requests.any_waiting(),
        "requests are left: {:?}",
        state.requests
    );
    assert!(state.membership.workers.iter().next().is_none(), "workers are left");
}

fn cluster(shape: u8) -> Arc<Cluster> {
    let group = |name: &str, walks: &[&str], tp, replicas| {
        let walks = (!walks.is_empty()).then(|| walks.iter().map(|walk| (*walk).to_owned()).collect());
        GroupSpec { name: name.into(), nodes: None, walks, tp, replicas, spawned: true }
    };
    let topology = match shape % 4 {
        0 => Topology::all_in_one(RANKS, 1),
        1 => Topology::new(vec![group("p", &["prefill"], 1, 1), group("d", &["decode"], 1, RANKS - 1)]),
        2 => Topology::new(vec![
            group("all", &["prefill", "decode"], 1, RANKS - 1),
            group("e", &["encode"], 1, 1),
        ]),
        _ => Topology::new(vec![group("pair", &[], 2, 1), group("one", &[], 1, 1)]),
    };
    let limits = Limits {
        topology,
        model: ModelSettings::default(),
        engine: EngineSettings { max_running_requests: Some(4), ..EngineSettings::default() },
        faults: FaultSettings { max_queued_requests: 4, max_replays: 2, ..FaultSettings::default() },
    };
    Arc::new(Cluster::new(limits, Served::default(), &Metrics::default(), Health::default()))
}

fn join(cluster: &Cluster, workers: &mut BTreeMap<u32, Worker>, rank: u32) {
    let (link, inbox) = link(cluster.limits().link_capacity());
    let joining =
        Joining { rank: Rank(rank), pid: 1, host: Ipv4Addr::LOCALHOST.into(), meeting_path: String::new() };
    match cluster.join(joining, link) {
        Ok(id) => {
            assert!(rank < MAX_RANKS, "rank {rank} has joined");
            // `workers` may still hold an earlier worker of this rank that the cluster has taken for dead.
            workers.insert(rank, Worker { id, inbox, launched: Vec::new() });
        }
        Err(_) => assert!(rank >= RANKS || workers.contains_key(&rank), "rank {rank} may not join"),
    }
}

fn says(cluster: &Arc<Cluster>, workers: &mut BTreeMap<u32, Worker>, rank: u32, message: FromWorker) {
    let Some(worker) = workers.get_mut(&rank) else { return };
    worker.hear();
    let loading = LoadDisplay::new(false);
    let reader = Reader { cluster: cluster.clone(), loading, worker: worker.id, rank: Rank(rank) };
    reader.on_message(message);
}

impl Worker {
    /// Reads the conductor's messages and notes the graphs that they launch.
    fn hear(&mut self) {
        while let Ok(Ok(pb::ConductorMessage { message })) = self.inbox.try_recv() {
            if let Some(ToWorker::Launch(launch)) = message {
                let key = GraphKey::from(launch.key.expect("a launch has a key"));
                assert!(launch.spec.is_some(), "a launch without a request");
                self.launched.push((key, launch.generated.len() as u32));
            }
        }
    }

    /// Rewrites a message so that it names a graph of this worker, and so that its tokens continue the graph's output.
    fn direct(&mut self, back: u8, message: &mut FromWorker) {
        let count = self.launched.len();
        let Some(index) = count.checked_sub(1 + usize::from(back) % count.max(1)) else { return };
        let (key, next) = &mut self.launched[index];
        match message {
            FromWorker::StepReport(report) => {
                for row in &mut report.rows {
                    row.key = Some((*key).into());
                    for token in &mut row.tokens {
                        token.index = *next;
                        *next += 1;
                    }
                }
                for completion in &mut report.completions {
                    completion.key = Some((*key).into());
                }
            }
            FromWorker::Reserved(reserved) => reserved.key = Some((*key).into()),
            _ => {}
        }
    }
}

impl Client {
    fn read(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(event)) = Pin::new(&mut self.submission).poll_next(&mut context) {
            assert!(!self.ended, "something follows the end");
            let Ok(event) = event else {
                self.ended = true;
                continue;
            };
            for token in event.tokens {
                assert_eq!(token.index, self.first + self.tokens, "tokens out of order");
                self.tokens += 1;
            }
            assert!(self.first + self.tokens <= self.most, "more tokens than max_tokens {}", self.most);
            self.ended = event.finished.is_some();
        }
    }
}
