//! The worker's stream to its conductor: dials and sends Hello, then passes commands to the engine and reports to the
//! conductor.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Streaming};
use tutti_kernels::cuda::GroupId;
use tutti_proto::{
    MAX_MESSAGE_BYTES, Rank,
    cluster::v1::{
        self as pb, conductor_message::Message as FromConductor, worker_gate_client::WorkerGateClient,
        worker_message::Message as ToConductor,
    },
};
use tutti_runtime::{
    Error, ErrorKind, VERSION, freed_memory, process_usage,
    shutdown::Shutdown,
    telemetry,
    tls::{self, ClusterTransport, Dial, roles::Role},
    token::Token,
};
use tutti_settings::WorkerSettings;
use tutti_transfer::Network;

use crate::{
    device,
    device_memory::LastReading,
    engine_thread::{self, Command, EngineChannels, Lifetime},
    group::Formation,
};

/// Number of messages to the conductor that may wait to be sent. If the outbox stays full, the engine soon stops
/// running steps.
pub(crate) const OUTBOX: usize = 64;
/// Number of received commands that may wait for the engine. Further commands wait in the stream.
pub(crate) const INBOX: usize = 1024;
/// Flow control window, in bytes: enough for a launch with a long prompt.
const WINDOW_BYTES: u32 = 4 << 20;
/// Interval between keep-alive pings, and time limit for the answer to a ping.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Pause between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after the first failed attempt to join. Each further pause is twice as long, up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between attempts to join.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Longest pause between attempts of a worker whose conductor has died: streams of clients wait for its successor.
const LONGEST_PAUSE_OF_SURVIVOR: Duration = Duration::from_millis(250);
/// Time for which joining is retried while the conductor reports the rank as taken. This time is long enough for the
/// conductor to detect the death of an earlier worker with the same rank.
const RANK_TAKEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum wait when the worker ends: for the conductor to close the stream, or for the engine to finish its step.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Address of the conductor, and this worker's identity.
#[derive(Clone, Debug)]
pub struct Joining {
    /// `unix:/path` or `http://host:port`.
    pub conductor: String,
    /// Rank in the cluster.
    pub rank: Rank,
    /// Join secret; `None` if the conductor requires none.
    pub join_token: Option<Token>,
    /// The rules for the encryption of connections in the cluster.
    pub transport: ClusterTransport,
    /// The state in which the worker joins.
    pub arrival: Arrival,
}

/// The state in which a worker joins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Arrival {
    /// The worker has loaded nothing yet.
    #[default]
    New,
    /// The worker has served a conductor that died, and keeps its engine.
    Survivor {
        /// As in [`pb::Hello::meeting_path`].
        meeting_path: String,
    },
}

/// Joins the conductor. Retries while the conductor is unavailable. An error means that a retry would not help, for
/// example because the conductor rejects this worker.
pub async fn join(joining: &Joining) -> Result<Joined, Error> {
    let dial = joining.transport.dial("conductor", &joining.conductor, Role::Conductor)?.tuned(|endpoint| {
        endpoint
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .tcp_nodelay(true)
    });
    let began = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        match try_join(&dial, joining).await {
            Err(error) if error.field() == Some("rank") && began.elapsed() > RANK_TAKEN_TIMEOUT => {
                return Err(Error::invalid("rank", error.message()));
            }
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                let retry_in_ms = pause.as_millis() as u64;
                let conductor = &joining.conductor;
                let longest = match joining.arrival {
                    Arrival::New => {
                        tracing::info!(conductor, %error, retry_in_ms, "cannot join yet");
                        LONGEST_PAUSE
                    }
                    // Tries often, so its lines would fill the log.
                    Arrival::Survivor { .. } => {
                        tracing::debug!(conductor, %error, retry_in_ms, "cannot join yet");
                        LONGEST_PAUSE_OF_SURVIVOR
                    }
                };
                sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
            outcome => return outcome,
        }
    }
}

/// A stream on which Hello and Welcome have been exchanged.
pub struct Joined {
    pub(crate) rank: Rank,
    pub(crate) inbound: Streaming<pb::ConductorMessage>,
    pub(crate) outbox: mpsc::Sender<pb::WorkerMessage>,
    pub(crate) settings: WorkerSettings,
    pub(crate) network: Network,
}

