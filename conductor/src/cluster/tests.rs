//! The whole cluster, colocated and disaggregated, while workers die at random. Every request ends once, with all of
//! its tokens in order. No request stays booked or waiting.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use proptest::prelude::*;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tonic::Status;
use tutti_proto::{
    GraphKey, Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
    declaration::{ModelDeclaration, NodeId, Walk, WalkId, WalkKind},
};
use tutti_runtime::{
    Error, ErrorKind,
    health::{Health, State},
    metrics::Metrics,
};
use tutti_settings::{EngineSettings, FaultSettings, ModelSettings};

use super::{Cluster, GroupSpec, Joining, Limits, Served, Topology, link};
use crate::submission::Submission;

const RANKS: u32 = 3;
const MAX_REPLAYS: u32 = 2;

#[derive(Clone, Copy, Debug)]
enum Shape {
    Colocated,
    Disaggregated,
}

fn topology(shape: Shape) -> Topology {
    let group = |walk: &str, replicas| {
        let walks = Some(vec![walk.to_owned()]);
        GroupSpec { name: walk.into(), nodes: None, walks, tp: 1, replicas, spawned: true }
    };
    match shape {
        Shape::Colocated => Topology::all_in_one(RANKS, 1),
        Shape::Disaggregated => Topology::new(vec![group("prefill", 1), group("decode", RANKS - 1)]),
    }
}

fn cluster(shape: Shape) -> Arc<Cluster> {
    cluster_with_health(shape).0
}

fn cluster_with_health(shape: Shape) -> (Arc<Cluster>, Health) {
    let limits = Limits {
        topology: topology(shape),
        model: ModelSettings::default(),
        engine: EngineSettings { max_running_requests: Some(4), ..EngineSettings::default() },
        faults: FaultSettings {
            max_queued_requests: 4,
            max_replays: MAX_REPLAYS,
            transfer_timeout: 30,
            heartbeat_timeout: 3,
            hang_timeout: 60,
            ..FaultSettings::default()
        },
    };
    let health = Health::default();
    (Arc::new(Cluster::new(limits, Served::default(), &Metrics::default(), health.clone())), health)
}

