//! The gRPC service that workers dial. Each worker has one stream, which begins with its `Hello`.

use std::{
    net::{IpAddr, Ipv4Addr},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming, service::Routes};
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
    serve::{self, Peer},
    shutdown::Shutdown,
};
use tutti_settings::ConnectionSettings;

use crate::{
    cluster::{self, Cluster, Joining},
    listen::WorkerListener,
};

/// Flow-control window of a worker's connection: large enough for a launch with a long prompt, or a report with many
/// logprobs.
const WINDOW_BYTES: u32 = 4 << 20;
/// Streams per connection. A worker has one.
const STREAMS: u32 = 4;
/// Time within which a new connection must send its `Hello`.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// The rules by which workers are admitted.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Number of workers that the conductor spawns. Workers of ranks below this number must show `spawn_token`.
    pub spawned_workers: u32,
    /// The token of spawned workers, random per conductor.
    pub spawn_token: String,
    /// The token of workers that join by hand. Empty if the listener itself keeps strangers out; `None` if no worker
    /// may join by hand.
    pub join_token: Option<String>,
}

impl Admission {
    fn check(&self, hello: &pb::Hello) -> Result<(), Error> {
        if hello.version != VERSION {
            let message = format!("the worker is of version {}, the conductor of {VERSION}", hello.version);
            return Err(Error::invalid("version", message));
        }
        if hello.rank < self.spawned_workers {
            if !same(&hello.join_token, &self.spawn_token) {
                let message = format!(
                    "ranks below {} belong to workers that the conductor spawns; join with rank {} or above",
                    self.spawned_workers, self.spawned_workers
                );
                return Err(Error::invalid("rank", message));
            }
            return Ok(());
        }
        match &self.join_token {
            Some(token) if same(&hello.join_token, token) => Ok(()),
            Some(_) => Err(Error::invalid("join_token_file", "the join token is not the conductor's")),
            None => Err(Error::invalid(
                "join_token_file",
                "joining over TCP needs a conductor started with --join-token-file",
            )),
        }
    }
}

/// Compares secrets in constant time, so that timing does not reveal where they differ.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |differences, (a, b)| differences | (a ^ b)) == 0
}

/// The gRPC service `WorkerGate`.
pub struct WorkerService {
    cluster: Arc<Cluster>,
    admission: Admission,
    /// Settings of each group's workers, as JSON. The worker defines the schema.
    settings_json: Vec<String>,
    loading: LoadDisplay,
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
        Self { cluster, admission, settings_json, loading }
    }

    /// Serves workers at `listener` for as long as the future is polled.
    pub async fn serve(self, listener: WorkerListener) -> Result<(), Error> {
        let service = WorkerGateServer::new(self)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let windows = serve::Windows { stream: WINDOW_BYTES, connection: WINDOW_BYTES };
        let connections = ConnectionSettings { max_streams: STREAMS, ..ConnectionSettings::default() };
        let (listener, _directory) = listener.into_parts();
        serve::grpc(listener, Routes::new(service), windows, connections, Shutdown::default()).await
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
        let mut inbound = request.into_inner();
        let hello = self.hello(&mut inbound).await?;
        self.admission.check(&hello)?;
        let (link, outbound) = cluster::link(self.cluster.limits().link_capacity());
        let rank = Rank(hello.rank);
        let worker = self.cluster.join(Joining { rank, pid: hello.pid, host }, link)?;
        // The lookup succeeds: every rank that may join belongs to a group, and every group has settings.
        let settings =
            self.cluster.limits().topology.group_of(rank).and_then(|group| self.settings_json.get(group));
        let settings_json = settings.cloned().unwrap_or_default();
        let welcome = pb::Welcome { worker: worker.0, settings_json };
        let welcome = pb::ConductorMessage { message: Some(ToWorker::Welcome(welcome)) };
        let reader = Reader { cluster: self.cluster.clone(), loading: self.loading.clone(), worker, rank };
        tokio::spawn(reader.run(inbound));
        let outbound = tokio_stream::once(Ok(welcome)).chain(ReceiverStream::new(outbound));
        Ok(Response::new(Box::pin(outbound)))
    }
}

/// Reads one worker's messages until its stream ends.
struct Reader {
    cluster: Arc<Cluster>,
    loading: LoadDisplay,
    worker: WorkerId,
    rank: Rank,
}

impl Reader {
    async fn run(self, mut inbound: Streaming<pb::WorkerMessage>) {
        let why = loop {
            match inbound.message().await {
                Ok(Some(pb::WorkerMessage { message: Some(message) })) => self.on_message(message),
                Ok(Some(pb::WorkerMessage { message: None })) => {
                    tracing::warn!(worker = %self.rank, "the worker sent a message of an unknown kind");
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

    fn on_message(&self, message: FromWorker) {
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
            FromWorker::Leaving(_) => self.cluster.on_leaving(self.worker),
            FromWorker::Hello(_) => tracing::warn!(worker = %self.rank, "the worker said Hello twice"),
        }
    }
}