async fn try_join(dial: &Dial, joining: &Joining) -> Result<Joined, Error> {
    let channel = dial.connect().await.map_err(|e| {
        Error::unavailable(format!("cannot reach {}: {}", joining.conductor, tls::with_causes(&e)))
    })?;
    let mut client = WorkerGateClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let (outbox, outbound) = mpsc::channel(OUTBOX);
    let meeting_path = match &joining.arrival {
        Arrival::New => String::new(),
        Arrival::Survivor { meeting_path } => meeting_path.clone(),
    };
    let (rank, pid) = (joining.rank.0, std::process::id());
    let hello = pb::Hello { rank, pid, version: VERSION.into(), meeting_path };
    let hello = pb::WorkerMessage { message: Some(ToConductor::Hello(hello)) };
    outbox.send(hello).await.map_err(|_| Error::internal("a new channel is closed"))?;
    let mut request = Request::new(ReceiverStream::new(outbound));
    if let Some(token) = &joining.join_token {
        token.add_to(request.metadata_mut().as_mut());
    }
    let mut inbound = client.join(request).await.map_err(|status| broken(status, joining))?.into_inner();
    let first = inbound.message().await.map_err(|status| broken(status, joining))?;
    // A conductor that dies now has ended the stream.
    let first = first.ok_or_else(|| Error::unavailable("the conductor has ended the stream"))?;
    let Some(FromConductor::Welcome(welcome)) = first.message else {
        return Err(Error::internal("the conductor's first message is not a Welcome"));
    };
    let settings: WorkerSettings = serde_json::from_str(&welcome.settings_json).map_err(|e| {
        Error::internal(format!("cannot read the conductor's settings, which may be of another build: {e}"))
    })?;
    let host = welcome.host.parse().map_err(|_| {
        Error::internal(format!("the conductor sees this worker at {:?}, which is no address", welcome.host))
    })?;
    let connections = settings.connections.clone();
    let sockets = Network::sockets_beside(&joining.conductor);
    let network = Network { host, sockets, transport: joining.transport.clone(), connections };
    tracing::debug!(conductor = joining.conductor, "joined");
    Ok(Joined { rank: joining.rank, inbound, outbox, settings, network })
}

/// Returns the error of a call that got no answer, or the conductor's refusal.
fn broken(status: tonic::Status, joining: &Joining) -> Error {
    let Some(cause) = std::error::Error::source(&status) else { return status.into() };
    let url = &joining.conductor;
    let hint = match joining.transport.is_encrypted() || url.starts_with("unix:") {
        true => "",
        false => " (this process has no --cluster-tls-cert and speaks no TLS)",
    };
    Error::unavailable(format!("the connection to {url} broke: {}{hint}", tls::with_causes(cause)))
}

/// Serves until the conductor drops this worker, or until the worker is told to shut down and all its requests have
/// ended. An error of kind *unavailable* means that the conductor is gone and that no engine runs any more. If loading
/// failed, the error has already been sent to the conductor.
pub async fn serve(joined: Joined, shutdown: &Shutdown) -> Result<(), Error> {
    let Joined { rank, mut inbound, outbox, settings, network } = joined;
    let (commands, inbox) = mpsc::channel(INBOX);
    let (load, load_seen) = watch::channel(pb::WorkerLoad::default());
    let forwards = Arc::<AtomicU64>::default();
    let device_memory = LastReading::default();
    let heartbeats = Heartbeats {
        outbox: outbox.clone(),
        load: load_seen,
        forwards: forwards.clone(),
        device_memory: device_memory.clone(),
    };
    let heartbeats = heartbeats.start(shutdown);
    let group = match await_group(&mut inbound, &settings, rank, &network, &outbox).await {
        Ok(GroupAssignment::Single) => None,
        Ok(GroupAssignment::Ranks(group)) => Some(*group),
        outcome => {
            heartbeats.abort();
            return outcome.map(|_| ());
        }
    };
    let alone = group.is_none();
    let lifetime = Lifetime::OneConductor;
    let channels =
        EngineChannels { commands: inbox, outbox, load, forwards, device_memory, network, lifetime };
    let mut ended = engine_thread::start(settings, rank, group, channels)
        .map_err(|e| Error::internal(format!("cannot start the engine's thread: {e}")))?;
    let Passed { end, .. } = pass_commands(&mut inbound, &commands, &mut ended).await;
    // The engine ends once nobody can send it commands.
    drop(commands);
    heartbeats.abort();
    match end {
        ServeEnd::Dismissed(Ok(())) => Ok(()),
        // Returns without waiting for the engine, because the engine may be in a collective operation that the other
        // ranks never join.
        ServeEnd::Dismissed(Err(error)) | ServeEnd::Lost(error)
            if !alone && error.kind() == ErrorKind::Unavailable =>
        {
            Err(Error::internal(format!("{error}, which ends this rank's group")))
        }
        ServeEnd::Dismissed(Err(error)) | ServeEnd::Lost(error) => {
            match timeout(CLOSE_TIMEOUT, ended).await {
                Ok(_) => Err(error),
                Err(_) => Err(Error::internal(format!("{error}, and the engine does not end its step"))),
            }
        }
        ServeEnd::Engine(outcome) => {
            closed(&mut inbound).await;
            outcome
        }
    }
}

