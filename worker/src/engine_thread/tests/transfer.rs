//! Tests of transfers between workers with simulated devices and real streams.

mod embeddings;
mod ranks;
mod receiver;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
    time::timeout,
};
use tutti_engine::{Engine, EngineSettings};
use tutti_models::{Model, SimOptions, load_sim};
use tutti_proto::{
    GraphKey, Rank,
    cluster::v1::{self as pb, completion::Outcome, worker_message::Message as ToConductor},
};
use tutti_settings::{ByteSize, ConnectionSettings, SimProfile, SimSettings};
use tutti_transfer::Network;

use super::*;
use crate::engine_thread::{self, Command, EngineChannels, Lifetime};

/// Time limit that no correct operation reaches.
const WAIT: Duration = Duration::from_secs(120);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Number of tokens of the prompt. The prompt takes five pages of 16 tokens.
const PROMPT: usize = 70;
const PAGES: usize = 5;

/// A worker whose conductor is the test.
struct Worker {
    commands: mpsc::Sender<Command>,
    reports: mpsc::Receiver<pb::WorkerMessage>,
    load: watch::Receiver<pb::WorkerLoad>,
}

impl Worker {
    fn start() -> Self {
        Self::with_pages_of(16)
    }

    fn with_pages_of(tokens: usize) -> Self {
        Self::of(&shipped(), tokens, None)
    }

    /// Starts a worker with `nodes` of a checkpoint's model.
    fn of(checkpoint: &Path, page_tokens: usize, nodes: Option<&[String]>) -> Self {
        Self::serving(model(checkpoint, page_tokens, nodes), None)
    }

    /// Starts a worker that serves a model.
    fn serving(model: Box<dyn Model>, kv_cache_memory: Option<ByteSize>) -> Self {
        Self::reached_by(LOCALHOST.into(), model, kv_cache_memory)
    }

    /// Starts a worker that other workers reach by `network`.
    fn reached_by(network: Network, model: Box<dyn Model>, kv_cache_memory: Option<ByteSize>) -> Self {
        let settings = EngineSettings {
            max_step_tokens: 64,
            max_running_requests: Some(4),
            max_prefill_chunk_size: Some(24),
            kv_cache_memory,
            ..EngineSettings::default()
        };
        let (device_loop, handle) = Engine::new(model, Rank(0), &settings, 4).unwrap().split();
        let (commands, inbox) = mpsc::channel(16);
        let (outbox, reports) = mpsc::channel(16);
        let (load, seen) = watch::channel(pb::WorkerLoad::default());
        let channels = EngineChannels {
            commands: inbox,
            outbox,
            load,
            forwards: Arc::default(),
            device_memory: LastReading::default(),
            network,
            lifetime: Lifetime::default(),
        };
        let runtime = Handle::current();
        // The engine ends when its commands close, so nothing waits for the thread.
        drop(spawn_blocking(move || {
            engine_thread::run_engine(device_loop, (Rank(0), handle), channels, &runtime)
        }));
        Self { commands, reports, load: seen }
    }

    async fn launch(&self, graph: pb::LaunchGraph) {
        self.commands.send(Command::Launch(Box::new(graph))).await.unwrap();
    }

    async fn message(&mut self) -> ToConductor {
        let message = timeout(WAIT, self.reports.recv()).await.expect("no message comes");
        message.unwrap().message.unwrap()
    }

    /// Launches a decode, waits until the decode holds its pages, and returns the worker's `Reserved` message.
    async fn reserve(&mut self, request: u64, lease_ms: u32) -> pb::Reserved {
        let receive = pb::PlaneReservation { secret: secret().into(), lease_ms };
        let key = Some(key(request, 1).into());
        self.launch(pb::LaunchGraph { key, walks: vec![1], receive: Some(receive), ..whole(request) }).await;
        loop {
            if let ToConductor::Reserved(reserved) = self.message().await {
                assert_eq!(reserved.key, key);
                return reserved;
            }
        }
    }

    /// Returns the tokens and the outcome of the only request on this worker.
    async fn ends(&mut self) -> (Vec<u32>, Outcome) {
        let mut tokens = Vec::new();
        loop {
            let ToConductor::StepReport(report) = self.message().await else { panic!("not a report") };
            for token in report.rows.into_iter().flat_map(|row| row.tokens) {
                tokens.push(token.token_id);
            }
            if let Some(completion) = report.completions.into_iter().next() {
                return (tokens, completion.outcome.unwrap());
            }
        }
    }

    /// Waits until `is` is true of the reported load.
    async fn load(&mut self, is: impl FnMut(&pb::WorkerLoad) -> bool) -> pb::WorkerLoad {
        *timeout(WAIT, self.load.wait_for(is)).await.expect("the load is other").unwrap()
    }
}

/// Secret of this test's transfers. Each test has its own, because numbers of open files come again: the path of a
/// segment that is gone may name a segment of another test.
fn secret() -> [u8; 16] {
    let mut hasher = DefaultHasher::new();
    thread::current().id().hash(&mut hasher);
    u128::from(hasher.finish()).to_le_bytes()
}

fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tutti-tiny/checkpoint")
}

fn model(checkpoint: &Path, page_tokens: usize, nodes: Option<&[String]>) -> Box<dyn Model> {
    let sim = SimSettings { profile: SimProfile::Instant, ..Default::default() };
    let options =
        SimOptions { dir: checkpoint, max_step_tokens: 64, page_tokens, nodes, rank: 0, settings: &sim };
    load_sim(&options).unwrap()
}

fn key(request: u64, graph: u32) -> GraphKey {
    pb::GraphKey { request, incarnation: 0, graph }.into()
}

fn whole(request: u64) -> pb::LaunchGraph {
    let spec = pb::RequestSpec {
        prompt: (0..PROMPT as u64).map(|index| ((request * 31 + index * 7) % 1000) as u32).collect(),
        sampling: Some(pb::SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            seed: request,
            ..Default::default()
        }),
        stopping: Some(pb::Stopping { max_tokens: 12, ignore_eos: true, ..Default::default() }),
        ..Default::default()
    };
    pb::LaunchGraph {
        key: Some(key(request, 0).into()),
        walks: vec![0, 1],
        spec: Some(spec),
        ..Default::default()
    }
}

fn prefill(request: u64, reserved: &pb::Reserved) -> pb::LaunchGraph {
    let send_to = pb::PlaneDestination {
        key: reserved.key,
        address: format!("127.0.0.1:{}", reserved.port),
        secret: secret().into(),
        lease_ms: 60_000,
        layout_hash: reserved.layout_hash,
        shared_memory: reserved.shared_memory.clone(),
        known_pages: reserved.known_pages,
        ranks: reserved
            .ranks
            .iter()
            .map(|room| pb::RankDestination {
                address: format!("127.0.0.1:{}", room.port),
                shared_memory: room.shared_memory.clone(),
            })
            .collect(),
        sender: 7,
    };
    pb::LaunchGraph { walks: vec![0], send_to: Some(send_to), ..whole(request) }
}

async fn alone(request: u64) -> Vec<u32> {
    let mut worker = Worker::start();
    worker.launch(whole(request)).await;
    worker.ends().await.0
}

#[tokio::test]
async fn a_divided_request_gives_the_same_tokens_over_either_transport() {
    let (mut from, mut to) = (Worker::start(), Worker::start());
    for (request, shared) in [(1, true), (2, false), (3, true)] {
        let mut reserved = to.reserve(request, 60_000).await;
        assert!(!reserved.shared_memory.is_empty());
        if !shared {
            // No such path exists on this host, so the sender behaves as on another host.
            reserved.shared_memory = "/proc/1/fd/none".into();
        }
        from.launch(prefill(request, &reserved)).await;
        let (first, outcome) = from.ends().await;
        assert_eq!(outcome, Outcome::HandedOver(pb::HandedOver { generated: 1 }));
        let (rest, outcome) = to.ends().await;
        assert!(matches!(outcome, Outcome::Finished(pb::Finished { generated: 12, .. })), "{outcome:?}");
        assert_eq!([first, rest].concat(), alone(request).await, "request {request}");
    }
    let counts = from.load(|load| load.kv_pages_used == 0).await.transfers.unwrap();
    let page_bytes = 16 * 8;
    assert_eq!(counts.shared_memory_bytes, 2 * (PAGES * page_bytes) as u64);
    assert_eq!((counts.tcp_bytes, counts.handed_over, counts.failed), ((PAGES * page_bytes) as u64, 3, 0));
    assert!(0 < counts.exposed_us && counts.exposed_us <= counts.pushing_us);
    assert_eq!(to.load(|load| load.kv_pages_used == 0).await.transfers, None);
}

#[tokio::test]
async fn a_cancelled_decode_ends_both_graphs() {
    let (mut from, mut to) = (Worker::start(), Worker::start());
    let reserved = to.reserve(1, 60_000).await;
    to.commands.send(Command::Cancel(key(1, 1))).await.unwrap();
    assert!(matches!(to.ends().await.1, Outcome::Cancelled(_)));
    from.launch(prefill(1, &reserved)).await;
    assert!(matches!(from.ends().await.1, Outcome::HandoverFailed(_)));
    for worker in [&mut from, &mut to] {
        worker.load(|load| load.kv_pages_used == 0).await;
    }
}

#[tokio::test]
async fn workers_with_different_page_layouts_exchange_no_pages() {
    let (mut from, mut to) = (Worker::with_pages_of(32), Worker::start());
    let reserved = to.reserve(1, 60_000).await;
    from.launch(prefill(1, &reserved)).await;
    let (_, outcome) = from.ends().await;
    let Outcome::Failed(fault) = outcome else { panic!("{outcome:?}") };
    assert!(fault.message.contains("plane \"kv\" has units of"), "{fault:?}");
    assert_eq!(from.load(|load| load.kv_pages_used == 0).await.transfers.unwrap().failed, 1);
}
