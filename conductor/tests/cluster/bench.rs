//! A cluster with a real worker service on a Unix socket, and fake workers that send what a test tells the workers to
//! send.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::timeout};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Status, Streaming, transport::Endpoint};
use tutti_conductor::{
    Submission,
    cluster::{Cluster, Limits, Served, Topology},
    listen::{Callers, ClusterListener},
    worker_service::{Admission, ByHand, WorkerService},
};
use tutti_proto::{
    cluster::v1::{
        self as pb, conductor_message::Message as FromConductor, worker_gate_client::WorkerGateClient,
        worker_message::Message as ToConductor,
    },
    declaration::{ModelDeclaration, NodeId, Walk, WalkId, WalkKind},
};
use tutti_runtime::{
    Error, VERSION,
    health::{Health, State},
    metrics::Metrics,
    progress::LoadDisplay,
    serve::ConnectionMetrics,
    tls::ClusterTransport,
    token::Token,
};
use tutti_settings::{ConnectionSettings, EngineSettings, FaultSettings, ModelSettings};

pub const SPAWN_TOKEN: &str = "spawned";
pub const SETTINGS: &str = r#"{"threads":1}"#;

/// Awaits a future that should complete at once. The test fails with `what` if the future takes longer than 20 seconds.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future).await.unwrap_or_else(|_| panic!("{what} does not happen"))
}

pub fn limits(spawned_workers: u32) -> Limits {
    Limits {
        topology: Topology::all_in_one(spawned_workers, 1),
        model: ModelSettings::default(),
        engine: EngineSettings { max_running_requests: Some(1), ..EngineSettings::default() },
        faults: FaultSettings {
            max_queued_requests: 1,
            max_replays: 2,
            transfer_timeout: 30,
            heartbeat_timeout: 3,
            hang_timeout: 10,
            ..FaultSettings::default()
        },
    }
}

pub struct Bench {
    pub cluster: Arc<Cluster>,
    pub metrics: Metrics,
    pub health: Health,
    url: String,
}

impl Bench {
    pub async fn new(limits: Limits) -> Self {
        Self::with_workers_by_hand(limits, ByHand::Open).await
    }

    pub async fn with_workers_by_hand(limits: Limits, by_hand: ByHand) -> Self {
        Self::with(limits, by_hand, ConnectionSettings::default()).await
    }

    pub async fn with(limits: Limits, by_hand: ByHand, connections: ConnectionSettings) -> Self {
        Self::start(limits, by_hand, connections, |cluster| cluster).await
    }

    /// A conductor whose spawned workers have had `life` conductors before it.
    pub async fn outlived(limits: Limits, life: u64) -> Self {
        let outlived = |cluster: Cluster| cluster.outlived(life);
        Self::start(limits, ByHand::Open, ConnectionSettings::default(), outlived).await
    }

    async fn start(
        limits: Limits,
        by_hand: ByHand,
        connections: ConnectionSettings,
        change: impl FnOnce(Cluster) -> Cluster,
    ) -> Self {
        let (metrics, health) = (Metrics::default(), Health::default());
        let spawned_workers = limits.topology.spawned_workers();
        let settings = vec![SETTINGS.to_owned(); limits.topology.groups().len()];
        let served = Served { names: vec!["tiny".into()], has_tokenizer: true };
        let cluster = Arc::new(change(Cluster::new(limits, served, &metrics, health.clone())));
        let admission = Admission { spawned_workers, spawn_token: token(SPAWN_TOKEN), by_hand };
        let listener =
            ClusterListener::bind(Callers::Workers, None, None, &ClusterTransport::default()).await.unwrap();
        let url = listener.local_url().unwrap();
        let service = WorkerService::new(cluster.clone(), admission, settings, LoadDisplay::new(false));
        tokio::spawn(service.with_connections(connections, ConnectionMetrics::default()).serve(listener));
        Self { cluster, metrics, health, url }
    }

    /// Joins as a spawned worker of this rank.
    pub async fn join(&self, rank: u32) -> FakeWorker {
        self.try_join(hello(rank)).await.unwrap()
    }

