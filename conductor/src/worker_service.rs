//! The gRPC service that workers dial. Each worker has one stream, which begins with its `Hello`. The worker's token is
//! in the call's metadata. The token is checked before a message is read.

use std::{
    net::{IpAddr, Ipv4Addr},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{
    Request, Response, Status, Streaming,
    codegen::http::HeaderMap,
    service::{Routes, interceptor::InterceptedService},
};
use tutti_proto::{
    MAX_MESSAGE_BYTES, Rank, WorkerId,
    cluster::v1::{
        self as pb,
        conductor_message::Message as ToWorker,
        worker_gate_server::{WorkerGate, WorkerGateServer},
        worker_message::Message as FromWorker,
    },
};
use tutti_runtime::{
    Error, VERSION,
    progress::LoadDisplay,
    serve::{self, ConnectionLimits, ConnectionMetrics, Peer, Purpose, Standing},
    shutdown::Shutdown,
    token::{self, Token},
};

use crate::{
    cluster::{self, Cluster, Joining},
    listen::ClusterListener,
};

/// Flow-control window of a worker's connection: large enough for a launch with a long prompt, or a report with many
/// logprobs.
const WINDOW_BYTES: u32 = 4 << 20;
/// Maximum number of streams per connection. A worker uses one.
const STREAMS: u32 = 4;
/// Time within which a new connection must send its `Hello`.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// The rules by which workers are admitted.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Number of workers that the conductor spawns. Workers of ranks below this number must show `spawn_token`.
    pub spawned_workers: u32,
    /// The token of spawned workers, random per conductor.
    pub spawn_token: Token,
    /// The rule for workers that join by hand.
    pub by_hand: ByHand,
}

/// The rule for workers that join by hand.
#[derive(Clone, Debug)]
pub enum ByHand {
    /// Workers may not join by hand, because the listener has no token and other users may reach it.
    Refused,
    /// Workers join without a token, because only this user can reach the listener.
    Open,
    /// Workers must show this token.
    WithToken(Token),
}

/// The kind of token that a worker has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Credential {
    Spawned,
    ByHand,
}

impl Admission {
    /// Checks the token of a call, before a message of the call is read.
    fn identify(&self, headers: &HeaderMap) -> Result<Credential, Error> {
        if self.spawn_token.is_in(headers) {
            return Ok(Credential::Spawned);
        }
        let refused = |message: &str| Err(Error::invalid("join_token_file", message));
        match &self.by_hand {
            ByHand::Open if token::shown(headers).is_none() => Ok(Credential::ByHand),
            ByHand::WithToken(token) if token.is_in(headers) => Ok(Credential::ByHand),
            ByHand::Open | ByHand::WithToken(_) => refused("the join token is not the conductor's"),
            ByHand::Refused => {
                refused("joining over --worker-listen needs a conductor started with --join-token-file")
            }
        }
    }

    fn check(&self, credential: Credential, hello: &pb::Hello) -> Result<(), Error> {
        if hello.version != VERSION {
            let message = format!("the worker is of version {}, the conductor of {VERSION}", hello.version);
            return Err(Error::invalid("version", message));
        }
        match (credential, hello.rank < self.spawned_workers) {
            (Credential::Spawned, true) | (Credential::ByHand, false) => Ok(()),
            (Credential::ByHand, true) => {
                let message = format!(
                    "ranks below {} belong to workers that the conductor spawns; join with rank {} or above",
                    self.spawned_workers, self.spawned_workers
                );
                Err(Error::invalid("rank", message))
            }
            (Credential::Spawned, false) => {
                let message = format!("rank {} is none of those that the conductor spawns", hello.rank);
                Err(Error::invalid("rank", message))
            }
        }
    }
}

/// The gRPC service `WorkerGate`.
pub struct WorkerService {
    cluster: Arc<Cluster>,
    admission: Admission,
    /// Settings of each group's workers, as JSON. The worker defines the schema.
    settings_json: Vec<String>,
    loading: LoadDisplay,
    connections: ConnectionLimits,
    connection_metrics: ConnectionMetrics,
}

impl WorkerService {
    /// Creates a service that gives each worker the settings of its group. `settings_json` has one text per group, in
    /// the order of the topology.
    pub fn new(
        cluster: Arc<Cluster>,
        admission: Admission,
        settings_json: Vec<String>,
        loading: LoadDisplay,
    ) -> Self {
        let (connections, connection_metrics) = Default::default();
        Self { cluster, admission, settings_json, loading, connections, connection_metrics }
    }

    /// Sets the limits on connections of workers, and the metrics that count these connections.
    #[must_use]
    pub fn with_connections(
        self,
        connections: impl Into<ConnectionLimits>,
        connection_metrics: ConnectionMetrics,
    ) -> Self {
        Self { connections: connections.into(), connection_metrics, ..self }
    }

