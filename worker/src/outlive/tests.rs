//! A worker on a simulated device, and fake conductors at its Unix socket.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
};

use tempfile::TempDir;
use tokio::{net::UnixListener, runtime::Runtime, task::JoinHandle, time::timeout};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Server};
use tutti_proto::{
    Rank,
    cluster::v1::{
        conductor_message::Message as ToWorker,
        worker_gate_server::{WorkerGate, WorkerGateServer},
    },
};
use tutti_runtime::{ErrorKind, tls::ClusterTransport};
use tutti_settings::{DeviceChoice, SimProfile, SimSettings};

use super::*;
use crate::device;

/// Number of tokens of a request that runs until it is cancelled.
const LONG: u32 = 2000;
/// A time that no test waits for.
const PATIENT: Duration = Duration::from_secs(600);

/// Awaits what happens soon. The test fails with `what` if it does not.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future).await.unwrap_or_else(|_| panic!("{what} does not happen"))
}

fn settings() -> WorkerSettings {
    let sim = SimSettings { profile: SimProfile::Instant, fixed_us: Some(2000), ..SimSettings::default() };
    let model_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tutti-tiny/checkpoint");
    WorkerSettings { model_dir, sim, ..device::tests::settings(DeviceChoice::Sim) }
}

/// A conductor with one service, whose streams the test reads and writes.
struct Conductor {
    /// `None` once the conductor is dropped.
    runtime: Option<Runtime>,
    streams: mpsc::Receiver<WorkerStream>,
}

/// The conductor's end of a worker's stream.
struct WorkerStream {
    inbound: Streaming<pb::WorkerMessage>,
    outbound: mpsc::Sender<Result<pb::ConductorMessage, Status>>,
}

struct Gate {
    settings: WorkerSettings,
    streams: mpsc::Sender<WorkerStream>,
}

#[tonic::async_trait]
impl WorkerGate for Gate {
    type JoinStream = ReceiverStream<Result<pb::ConductorMessage, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<pb::WorkerMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let (outbound, messages) = mpsc::channel(8);
        let stream = WorkerStream { inbound: request.into_inner(), outbound };
        let settings_json = serde_json::to_string(&self.settings).unwrap();
        let host = IpAddr::from(Ipv4Addr::LOCALHOST).to_string();
        stream.say(ToWorker::Welcome(pb::Welcome { worker: 1, settings_json, host })).await;
        self.streams.send(stream).await.map_err(|_| Status::internal("the test has ended"))?;
        Ok(Response::new(ReceiverStream::new(messages)))
    }
}

impl Conductor {
    /// A conductor at the socket of `directory`, whose workers get these settings.
    fn start(directory: &TempDir, settings: WorkerSettings) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (runtime, (streams, joined)) = (runtime.unwrap(), mpsc::channel(8));
        let path = socket(directory);
        // Ignored: the first conductor finds none.
        let _ = std::fs::remove_file(&path);
        let incoming = {
            let _context = runtime.enter();
            UnixListenerStream::new(UnixListener::bind(path).unwrap())
        };
        let gate = WorkerGateServer::new(Gate { settings, streams });
        runtime.spawn(Server::builder().add_service(gate).serve_with_incoming(incoming));
        Self { runtime: Some(runtime), streams: joined }
    }

    /// The next worker that joins, and its `Hello`.
    async fn joined(&mut self) -> (WorkerStream, pb::Hello) {
        let mut stream = soon("a worker joins", self.streams.recv()).await.unwrap();
        let ToConductor::Hello(hello) = stream.hear().await else { panic!("the first message is no Hello") };
        (stream, hello)
    }

    /// Breaks all connections, as the end of a process does.
    fn die(self) {
        drop(self);
    }
}

impl Drop for Conductor {
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

impl WorkerStream {
    async fn say(&self, message: ToWorker) {
        self.outbound.send(Ok(pb::ConductorMessage { message: Some(message) })).await.unwrap();
    }

    /// The worker's next message that is neither a heartbeat nor the progress of loading.
    async fn hear(&mut self) -> ToConductor {
        loop {
            let message = soon("a message", self.inbound.message()).await.unwrap().unwrap();
            match message.message.unwrap() {
                ToConductor::Heartbeat(_) | ToConductor::LoadProgress(_) => {}
                message => return message,
            }
        }
    }

    async fn ready(&mut self) -> pb::Ready {
        let ToConductor::Ready(ready) = self.hear().await else { panic!("the worker is not ready") };
        ready
    }

    async fn report(&mut self) -> pb::StepReport {
        let ToConductor::StepReport(report) = self.hear().await else { panic!("the message is no report") };
        report
    }

    async fn launch(&self, request: u64, prompt: &[u32], max_tokens: u32) {
        let spec = pb::RequestSpec {
            prompt: prompt.to_vec(),
            sampling: Some(pb::SamplingParams::GREEDY),
            stopping: Some(pb::Stopping { max_tokens, ignore_eos: true, ..Default::default() }),
            ..Default::default()
        };
        let key = pb::GraphKey { request, ..Default::default() };
        let graph =
            pb::LaunchGraph { key: Some(key), walks: vec![0, 1], spec: Some(spec), ..Default::default() };
        self.say(ToWorker::Launch(graph)).await;
    }
}

/// A worker that serves one conductor after another.
struct Worker {
    serving: JoinHandle<Result<Result<(), Error>, Error>>,
    shutdown: Shutdown,
}

impl Worker {
    fn start(directory: &TempDir, patience: Duration) -> Self {
        let joining = Joining {
            conductor: format!("unix:{}", socket(directory).display()),
            rank: Rank(0),
            join_token: None,
            transport: ClusterTransport::default(),
            arrival: Arrival::New,
        };
        let shutdown = Shutdown::default();
        let begun = shutdown.clone();
        let serving = tokio::spawn(async move { serve_all(joining, patience, &begun).await });
        Self { serving, shutdown }
    }