    /// Joins as a spawned worker of this rank, and waits until the cluster reports it as ready.
    pub async fn ready(&self, rank: u32) -> FakeWorker {
        self.ready_with(rank, ready()).await
    }

    /// Joins with this `Ready` message, and waits as [`ready`](Self::ready) does.
    pub async fn ready_with(&self, rank: u32, message: pb::Ready) -> FakeWorker {
        let worker = self.join(rank).await;
        worker.say(ToConductor::Ready(message)).await;
        // The status is checked, since health also waits for the other workers.
        soon("a worker is ready", async {
            while !self
                .cluster
                .status()
                .workers
                .iter()
                .any(|w| w.worker == rank && w.phase() == pb::WorkerPhase::Ready)
            {
                tokio::task::yield_now().await;
            }
        })
        .await;
        worker
    }

    /// Joins with the token of spawned workers.
    pub async fn try_join(&self, hello: pb::Hello) -> Result<FakeWorker, Error> {
        self.try_join_with(hello, SPAWN_TOKEN).await
    }

    /// Joins with this token. An empty token is not sent.
    pub async fn try_join_with(&self, hello: pb::Hello, token: &str) -> Result<FakeWorker, Error> {
        let (to, outbound) = mpsc::channel(16);
        to.send(pb::WorkerMessage { message: Some(ToConductor::Hello(hello.clone())) }).await.unwrap();
        let stream = self.call(outbound, token).await?;
        let mut worker = FakeWorker { rank: hello.rank, to, from: stream.into_inner() };
        match worker.hear().await {
            Some(FromConductor::Welcome(welcome)) => assert_eq!(welcome.settings_json, SETTINGS),
            other => panic!("{other:?} is no Welcome"),
        }
        Ok(worker)
    }

    /// Calls `Join` with these messages.
    pub async fn call(
        &self,
        messages: mpsc::Receiver<pb::WorkerMessage>,
        shown: &str,
    ) -> Result<tonic::Response<Streaming<pb::ConductorMessage>>, Status> {
        let channel = Endpoint::from_shared(self.url.clone()).unwrap().connect().await;
        let channel = channel.map_err(|e| Status::unavailable(e.to_string()))?;
        let mut request = tonic::Request::new(ReceiverStream::new(messages));
        if !shown.is_empty() {
            token(shown).add_to(request.metadata_mut().as_mut());
        }
        WorkerGateClient::new(channel).join(request).await
    }

    pub fn submit(&self, max_tokens: u32) -> Result<Submission, Error> {
        self.cluster.submit(spec(max_tokens), None)
    }

    pub async fn idle(&self) {
        soon("the cluster is idle", self.cluster.idle()).await;
    }

    pub async fn wait_ready(&self, wanted: impl Fn(&State) -> bool) {
        let mut ready = self.health.watch_ready();
        soon("readiness", ready.wait_for(|state| wanted(state))).await.unwrap();
    }

    /// The value of a metric with its labels; 0 if the metric does not exist.
    pub fn metric(&self, name: &str) -> u64 {
        let text = self.metrics.encode();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }
}