    /// Serves workers at `listener` for as long as the future is polled.
    pub async fn serve(self, listener: ClusterListener) -> Result<(), Error> {
        let admission = self.admission.clone();
        let connections = self.connections.clone().with_streams(STREAMS);
        let counts = self.connection_metrics.clone();
        let service = WorkerGateServer::new(self)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let windows = serve::Windows { stream: WINDOW_BYTES, connection: WINDOW_BYTES };
        let (listener, _directory) = listener.into_parts();
        let check = move |mut request: Request<()>| {
            let credential =
                admission.identify(request.metadata().as_ref()).map_err(Error::into_unauthenticated)?;
            Standing::vouch(request.extensions());
            request.extensions_mut().insert(credential);
            Ok(request)
        };
        let routes = Routes::new(InterceptedService::new(service, check));
        let listener = listener.counted(&counts, Purpose::Workers);
        serve::grpc(listener, routes, windows, connections, Shutdown::default()).await
    }

    async fn hello(&self, inbound: &mut Streaming<pb::WorkerMessage>) -> Result<pb::Hello, Error> {
        let first = timeout(HELLO_TIMEOUT, inbound.message())
            .await
            .map_err(|_| Error::invalid("hello", format!("did not arrive within {HELLO_TIMEOUT:?}")))?
            .map_err(Error::from)?;
        match first.and_then(|m| m.message) {
            Some(FromWorker::Hello(hello)) => Ok(hello),
            _ => Err(Error::invalid("hello", "must be a worker's first message")),
        }
    }
}

#[tonic::async_trait]
impl WorkerGate for WorkerService {
    type JoinStream = Pin<Box<dyn Stream<Item = Result<pb::ConductorMessage, Status>> + Send>>;

    async fn join(
        &self,
        request: Request<Streaming<pb::WorkerMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let host = match request.extensions().get() {
            Some(Peer::Ip(address)) => *address,
            // Over a Unix socket, the worker is on this machine.
            Some(Peer::Local) | None => IpAddr::from(Ipv4Addr::LOCALHOST),
        };
        let credential = request.extensions().get().copied();
        let credential = credential.ok_or_else(|| Error::internal("the caller's token was not checked"))?;
        let mut inbound = request.into_inner();
        let hello = self.hello(&mut inbound).await?;
        self.admission.check(credential, &hello)?;
        let (link, outbound) = cluster::link(self.cluster.limits().link_capacity());
        let rank = Rank(hello.rank);
        let joining = Joining { rank, pid: hello.pid, host, meeting_path: hello.meeting_path };
        let worker = self.cluster.join(joining, link)?;
        // The lookup succeeds: every rank that may join belongs to a group, and every group has settings.
        let settings =
            self.cluster.limits().topology.group_of(rank).and_then(|group| self.settings_json.get(group));
        let settings_json = settings.cloned().unwrap_or_default();
        let welcome = pb::Welcome { worker: worker.0, settings_json, host: host.to_string() };
        let welcome = pb::ConductorMessage { message: Some(ToWorker::Welcome(welcome)) };
        let reader = Reader { cluster: self.cluster.clone(), loading: self.loading.clone(), worker, rank };
        tokio::spawn(reader.run(inbound));
        let outbound = tokio_stream::once(Ok(welcome)).chain(ReceiverStream::new(outbound));
        Ok(Response::new(Box::pin(outbound)))
    }
}

/// Reads one worker's messages until its stream ends.
pub(crate) struct Reader {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) loading: LoadDisplay,
    pub(crate) worker: WorkerId,
    pub(crate) rank: Rank,
}

impl Reader {
    async fn run(self, mut inbound: Streaming<pb::WorkerMessage>) {
        let why = loop {
            match inbound.message().await {
                Ok(Some(pb::WorkerMessage { message: Some(message) })) => self.on_message(message),
                Ok(Some(pb::WorkerMessage { message: None })) => {
                    tracing::warn!(worker = self.rank.0, "the worker sent a message of an unknown kind");
                }
                Ok(None) => break "it left".to_owned(),
                Err(status) => break format!("its connection broke: {}", status.message()),
            }
        };
        self.loading.abandon(self.name());
        self.cluster.on_lost(self.worker, &why);
    }

    /// The worker's name in the display of load progress.
    fn name(&self) -> String {
        format!("worker {}", self.rank)
    }

    pub(crate) fn on_message(&self, message: FromWorker) {
        match message {
            FromWorker::StepReport(report) => self.cluster.on_report(self.worker, report),
            FromWorker::Heartbeat(beat) => self.cluster.on_heartbeat(self.worker, &beat),
            FromWorker::LoadProgress(progress) => {
                self.cluster.on_loading(self.worker);
                self.loading.update(self.name(), progress.bytes_done, progress.bytes_total);
            }
            FromWorker::Ready(ready) => {
                self.loading.abandon(self.name());
                self.cluster.on_ready(self.worker, ready);
            }
            FromWorker::LoadFailed(failed) => {
                self.loading.abandon(self.name());
                self.cluster.on_load_failed(self.worker, failed.fault.unwrap_or_default());
            }
            FromWorker::GroupListening(listening) => {
                self.cluster.on_group_listening(self.worker, listening);
            }
            FromWorker::Reserved(reserved) => self.cluster.on_reserved(self.worker, reserved),
            FromWorker::HeldPrompts(held) => self.cluster.on_held_prompts(self.worker, held),
            FromWorker::Leaving(_) => self.cluster.on_leaving(self.worker),
            FromWorker::Hello(_) => tracing::warn!(worker = self.rank.0, "the worker said Hello twice"),
        }
    }
}