/// Waits until the conductor closes the stream of an engine that has ended. All senders of the outbox have been
/// dropped, so this side of the stream is closed. The conductor reads the remaining messages and then closes its side.
pub(crate) async fn closed(inbound: &mut Streaming<pb::ConductorMessage>) {
    let closed = async { while let Ok(Some(_)) = inbound.message().await {} };
    if timeout(CLOSE_TIMEOUT, closed).await.is_err() {
        tracing::warn!("the conductor does not close the stream");
    }
}

/// Returns a function that is true if the engine has no request and has run no step since the function's last call.
fn rests(load: watch::Receiver<pb::WorkerLoad>) -> impl FnMut() -> bool {
    let mut steps = 0;
    move || {
        let load = *load.borrow();
        // The ranks behind a leader report no requests, only steps.
        let last = std::mem::replace(&mut steps, load.steps);
        load.steps > 0 && load.steps == last && load.running + load.waiting == 0
    }
}

/// Outcome of waiting for a group.
pub(crate) enum GroupAssignment {
    /// The worker computes without a group.
    Single,
    Ranks(Box<Formation>),
    /// The conductor drains this worker.
    Drained,
}

/// Waits until all ranks of the group have joined.
pub(crate) async fn await_group(
    inbound: &mut Streaming<pb::ConductorMessage>,
    settings: &WorkerSettings,
    rank: Rank,
    network: &Network,
    outbox: &mpsc::Sender<pb::WorkerMessage>,
) -> Result<GroupAssignment, Error> {
    if settings.tensor_parallel.tp <= 1 {
        return Ok(GroupAssignment::Single);
    }
    match inbound.message().await.map_err(why_ended)?.and_then(|message| message.message) {
        Some(FromConductor::FormGroup(group)) => {
            let deadline = Duration::from_secs(settings.tensor_parallel.collective_timeout.into());
            let id = if group.rank == 0 { group_id(settings, rank).await? } else { None };
            let group = Formation::new(group, deadline, network.clone(), id)?;
            if let Some(listening) = group.listening()? {
                let message = pb::WorkerMessage { message: Some(ToConductor::GroupListening(listening)) };
                // Ignored: if the stream has ended, the next receive reports it.
                let _ = outbox.send(message).await;
            }
            Ok(GroupAssignment::Ranks(Box::new(group)))
        }
        Some(FromConductor::Drain(_)) => Ok(GroupAssignment::Drained),
        Some(_) => Err(Error::internal("the conductor sent another message before it formed the group")),
        None => Err(Error::unavailable("the conductor has closed the stream")),
    }
}

/// Makes the id of a group on GPUs whose leader is this worker. Runs on a thread of its own, so that heartbeats
/// continue while the driver opens, which may take seconds.
async fn group_id(settings: &WorkerSettings, rank: Rank) -> Result<Option<GroupId>, Error> {
    let settings = settings.clone();
    let made = tokio::task::spawn_blocking(move || device::group_id(&settings, rank)).await;
    made.map_err(|e| Error::internal(format!("cannot make the id of a group: {e}")))?
}

/// The end of a service.
#[derive(Debug)]
pub(crate) enum ServeEnd {
    /// The engine has drained or failed. Its last messages may still be unsent.
    Engine(Result<(), Error>),
    /// The conductor has let this worker go: without an error if it has told the worker to leave, with one if it has
    /// ended the stream. The worker sends no further message.
    Dismissed(Result<(), Error>),
    /// The stream broke, because the conductor has died or cannot be reached.
    Lost(Error),
}

/// The messages of one conductor to the engine.
pub(crate) struct Passed {
    pub end: ServeEnd,
    /// True if the conductor has launched a graph.
    pub has_launched: bool,
}