#[tokio::test]
async fn a_conductor_is_live_as_long_as_its_watchdog_works() {
    let (cluster, health) = cluster_with_health(Shape::Colocated);
    let watching = async { cluster.watch().await };
    let progress = async {
        tokio::task::yield_now().await;
        // A time at which the process counts as dead unless the watchdog gives another sign.
        let deadline = Instant::now() + Duration::from_secs(30);
        while health.live_at(deadline) != State::Ok {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = watching => {}
        () = progress => {}
    }
    // From here on, nothing polls the watchdog.
    let later = Instant::now() + Duration::from_secs(31);
    assert!(matches!(health.live_at(later), State::Not(why) if why.contains("watchdog")));
}

fn ready() -> pb::Ready {
    let batched_by = WalkId(2);
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    let walks = vec![
        walk("prefill", WalkKind::Chunkable { batched_by }),
        walk("decode", WalkKind::Decode { batched_by }),
        walk("step", WalkKind::Mixed),
    ];
    let declaration = ModelDeclaration::new(vec!["thinker".into()], walks, vec![]).unwrap();
    let model = pb::ModelDescription {
        vocab_size: 100,
        max_context_tokens: 64,
        max_request_tokens: 64,
        declaration: Some((&declaration).into()),
        ..Default::default()
    };
    pb::Ready { model: Some(model), ..Default::default() }
}

fn spec(max_tokens: u32) -> pb::RequestSpec {
    pb::RequestSpec {
        prompt: vec![1, 2, 3],
        sampling: Some(pb::SamplingParams::GREEDY),
        stopping: Some(pb::Stopping { max_tokens, ..Default::default() }),
        ..Default::default()
    }
}

/// A graph that runs on a worker.
#[derive(Clone, Copy)]
struct Running {
    epoch: u32,
    next: u32,
    total: u32,
    /// The graph that continues after this graph's first token.
    send_to: Option<GraphKey>,
    /// True until the first token has been transferred.
    receives: bool,
}

/// A fake worker that generates one token per graph per step.
struct Worker {
    id: WorkerId,
    rank: u32,
    inbox: mpsc::Receiver<Result<pb::ConductorMessage, Status>>,
    running: BTreeMap<GraphKey, Running>,
}

/// Messages of one step of a worker.
#[derive(Clone, Default)]
struct Says {
    reserved: Vec<pb::Reserved>,
    report: pb::StepReport,
    /// Transfers: the receiving graph, and this worker's graph.
    exports: Vec<(GraphKey, GraphKey)>,
}

impl Worker {
    fn hear(&mut self, says: &mut Says) {
        while let Ok(Ok(pb::ConductorMessage { message: Some(message) })) = self.inbox.try_recv() {
            match message {
                ToWorker::Launch(launch) => {
                    let key = GraphKey::from(launch.key.unwrap());
                    let receives = launch.receive.is_some();
                    if receives {
                        says.reserved.push(pb::Reserved { key: launch.key, port: 1, ..Default::default() });
                    }
                    let running = Running {
                        epoch: 0,
                        next: launch.generated.len() as u32 + u32::from(receives),
                        total: launch.spec.unwrap().stopping.unwrap().max_tokens,
                        send_to: launch.send_to.map(|to| to.key.unwrap().into()),
                        receives,
                    };
                    assert!(self.running.insert(key, running).is_none(), "{key} came twice");
                }
                ToWorker::Cancel(cancel) => {
                    let key = cancel.key.unwrap();
                    if let Some(graph) = self.running.remove(&key.into()) {
                        let outcome = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
                        says.report.completions.push(self.completion(key.into(), graph.epoch, outcome));
                    }
                }
                _ => {}
            }
        }
    }

    fn step(&mut self) -> Says {
        let mut says = Says::default();
        self.hear(&mut says);
        for (key, graph) in self.running.iter_mut().filter(|(_, graph)| !graph.receives) {
            let token = pb::SampledToken { token_id: graph.next, index: graph.next, logprob: None };
            says.report.rows.push(pb::RowReport {
                key: Some((*key).into()),
                epoch: graph.epoch,
                tokens: vec![token],
                ..Default::default()
            });
            graph.epoch += 1;
            graph.next += 1;
        }
        let done =
            |graph: &mut Running| graph.next == graph.total || (graph.send_to.is_some() && graph.epoch > 0);
        let done: Vec<_> = self.running.extract_if(.., |_, graph| !graph.receives && done(graph)).collect();
        for (key, graph) in done {
            if let Some(to) = graph.send_to.filter(|_| graph.next < graph.total) {
                says.exports.push((to, key));
                continue;
            }
            let reason = pb::FinishReason::Length.into();
            let finished = pb::Finished { reason, generated: graph.total, ..Default::default() };
            let outcome = pb::completion::Outcome::Finished(finished);
            says.report.completions.push(self.completion(key, graph.epoch, outcome));
        }
        says
    }

    fn completion(&self, key: GraphKey, epoch: u32, outcome: pb::completion::Outcome) -> pb::Completion {
        pb::Completion { key: Some(key.into()), epoch, rank: self.rank, outcome: Some(outcome) }
    }
}

/// A client and its output so far.
struct Client {
    submission: Submission,
    total: u32,
    tokens: Vec<u32>,
    ending: Option<Result<(), Error>>,
}

impl Client {
    fn read(&mut self) {
        while let Some(Some(event)) = self.submission.next().now_or_never() {
            assert!(self.ending.is_none(), "something came after the ending");
            match event {
                Ok(event) => {
                    self.tokens.extend(event.tokens.iter().map(|token| token.index));
                    self.ending = event.finished.map(|_| Ok(()));
                }
                Err(error) => self.ending = Some(Err(error)),
            }
        }
    }
}

#[derive(Default)]
struct World {
    alive: BTreeMap<u32, Worker>,
    /// Workers that the cluster has removed and that still send messages.
    dead: Vec<Worker>,
    said: Vec<(WorkerId, Says)>,
    clients: Vec<Client>,
    deaths: u32,
}

impl World {
    fn join(&mut self, cluster: &Cluster, rank: u32) {
        let (link, inbox) = link(cluster.limits().link_capacity());
        if let Ok(id) = cluster.join(
            Joining {
                rank: Rank(rank),
                pid: 1,
                host: Ipv4Addr::LOCALHOST.into(),
                meeting_path: String::new(),
            },
            link,
        ) {
            cluster.on_ready(id, ready());
            self.alive.insert(rank, Worker { id, rank, inbox, running: BTreeMap::new() });
        }
    }

    fn step(&mut self, cluster: &Cluster, rank: u32) {
        if let Some(mut worker) = self.alive.remove(&rank) {
            let mut says = worker.step();
            self.export(&worker, &mut says);
            self.said.push((worker.id, says.clone()));
            self.alive.insert(rank, worker);
            hear(cluster, self.said.last().unwrap());
        }
    }

    /// Transfers graphs: the receiver, if it is still present, continues with the second token.
    fn export(&mut self, from: &Worker, says: &mut Says) {
        for (to, key) in says.exports.drain(..) {
            let receiver = self.alive.values_mut().find_map(|worker| worker.running.get_mut(&to));
            let outcome = match receiver {
                Some(graph) => {
                    graph.receives = false;
                    pb::completion::Outcome::HandedOver(pb::HandedOver { generated: graph.next })
                }
                None => pb::completion::Outcome::HandoverFailed(pb::Fault::default()),
            };
            says.report.completions.push(from.completion(key, 1, outcome));
        }
    }

    /// Takes a worker for slow until the next long tick.
    fn set_aside(&self, cluster: &Cluster, rank: u32) {
        if let Some(worker) = self.alive.get(&rank)
            && let Some(worker) = cluster.state.lock().membership.workers.get_mut(worker.id)
        {
            worker.record.set_aside(9.0, Duration::from_secs(1), Duration::ZERO);
        }
    }

    fn lose(&mut self, cluster: &Cluster, rank: u32) {
        if let Some(worker) = self.alive.remove(&rank) {
            cluster.on_lost(worker.id, "killed");
            self.dead.push(worker);
            self.deaths += 1;
        }
    }
}

fn hear(cluster: &Cluster, (from, says): &(WorkerId, Says)) {
    says.reserved.iter().for_each(|reserved| cluster.on_reserved(*from, reserved.clone()));
    cluster.on_report(*from, says.report.clone());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn deaths_lose_nothing_and_leave_nothing(
        shape in prop_oneof![Just(Shape::Colocated), Just(Shape::Disaggregated)],
        events in proptest::collection::vec((0u8..22, 0u32..RANKS, any::<prop::sample::Index>()), 0..150),
    ) {
        let (cluster, mut world) = (cluster(shape), World::default());
        (0..RANKS).for_each(|rank| world.join(&cluster, rank));
        for (event, rank, index) in events {
            match event {
                0..=3 => {
                    let total = 1 + index.index(9) as u32;
                    if let Ok(submission) = cluster.submit(spec(total), None) {
                        world.clients.push(Client { submission, total, tokens: vec![], ending: None });
                    }
                }
                4..=11 => world.step(&cluster, rank),
                12 => world.lose(&cluster, rank),
                13..=15 => world.join(&cluster, rank),
                16 if !world.dead.is_empty() => {
                    let worker = index.get_mut(&mut world.dead);
                    hear(&cluster, &(worker.id, worker.step()));
                }
                17 if !world.said.is_empty() => {
                    hear(&cluster, index.get(&world.said));
                }
                18 if !world.clients.is_empty() => {
                    // The client leaves, whether or not its request has ended.
                    world.clients.swap_remove(index.index(world.clients.len()));
                }
                19 => cluster.tick(Duration::ZERO),
                20 => world.set_aside(&cluster, rank),
                _ => world.clients.iter_mut().for_each(Client::read),
            }
        }
        for _ in 0..200 {
            for rank in 0..RANKS {
                world.join(&cluster, rank);
                world.step(&cluster, rank);
            }
        }
        let state = cluster.state.lock();
        prop_assert!(state.requests.len() == 0 && !state.requests.any_waiting(), "{:?}", *state);
        prop_assert!(state.membership.workers.iter().all(|(_, worker)| worker.bookings.are_empty()), "{:?}", state.membership.workers);
        drop(state);
        for client in &mut world.clients {
            client.read();
            prop_assert_eq!(&client.tokens, &(0..client.tokens.len() as u32).collect::<Vec<_>>());
            match client.ending.as_ref().unwrap() {
                Ok(()) => prop_assert_eq!(client.tokens.len() as u32, client.total),
                Err(error) => {
                    prop_assert_eq!(error.kind(), ErrorKind::Unavailable);
                    prop_assert!(world.deaths > MAX_REPLAYS);
                }
            }
        }
    }
}
