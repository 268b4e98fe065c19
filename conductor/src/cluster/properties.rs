//! The whole cluster under random deaths: every request ends once with all of its tokens in order, and nothing of any of
//! them stays booked or waiting.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Arc, time::Duration};

use futures_util::FutureExt;
use proptest::prelude::*;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tonic::Status;
use tutti_proto::{
    GraphKey, Rank, WorkerId,
    cluster::v1::{self as pb, conductor_message::Message as ToWorker},
    walks::{ModelDeclaration, NodeId, Walk, WalkId, WalkKind},
};
use tutti_runtime::{Error, ErrorKind, health::Health, metrics::Metrics};

use super::{Cluster, Joining, Limits, Served, link};
use crate::submission::Submission;

const RANKS: u32 = 3;
const MAX_REPLAYS: u32 = 2;

fn cluster() -> Arc<Cluster> {
    let limits = Limits {
        tp: 1,
        spawned_workers: RANKS,
        max_running_requests: 4,
        max_queued_requests: 4,
        max_model_len: None,
        max_replays: MAX_REPLAYS,
        heartbeat_timeout: Duration::from_secs(3),
        hang_timeout: Duration::from_secs(60),
    };
    Arc::new(Cluster::new(limits, Served::default(), &Metrics::default(), Health::default()))
}

fn ready() -> pb::Ready {
    let batched_by = WalkId(2);
    let walk = |kind| Walk { name: "walk".into(), nodes: vec![NodeId(0)], kind };
    let walks = vec![
        walk(WalkKind::Chunkable { batched_by }),
        walk(WalkKind::Decode { batched_by }),
        walk(WalkKind::Mixed),
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
        sampling: Some(pb::Sampling { top_p: 1.0, repetition_penalty: 1.0, ..Default::default() }),
        stopping: Some(pb::Stopping { max_tokens, ..Default::default() }),
        ..Default::default()
    }
}

/// A graph where it runs.
#[derive(Clone, Copy)]
struct Running {
    epoch: u32,
    next: u32,
    total: u32,
}

/// A worker as it should be: one token for each of its graphs with each step.
struct Worker {
    id: WorkerId,
    rank: u32,
    inbox: mpsc::Receiver<Result<pb::ConductorMessage, Status>>,
    running: BTreeMap<GraphKey, Running>,
}

impl Worker {
    fn step(&mut self) -> pb::StepReport {
        let mut report = pb::StepReport::default();
        while let Ok(Ok(pb::ConductorMessage { message: Some(message) })) = self.inbox.try_recv() {
            match message {
                ToWorker::Launch(launch) => {
                    let key = GraphKey::from(launch.key.unwrap());
                    let total = launch.spec.unwrap().stopping.unwrap().max_tokens;
                    let next = launch.generated.len() as u32;
                    assert!(
                        self.running.insert(key, Running { epoch: 0, next, total }).is_none(),
                        "{key} came twice"
                    );
                }
                ToWorker::Cancel(cancel) => {
                    let key = cancel.key.unwrap();
                    if let Some(graph) = self.running.remove(&key.into()) {
                        let outcome = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
                        report.completions.push(self.completion(key.into(), graph.epoch, outcome));
                    }
                }
                _ => {}
            }
        }
        for (key, graph) in &mut self.running {
            let token = pb::SampledToken { token_id: graph.next, index: graph.next, logprob: None };
            let key = Some((*key).into());
            report.rows.push(pb::RowReport {
                key,
                epoch: graph.epoch,
                tokens: vec![token],
                ..Default::default()
            });
            graph.epoch += 1;
            graph.next += 1;
        }
        let done: Vec<_> = self.running.extract_if(.., |_, graph| graph.next == graph.total).collect();
        for (key, graph) in done {
            let reason = pb::FinishReason::Length.into();
            let finished = pb::Finished { reason, generated: graph.total, ..Default::default() };
            let outcome = pb::completion::Outcome::Finished(finished);
            report.completions.push(self.completion(key, graph.epoch, outcome));
        }
        report
    }

    fn completion(&self, key: GraphKey, epoch: u32, outcome: pb::completion::Outcome) -> pb::Completion {
        pb::Completion { key: Some(key.into()), epoch, rank: self.rank, outcome: Some(outcome) }
    }
}

/// A client, and what it has had.
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
    /// Taken out of the cluster, and not aware of it.
    dead: Vec<Worker>,
    said: Vec<(WorkerId, pb::StepReport)>,
    clients: Vec<Client>,
    deaths: u32,
}

impl World {
    fn join(&mut self, cluster: &Cluster, rank: u32) {
        let (link, inbox) = link(cluster.link_capacity());
        if let Ok(id) =
            cluster.join(Joining { rank: Rank(rank), pid: 1, host: Ipv4Addr::LOCALHOST.into() }, link)
        {
            cluster.on_ready(id, ready());
            self.alive.insert(rank, Worker { id, rank, inbox, running: BTreeMap::new() });
        }
    }

    fn step(&mut self, cluster: &Cluster, rank: u32) {
        if let Some(worker) = self.alive.get_mut(&rank) {
            let report = worker.step();
            self.said.push((worker.id, report.clone()));
            cluster.on_report(worker.id, report);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn deaths_lose_nothing_and_leave_nothing(
        events in proptest::collection::vec((0u8..20, 0u32..RANKS, any::<prop::sample::Index>()), 0..150),
    ) {
        let (cluster, mut world) = (cluster(), World::default());
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
                    let report = worker.step();
                    cluster.on_report(worker.id, report);
                }
                17 if !world.said.is_empty() => {
                    let (from, report) = index.get(&world.said).clone();
                    cluster.on_report(from, report);
                }
                18 if !world.clients.is_empty() => {
                    // Goes away, whether or not it has had all.
                    world.clients.swap_remove(index.index(world.clients.len()));
                }
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
        prop_assert!(state.requests.is_empty() && state.waiting.is_empty(), "{:?}", *state);
        prop_assert!(state.workers.iter().all(|(_, worker)| !worker.has_work()), "{:?}", state.workers);
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