/// Passes the conductor's messages to the engine until one side ends.
pub(crate) async fn pass_commands(
    inbound: &mut Streaming<pb::ConductorMessage>,
    commands: &mpsc::Sender<Command>,
    ended: &mut oneshot::Receiver<Result<(), Error>>,
) -> Passed {
    let mut has_launched = false;
    let end = loop {
        let message = tokio::select! {
            message = inbound.message() => message,
            outcome = &mut *ended => {
                let gone = || Err(Error::internal("the engine's thread is gone"));
                break ServeEnd::Engine(outcome.unwrap_or_else(|_| gone()));
            }
        };
        let message = match message {
            Ok(Some(message)) => message,
            // A conductor that dies breaks the stream. One that closes it is alive.
            Ok(None) => {
                break ServeEnd::Dismissed(Err(Error::unavailable("the conductor has closed the stream")));
            }
            Err(status) if is_from_conductor(&status) => break ServeEnd::Dismissed(Err(why_ended(status))),
            Err(status) => break ServeEnd::Lost(why_ended(status)),
        };
        let command = match message.message {
            Some(FromConductor::Launch(graph)) => {
                has_launched = true;
                Command::Launch(Box::new(graph))
            }
            Some(FromConductor::Cancel(pb::CancelGraph { key: Some(key) })) => Command::Cancel(key.into()),
            // No graph has been launched, so the worker need not wait until loading finishes.
            Some(FromConductor::Drain(_)) if !has_launched => break ServeEnd::Dismissed(Ok(())),
            Some(FromConductor::Drain(_)) => Command::Drain,
            Some(FromConductor::Cancel(_) | FromConductor::Welcome(_) | FromConductor::FormGroup(_))
            | None => {
                tracing::warn!("ignored an unexpected message from the conductor");
                continue;
            }
        };
        // Waits while the inbox is full. The result is ignored: if the engine has ended, the next iteration notices it.
        let _ = commands.send(command).await;
    };
    Passed { end, has_launched }
}

/// True if the conductor has sent this status. A broken connection has a cause on this side.
fn is_from_conductor(status: &tonic::Status) -> bool {
    std::error::Error::source(status).is_none()
}

/// Returns the error of a stream that has ended: *invalid argument* if the conductor rejected this worker, else
/// *unavailable*.
fn why_ended(status: tonic::Status) -> Error {
    let what = if is_from_conductor(&status) {
        "the conductor ended the stream"
    } else {
        "the stream to the conductor broke"
    };
    let message = format!("{what}: {}", status.message());
    let error = Error::from(status);
    if error.kind() == ErrorKind::InvalidArgument { error } else { Error::unavailable(message) }
}

/// Sends heartbeats independently of the engine.
pub(crate) struct Heartbeats {
    pub outbox: mpsc::Sender<pb::WorkerMessage>,
    pub load: watch::Receiver<pb::WorkerLoad>,
    pub forwards: Arc<AtomicU64>,
    pub device_memory: LastReading,
}

impl Heartbeats {
    /// Starts a task that sends heartbeats, and gives freed memory back while the engine rests.
    pub fn start(self, shutdown: &Shutdown) -> JoinHandle<()> {
        let memory = freed_memory::give_back(rests(self.load.clone()));
        let heartbeats = self.run(shutdown.clone());
        tokio::spawn(async move {
            tokio::join!(heartbeats, memory);
        })
    }

    /// Sends the load at a fixed interval, and one `Leaving` when the worker is told to shut down.
    async fn run(mut self, shutdown: Shutdown) {
        let mut pace = interval(HEARTBEAT_INTERVAL);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut staying, mut reported) = (true, Instant::now());
        loop {
            tokio::select! {
                _ = pace.tick() => {}
                () = shutdown.begun(), if staying => {
                    staying = false;
                    let leaving = pb::WorkerMessage { message: Some(ToConductor::Leaving(pb::Leaving {})) };
                    if self.outbox.send(leaving).await.is_err() {
                        return;
                    }
                }
            }
            let forwards = self.forwards.load(Ordering::Relaxed);
            if self.load.has_changed().unwrap_or(false) {
                self.load.mark_unchanged();
                reported = Instant::now();
            }
            // The ranks that follow a leader send no other load.
            // No step has ended since the load was reported, so what waited then still waits.
            let load = self.load.borrow().aged(reported.elapsed());
            let load = pb::WorkerLoad { log_lines_lost: telemetry::log_lines_lost(), ..load };
            let (usage, device_memory) = (Some(process_usage::read()), self.device_memory.get());
            let beat = pb::Heartbeat { load: Some(load), forwards, usage, device_memory };
            let message = pb::WorkerMessage { message: Some(ToConductor::Heartbeat(beat)) };
            // If the outbox is full, the heartbeat is dropped. The reports in the outbox also show that the worker is
            // alive.
            if let Err(mpsc::error::TrySendError::Closed(_)) = self.outbox.try_send(message) {
                return;
            }
        }
    }
}
