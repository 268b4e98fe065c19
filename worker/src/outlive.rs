//! A worker that outlives its conductor: it serves one conductor after another with one engine.
//!
//! When a conductor dies, the weights, the pages and the prefix cache stay. The requests do not: their streams have
//! ended with the conductor, and routers send them again to its successor. So the engine cancels them and becomes idle,
//! and the worker joins the successor with its model loaded. Messages of the engine go through a relay, which passes
//! them to the present conductor and drops them while there is none.

mod relay;

use std::{
    net::IpAddr,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until, timeout_at},
};
use tutti_proto::cluster::v1::{self as pb, worker_message::Message as ToConductor};
use tutti_runtime::{Error, shutdown::Shutdown};
use tutti_settings::WorkerSettings;

use self::relay::{EngineMessages, Relay};
use crate::{
    device_memory::LastReading,
    engine_thread::{self, Command, EngineChannels, Lifetime},
    join::{self, Arrival, GroupAssignment, Heartbeats, INBOX, Joined, Joining, OUTBOX, Passed, ServeEnd},
};

/// Maximum number of tokens in one message of prompts.
const TOKENS_PER_MESSAGE: usize = 1 << 18;

/// Joins and serves one conductor after another. Ends if a conductor lets this worker go, or if none comes for
/// `patience` after the death of one. The outer error comes from joining, the inner one from serving.
pub async fn serve_all(
    mut joining: Joining,
    patience: Duration,
    shutdown: &Shutdown,
) -> Result<Result<(), Error>, Error> {
    let mut kept: Option<KeptEngine> = None;
    // While the first conductor lives, joining it takes as long as it takes.
    let mut deadline = None;
    loop {
        joining.arrival = kept.as_ref().map_or(Arrival::New, KeptEngine::arrival);
        let joined = tokio::select! {
            joined = join::join(&joining) => joined?,
            outcome = engine_ended(&mut kept) => return Ok(outcome),
            () = shutdown.begun() => return Ok(Ok(())),
            () = passed(deadline) => return Err(nobody_came(patience)),
        };
        let orphaned = match serve(joined, kept.take(), shutdown).await {
            Served::Ended(outcome) => return Ok(outcome),
            Served::Orphaned(orphaned) => orphaned,
        };
        let Orphaned { mut engine, why, has_launched } = *orphaned;
        tracing::warn!(%why, wait_s = patience.as_secs(), "the conductor is gone: waiting for the next one");
        let until = Instant::now() + patience;
        deadline = Some(until);
        if has_launched {
            // The engine may hang in a step.
            let abandoned = timeout_at(until, engine.abandon()).await;
            abandoned.unwrap_or_else(|_| Err(nobody_came(patience)))?;
        }
        kept = Some(engine);
    }
}