    async fn ended(self) -> Result<Result<(), Error>, Error> {
        soon("the worker ends", self.serving).await.unwrap()
    }
}

fn socket(directory: &TempDir) -> PathBuf {
    directory.path().join("workers.sock")
}

#[tokio::test]
async fn an_engine_goes_on_with_the_next_conductor() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = Conductor::start(&directory, settings());
    let worker = Worker::start(&directory, PATIENT);
    let (mut stream, hello) = first.joined().await;
    assert_eq!(hello.meeting_path, "");
    let ready = stream.ready().await;
    stream.launch(1, &[5, 6, 7], LONG).await;
    stream.report().await;
    first.die();

    let mut second = Conductor::start(&directory, settings());
    let (mut stream, _) = second.joined().await;
    assert_eq!(stream.ready().await, ready);
    let ToConductor::HeldPrompts(held) = stream.hear().await else { panic!("the prompts are not told") };
    assert_eq!(held.prompts.iter().map(|prompt| &prompt.tokens[..]).collect::<Vec<_>>(), [[5, 6, 7]]);
    // Nothing of the first conductor's request comes, and the engine has room for another one.
    stream.launch(2, &[8], 3).await;
    loop {
        let report = stream.report().await;
        assert!(report.rows.iter().all(|row| row.key.unwrap().request == 2), "{report:?}");
        if !report.completions.is_empty() {
            break;
        }
    }
    stream.say(ToWorker::Drain(pb::Drain {})).await;
    assert_eq!(worker.ended().await, Ok(Ok(())));
}

#[tokio::test]
async fn a_worker_that_a_living_conductor_lets_go_ends_and_does_not_come_again() {
    let statuses = [Some(Status::internal("a rank of its group was lost")), None];
    for status in statuses {
        let directory = tempfile::tempdir().unwrap();
        let mut conductor = Conductor::start(&directory, settings());
        let worker = Worker::start(&directory, PATIENT);
        let (mut stream, _) = conductor.joined().await;
        stream.ready().await;
        if let Some(status) = status.clone() {
            stream.outbound.send(Err(status)).await.unwrap();
        }
        let WorkerStream { inbound: _inbound, outbound } = stream;
        drop(outbound);
        let error = worker.ended().await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let why = status.map_or("the conductor has closed the stream", |_| "a rank of its group was lost");
        assert!(error.message().contains(why), "{error}");
        assert!(conductor.streams.try_recv().is_err(), "it has joined again");
    }
}

#[tokio::test]
async fn a_worker_without_a_successor_gives_up() {
    let directory = tempfile::tempdir().unwrap();
    let mut conductor = Conductor::start(&directory, settings());
    let worker = Worker::start(&directory, Duration::from_millis(50));
    let (mut stream, _) = conductor.joined().await;
    stream.ready().await;
    conductor.die();
    let error = worker.ended().await.unwrap_err();
    assert!(error.message().contains("no conductor has come"), "{error}");
}

#[tokio::test]
async fn a_worker_that_waits_for_a_successor_ends_at_a_signal() {
    let directory = tempfile::tempdir().unwrap();
    let mut conductor = Conductor::start(&directory, settings());
    let worker = Worker::start(&directory, PATIENT);
    let (mut stream, _) = conductor.joined().await;
    stream.ready().await;
    conductor.die();
    worker.shutdown.begin();
    assert_eq!(worker.ended().await, Ok(Ok(())));
}

#[tokio::test]
async fn a_successor_with_other_settings_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = Conductor::start(&directory, settings());
    let worker = Worker::start(&directory, PATIENT);
    let (mut stream, _) = first.joined().await;
    stream.ready().await;
    first.die();
    let mut second = Conductor::start(&directory, WorkerSettings { max_waiting_requests: 2, ..settings() });
    let _stream = second.joined().await;
    let error = worker.ended().await.unwrap().unwrap_err();
    assert!(error.message().contains("the conductor has other settings"), "{error}");
}

#[tokio::test]
async fn long_prompts_are_told_in_several_messages() {
    let (messages_in, messages) = mpsc::channel(1);
    drop(messages_in);
    let (commands, _inbox) = mpsc::channel(1);
    let prompt = pb::HeldPrompt { tokens: vec![1; TOKENS_PER_MESSAGE / 2 + 1], ..Default::default() };
    let mut engine = KeptEngine {
        settings: settings(),
        host: Ipv4Addr::LOCALHOST.into(),
        meeting_path: String::new(),
        schedules: true,
        commands,
        ended: oneshot::channel().1,
        messages: EngineMessages::new(messages),
        prompts: vec![prompt; 5],
        load: watch::channel(pb::WorkerLoad::default()).1,
        forwards: Arc::default(),
        device_memory: LastReading::default(),
    };
    // An engine that is still loading tells nothing.
    assert!(engine.greetings().is_empty());
    engine.messages.ready = Some(pb::Ready::default());
    let told = engine.greetings().into_iter().map(|message| match message.message {
        Some(ToConductor::Ready(_)) => 0,
        Some(ToConductor::HeldPrompts(held)) => held.prompts.len(),
        other => panic!("{other:?}"),
    });
    assert_eq!(told.collect::<Vec<_>>(), [0, 2, 2, 1]);
}