/// Waits until a metric has this value.
pub async fn metric(bench: &Bench, name: &str, value: u64) {
    soon(name, async {
        while bench.metric(name) != value {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

pub fn token(text: &str) -> Token {
    Token::new("token", text).unwrap()
}

pub fn hello(rank: u32) -> pb::Hello {
    pb::Hello { rank, pid: 1000 + rank, version: VERSION.into(), meeting_path: String::new() }
}

pub fn ready() -> pb::Ready {
    let batched_by = WalkId(2);
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    let walks = vec![
        walk("prefill_text", WalkKind::Chunkable { batched_by }),
        walk("thinker_decode", WalkKind::Decode { batched_by }),
        walk("thinker_step", WalkKind::Mixed),
    ];
    let declaration = ModelDeclaration::new(vec!["thinker".into()], walks, vec![]).unwrap();
    let model = pb::ModelDescription {
        vocab_size: 100,
        max_context_tokens: 64,
        max_request_tokens: 64,
        declaration: Some((&declaration).into()),
        ..Default::default()
    };
    pb::Ready {
        model: Some(model),
        kv_pages_total: 8,
        weight_bytes: 1,
        kv_bytes: 1,
        step_bytes: 1,
        ..Default::default()
    }
}

pub fn spec(max_tokens: u32) -> pb::RequestSpec {
    pb::RequestSpec {
        prompt: vec![1, 2, 3],
        sampling: Some(pb::SamplingParams::GREEDY),
        stopping: Some(pb::Stopping { max_tokens, ..Default::default() }),
        ..Default::default()
    }
}

/// The worker's side of the stream.
pub struct FakeWorker {
    rank: u32,
    to: mpsc::Sender<pb::WorkerMessage>,
    from: Streaming<pb::ConductorMessage>,
}

impl FakeWorker {
    pub async fn say(&self, message: ToConductor) {
        self.to.send(pb::WorkerMessage { message: Some(message) }).await.unwrap();
    }

    /// The conductor's next message; `None` if the stream has ended.
    pub async fn hear(&mut self) -> Option<FromConductor> {
        let message: Result<_, Status> = soon("a message to the worker", self.from.message()).await;
        message.unwrap().and_then(|message| message.message)
    }

    /// The error with which the conductor ends the stream.
    pub async fn turned_away(&mut self) -> Error {
        soon("the end of the stream", self.from.message()).await.unwrap_err().into()
    }

    pub async fn launched(&mut self) -> pb::LaunchGraph {
        match self.hear().await {
            Some(FromConductor::Launch(launch)) => launch,
            other => panic!("{other:?} is no launch"),
        }
    }

    pub async fn cancelled(&mut self) -> Option<pb::GraphKey> {
        match self.hear().await {
            Some(FromConductor::Cancel(cancel)) => cancel.key,
            other => panic!("{other:?} is no cancel"),
        }
    }

    /// Reports one step: one token per index, and an outcome if the graph ends.
    pub async fn step(
        &self,
        key: Option<pb::GraphKey>,
        tokens: &[u32],
        end: Option<pb::completion::Outcome>,
    ) {
        let token = |index: &u32| pb::SampledToken { token_id: 10 + index, index: *index, logprob: None };
        let epoch = tokens.first().copied().unwrap_or_default();
        let row = pb::RowReport {
            key,
            epoch,
            walk: 1,
            tokens: tokens.iter().map(token).collect(),
            ..Default::default()
        };
        let outcome =
            |outcome| pb::Completion { key, epoch: epoch + 1, rank: self.rank, outcome: Some(outcome) };
        let used = u32::from(end.is_none());
        let report = pb::StepReport {
            rows: vec![row],
            completions: end.map(outcome).into_iter().collect(),
            load: Some(pb::WorkerLoad {
                kv_pages_used: used,
                kv_pages_total: 8,
                running: used,
                ..Default::default()
            }),
            ..Default::default()
        };
        self.say(ToConductor::StepReport(report)).await;
    }

    /// Reports these tokens and the end of the request.
    pub async fn finish(&self, key: Option<pb::GraphKey>, tokens: &[u32]) {
        let generated = tokens.last().map_or(0, |last| last + 1);
        let reason = pb::FinishReason::Length.into();
        let finished = pb::Finished { reason, generated, ..Default::default() };
        self.step(key, tokens, Some(pb::completion::Outcome::Finished(finished))).await;
    }

    /// Reports that a cancelled graph has ended.
    pub async fn confirm_cancel(&self, key: Option<pb::GraphKey>) {
        self.step(key, &[], Some(pb::completion::Outcome::Cancelled(pb::CancelledOutcome {}))).await;
    }
}

/// Reads a request to its end: the tokens' indices, and the ending.
pub async fn read(
    submission: &mut (impl tokio_stream::Stream<Item = Result<pb::RequestEvent, Error>> + Unpin),
) -> (Vec<u32>, Result<pb::Finished, Error>) {
    let mut indices = Vec::new();
    loop {
        match soon("an event", submission.next()).await {
            Some(Ok(event)) => {
                indices.extend(event.tokens.iter().map(|token| token.index));
                if let Some(finished) = event.finished {
                    return (indices, Ok(finished));
                }
            }
            Some(Err(error)) => return (indices, Err(error)),
            None => panic!("the stream ended without an ending"),
        }
    }
}