/// Completes once the deadline has passed, and never without one.
async fn passed(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Completes with the outcome of a kept engine that ends, which is a fault while there is no conductor.
async fn engine_ended(kept: &mut Option<KeptEngine>) -> Result<(), Error> {
    match kept {
        Some(engine) => (&mut engine.ended).await.unwrap_or_else(|_| Err(gone())),
        None => std::future::pending().await,
    }
}

fn nobody_came(patience: Duration) -> Error {
    Error::internal(format!("no conductor has come for {} s, so this worker ends", patience.as_secs()))
}

fn gone() -> Error {
    Error::internal("the engine's thread is gone")
}

/// The end of a service.
enum Served {
    /// The worker ends.
    Ended(Result<(), Error>),
    /// The conductor is gone, and the engine stays.
    Orphaned(Box<Orphaned>),
}

struct Orphaned {
    engine: KeptEngine,
    why: Error,
    /// True if the conductor has launched a graph.
    has_launched: bool,
}

/// An engine that outlives its conductor.
struct KeptEngine {
    settings: WorkerSettings,
    /// The address at which other workers reach this one.
    host: IpAddr,
    /// As in [`pb::Hello::meeting_path`].
    meeting_path: String,
    /// True if this rank schedules, which ranks behind a leader do not.
    schedules: bool,
    commands: mpsc::Sender<Command>,
    ended: oneshot::Receiver<Result<(), Error>>,
    messages: EngineMessages,
    /// Prompts of the requests that were cancelled when the last conductor died.
    prompts: Vec<pb::HeldPrompt>,
    load: watch::Receiver<pb::WorkerLoad>,
    forwards: Arc<AtomicU64>,
    device_memory: LastReading,
}

impl KeptEngine {
    fn heartbeats(&self, outbox: mpsc::Sender<pb::WorkerMessage>) -> Heartbeats {
        let (load, forwards, device_memory) =
            (self.load.clone(), self.forwards.clone(), self.device_memory.clone());
        Heartbeats { outbox, load, forwards, device_memory }
    }

    fn arrival(&self) -> Arrival {
        Arrival::Survivor { meeting_path: self.meeting_path.clone() }
    }

    /// Refuses a conductor whose workers hold something else than this engine.
    fn check(&self, settings: &WorkerSettings, host: IpAddr) -> Result<(), Error> {
        if self.settings == *settings && self.host == host {
            return Ok(());
        }
        Err(Error::internal(
            "the conductor has other settings than the one for which this worker loaded its model",
        ))
    }

    /// Cancels all graphs, and drops the engine's messages until it is idle.
    async fn abandon(&mut self) -> Result<(), Error> {
        if !self.schedules {
            return Ok(());
        }
        let (answer, mut answered) = oneshot::channel();
        let abandon = Command::Abandon(answer);
        let outcome = tokio::select! {
            prompts = async {
                // Ignored: if the engine has ended, nothing answers.
                let _ = self.commands.send(abandon).await;
                (&mut answered).await
            } => prompts.map_err(|_| gone()),
            () = self.messages.drop_all() => Err(gone()),
            outcome = &mut self.ended => Err(outcome.unwrap_or_else(|_| Err(gone())).err().unwrap_or_else(gone)),
        };
        self.prompts = outcome?;
        self.messages.drop_queued();
        Ok(())
    }

    /// The engine's messages to a conductor that it joins with its model loaded: `Ready`, and the prompts of requests.
    fn greetings(&mut self) -> Vec<pb::WorkerMessage> {
        let Some(ready) = self.messages.ready.clone() else { return Vec::new() };
        let mut messages = vec![ToConductor::Ready(ready)];
        let (mut prompts, mut tokens) = (Vec::new(), 0);
        for prompt in self.prompts.drain(..) {
            tokens += prompt.tokens.len();
            prompts.push(prompt);
            if tokens >= TOKENS_PER_MESSAGE {
                let prompts = std::mem::take(&mut prompts);
                messages.push(ToConductor::HeldPrompts(pb::HeldPrompts { prompts }));
                tokens = 0;
            }
        }
        if !prompts.is_empty() {
            messages.push(ToConductor::HeldPrompts(pb::HeldPrompts { prompts }));
        }
        messages.into_iter().map(|message| pb::WorkerMessage { message: Some(message) }).collect()
    }
}

/// Serves one conductor, with the engine of an earlier one if there is one.
async fn serve(joined: Joined, kept: Option<KeptEngine>, shutdown: &Shutdown) -> Served {
    match kept {
        Some(engine) => match engine.check(&joined.settings, joined.network.host) {
            Ok(()) => go_on(joined, engine, shutdown).await,
            Err(error) => Served::Ended(Err(error)),
        },
        None => begin(joined, shutdown).await,
    }
}

/// Starts an engine, and serves its first conductor.
async fn begin(mut joined: Joined, shutdown: &Shutdown) -> Served {
    let (commands, inbox) = mpsc::channel(INBOX);
    let (messages_in, messages) = mpsc::channel(OUTBOX);
    let (load, load_seen) = watch::channel(pb::WorkerLoad::default());
    let forwards = Arc::<AtomicU64>::default();
    let Joined { rank, inbound, outbox, settings, network } = &mut joined;
    let device_memory = LastReading::default();
    let heartbeats = Heartbeats {
        outbox: outbox.clone(),
        load: load_seen.clone(),
        forwards: forwards.clone(),
        device_memory: device_memory.clone(),
    };
    let heartbeats = heartbeats.start(shutdown);
    let group = join::await_group(inbound, settings, *rank, network, outbox).await;
    heartbeats.abort();
    let formation = match group {
        Ok(GroupAssignment::Single) => None,
        Ok(GroupAssignment::Ranks(group)) => Some(*group),
        Ok(GroupAssignment::Drained) => return Served::Ended(Ok(())),
        Err(error) => return Served::Ended(Err(error)),
    };
    let meeting_path = formation.as_ref().and_then(|group| group.meeting_path());
    let meeting_path = meeting_path.map_or_else(String::new, |path| path.display().to_string());
    let schedules = formation.as_ref().is_none_or(|group| group.leads());
    let channels = EngineChannels {
        commands: inbox,
        outbox: messages_in,
        load,
        forwards: forwards.clone(),
        device_memory: device_memory.clone(),
        network: network.clone(),
        lifetime: Lifetime::ManyConductors,
    };
    let ended = match engine_thread::start(settings.clone(), *rank, formation, channels) {
        Ok(ended) => ended,
        Err(error) => {
            let error = Error::internal(format!("cannot start the engine's thread: {error}"));
            return Served::Ended(Err(error));
        }
    };
    let engine = KeptEngine {
        settings: settings.clone(),
        host: network.host,
        meeting_path,
        schedules,
        commands,
        ended,
        messages: EngineMessages::new(messages),
        prompts: Vec::new(),
        load: load_seen,
        forwards,
        device_memory,
    };
    go_on(joined, engine, shutdown).await
}

/// Serves a conductor with a running engine, until one of the two ends.
async fn go_on(joined: Joined, mut engine: KeptEngine, shutdown: &Shutdown) -> Served {
    let Joined { mut inbound, outbox, .. } = joined;
    let heartbeats = engine.heartbeats(outbox.clone()).start(shutdown);
    let greetings = engine.greetings();
    let relay = Relay::start(engine.messages, greetings, outbox);
    let passed = join::pass_commands(&mut inbound, &engine.commands, &mut engine.ended).await;
    let Passed { end, has_launched } = passed;
    heartbeats.abort();
    match end {
        ServeEnd::Lost(why) => {
            engine.messages = relay.stop().await;
            Served::Orphaned(Box::new(Orphaned { engine, why, has_launched }))
        }
        // Ends without waiting for the engine: the process ends, and the conductor expects nothing more. It would
        // refuse this process if it came again.
        ServeEnd::Dismissed(outcome) => Served::Ended(outcome),
        ServeEnd::Engine(outcome) => {
            // The relay passes on what the engine has left in the outbox, and then closes the stream.
            relay.finish().await;
            join::closed(&mut inbound).await;
            Served::Ended(outcome)
        }
    }
}

#[cfg(test)]
mod tests;
