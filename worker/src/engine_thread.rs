//! The engine's thread, with bounded commands in and bounded reports out.
//!
//! The thread loads the model, runs steps, and plans between two steps. Meanwhile a task ([`serve_handle`]) takes
//! commands and makes reports, so that the engine's thread spends no time on them. This task and the transfers between
//! workers run on a second thread. The thread of the conductor's stream only passes messages on, so neither a launch
//! with a long prompt, a large report nor a transfer delays a heartbeat.
//!
//! The outputs of `PENDING_OUTPUTS` steps may wait for the task. The task sends a report only when the outbox has room.
//! If the conductor stops reading, the steps therefore stop soon; the task still takes commands. A panic ends the
//! process at once, because heartbeats must not continue while the engine is broken.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use tokio::{
    runtime::{self, Handle},
    sync::{mpsc, oneshot, watch},
};
use tutti_engine::{DeviceLoop, EngineHandle, StepOutput};
use tutti_proto::{
    GraphKey, Rank,
    cluster::v1::{self as pb, worker_message::Message as ToConductor},
};
use tutti_runtime::{Error, exit, request_id};
use tutti_settings::WorkerSettings;
use tutti_transfer::{Endpoint, Hosts, Network};

use crate::{
    device_memory::LastReading,
    group::{Formation, Member},
    live_graphs::LiveGraphs,
    loading::{self, Loaded},
    request_traces::RequestTraces,
    step_trace::StepTrace,
};

/// Number of step outputs that may wait for the task. The number is large enough that short steps continue while a busy
/// machine delays the task.
pub(crate) const PENDING_OUTPUTS: usize = 16;

/// A command to the engine.
#[derive(Debug)]
pub enum Command {
    /// Run this graph.
    Launch(Box<pb::LaunchGraph>),
    /// Cancel this graph.
    Cancel(GraphKey),
    /// Finish all graphs, then end.
    Drain,
    /// Cancel all graphs, because their conductor is gone. Once the engine holds none and all reports are in the
    /// outbox, it answers with the graphs' prompts.
    Abandon(oneshot::Sender<Vec<pb::HeldPrompt>>),
}

/// The conductors that an engine serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// One conductor.
    #[default]
    OneConductor,
    /// One conductor after another: the engine keeps the prompts of its graphs for [`Command::Abandon`].
    ManyConductors,
}

/// The engine's channels to and from the stream.
#[derive(Debug)]
pub struct EngineChannels {
    /// Commands in the conductor's order.
    pub commands: mpsc::Receiver<Command>,
    /// Messages to the conductor.
    pub outbox: mpsc::Sender<pb::WorkerMessage>,
    /// Load after the last step, for heartbeats.
    pub load: watch::Sender<pb::WorkerLoad>,
    /// Number of forward passes that have returned. Heartbeats report this number even while a step runs.
    pub forwards: Arc<AtomicU64>,
    /// Memory of the device, which is read from the moment on at which the device is known.
    pub device_memory: LastReading,
    /// This worker's network, for connections to other workers.
    pub network: Network,
    /// The conductors that the engine serves.
    pub lifetime: Lifetime,
}

/// Starts the engine's thread. The thread loads the model, sends `Ready` or `LoadFailed`, and runs steps until the
/// engine has drained or `channels.commands` closes. On a TP rank that is not the leader, the thread instead runs the
/// leader's plans until the leader leaves. The returned receiver yields the thread's outcome.
pub fn start(
    settings: WorkerSettings,
    rank: Rank,
    group: Option<Formation>,
    channels: EngineChannels,
) -> io::Result<oneshot::Receiver<Result<(), Error>>> {
    let (done, ended) = oneshot::channel();
    let runtime =
        runtime::Builder::new_multi_thread().worker_threads(1).thread_name("reports").enable_all().build()?;
    thread::Builder::new().name("engine".into()).spawn(move || {
        let _guard = ExitOnPanic;
        // Ignored: sending fails only if the receiver is dropped, which happens only when the process ends.
        let _ = done.send(run(&settings, rank, group.as_ref(), channels, runtime.handle()));
        // Running tasks are not awaited: a drained engine has no transfer in progress, and a failed engine waits for no
        // transfer.
        runtime.shutdown_background();
    })?;
    Ok(ended)
}

fn run(
    settings: &WorkerSettings,
    rank: Rank,
    group: Option<&Formation>,
    channels: EngineChannels,
    runtime: &Handle,
) -> Result<(), Error> {
    let outbox = channels.outbox.clone();
    let on_progress = |progress: pb::LoadProgress| {
        let end = progress.bytes_done >= progress.bytes_total;
        let message = pb::WorkerMessage { message: Some(ToConductor::LoadProgress(progress)) };
        // Intermediate progress is dropped if the outbox is full. The last message waits for room.
        let _ = if end { outbox.blocking_send(message).ok() } else { outbox.try_send(message).ok() };
    };
    let mut loaded = loading::load_worker(settings, rank, group, &channels.device_memory, on_progress);
    let greeting = match &mut loaded {
        Ok(Loaded::Engine(engine)) => {
            engine.count_forwards(channels.forwards.clone());
            channels.load.send_replace(engine.load());
            ToConductor::Ready(loading::ready(engine, settings))
        }
        Ok(Loaded::Follower(member)) => ToConductor::Ready(loading::ready_to_follow(member)),
        Err(error) => ToConductor::LoadFailed(pb::LoadFailed { fault: Some(error.clone().into()) }),
    };
    // Ignored: sending fails only if the outbox is closed, because the process is ending.
    let _ = channels.outbox.blocking_send(pb::WorkerMessage { message: Some(greeting) });
    let mut engine = match loaded? {
        Loaded::Engine(engine) => *engine,
        Loaded::Follower(member) => return follow(*member, &channels, runtime),
    };
    if let Some(path) = &settings.trace.trace_steps {
        engine.set_observer(Box::new(StepTrace::start(path, rank, &engine, settings.engine.max_step_tokens)));
    }
    let (device_loop, handle) = engine.split();
    run_engine(device_loop, (rank, handle), channels, runtime)
}

/// Runs the leader's plans, and counts forward passes for heartbeats.
fn follow(member: Member, channels: &EngineChannels, runtime: &Handle) -> Result<(), Error> {
    let kv_pages_total = member.kv().pages.saturating_sub(1) as u32;
    let (group_rank, layout) = (member.group_rank(), member.model().page_layout());
    let hosts = Hosts { own: channels.network.clone(), leader: member.leader() };
    let mut connector = Endpoint::follower(group_rank, hosts, &layout, channels.load.clone(), runtime);
    member.follow(&mut connector, |steps| {
        channels.forwards.store(steps, Ordering::Relaxed);
        // Only these fields are changed, because the connector keeps its counts of transfers in the same load.
        channels.load.send_modify(|load| (load.steps, load.kv_pages_total) = (steps, kv_pages_total));
    })
}

/// Runs the engine until it has drained or `channels.commands` closes. When a drained engine returns, all of its
/// reports are in the outbox.
pub(crate) fn run_engine(
    mut device_loop: DeviceLoop,
    (rank, handle): (Rank, EngineHandle),
    channels: EngineChannels,
    runtime: &Handle,
) -> Result<(), Error> {
    let (sender, outputs) = mpsc::channel(PENDING_OUTPUTS);
    let serving = runtime.spawn(serve_handle(handle, rank, channels, outputs));
    // A guard within the task would also end the process if another panic drops the runtime, as a failed test does.
    let serving = runtime.spawn(async {
        if serving.await.is_err_and(|error| error.is_panic()) {
            exit::after_logs(exit::INTERNAL);
        }
    });
    let ended = step_until_done(&mut device_loop, &sender);
    drop(sender);
    // Ignored: waiting fails if the task has panicked, which has ended the process. Waiting also fails if the runtime
    // has shut down, and then nothing receives reports.
    let _ = runtime.block_on(serving);
    ended
}

fn step_until_done(device_loop: &mut DeviceLoop, sender: &mpsc::Sender<StepOutput>) -> Result<(), Error> {
    loop {
        if let Some(output) = device_loop.turn()?
            && sender.blocking_send(output).is_err()
        {
            return Ok(());
        }
        if !device_loop.run()? && !device_loop.wait() {
            return Ok(());
        }
    }
}

/// Behaviour of the engine once it is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunMode {
    /// The engine waits for commands.
    Serving,
    /// The engine ends.
    Draining,
}

/// Takes commands and sends reports. Returns when a channel closes, or when the engine has drained and all its reports
/// are sent.
async fn serve_handle(
    mut handle: EngineHandle,
    rank: Rank,
    channels: EngineChannels,
    mut outputs: mpsc::Receiver<StepOutput>,
) {
    request_id::forget_graphs();
    let EngineChannels { mut commands, outbox, load, network, lifetime, .. } = channels;
    let waker = handle.waker();
    let (endpoint, connector) =
        Endpoint::leader(handle.units().clone(), network, &outbox, move || waker.wake());
    handle.connect(Box::new(connector));
    let (traces, graphs) = (RequestTraces::new(rank), LiveGraphs::new(lifetime));
    let mut serving = Serving { handle, endpoint, traces, graphs, mode: RunMode::Serving };
    while serving.mode == RunMode::Serving || !serving.handle.is_idle() {
        if serving.graphs.is_abandoned() && serving.handle.is_idle() {
            serving.graphs.answer();
        }
        let output = tokio::select! {
            biased;
            // Commands come first. Outputs must not come first: if reporting a step took longer than the step, an
            // output would always be ready, and a cancel could wait forever.
            command = commands.recv() => match command {
                Some(command) => {
                    serving.take(command);
                    continue;
                }
                None => return,
            },
            output = outputs.recv() => output,
        };
        let Some(output) = output else { return };
        let report = serving.report(output);
        load.send_replace(report.load.unwrap_or_default());
        let Some(permit) = serving.reserve_outbox(&mut commands, &outbox).await else { return };
        permit.send(pb::WorkerMessage { message: Some(ToConductor::StepReport(report)) });
        serving.handle.plan_ahead();
    }
}

/// State of the task that takes commands and makes reports.
struct Serving {
    handle: EngineHandle,
    endpoint: Arc<Endpoint>,
    traces: RequestTraces,
    graphs: LiveGraphs,
    mode: RunMode,
}

impl Serving {
    fn report(&mut self, output: StepOutput) -> pb::StepReport {
        if !self.traces.is_empty()
            && let Some(step) = output.step()
        {
            self.traces.step(step, self.handle.declaration());
        }
        let mut report = self.handle.report(output);
        for key in report.completions.iter().filter_map(|completion| completion.key) {
            request_id::graph_ended(key.into());
            self.graphs.ended(key.into());
        }
        if !self.traces.is_empty() {
            self.traces.completed(&report.completions);
        }
        if let Some(load) = &mut report.load {
            load.transfers = self.endpoint.counts();
        }
        report
    }

    /// Waits for room for one report in the outbox, and takes commands meanwhile. Returns `None` when a channel closes.
    async fn reserve_outbox<'a>(
        &mut self,
        commands: &mut mpsc::Receiver<Command>,
        outbox: &'a mpsc::Sender<pb::WorkerMessage>,
    ) -> Option<mpsc::Permit<'a, pb::WorkerMessage>> {
        loop {
            tokio::select! {
                biased;
                permit = outbox.reserve() => return permit.ok(),
                command = commands.recv() => self.take(command?),
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Launch(graph) => {
                if let Some(key) = graph.key.map(GraphKey::from) {
                    request_id::graph_launched(key, &graph.request_id);
                    tracing::debug!(%key, "took a graph");
                }
                self.traces.launched(&graph, self.handle.declaration());
                self.graphs.launched(&graph);
                self.endpoint.launched(&graph, self.handle.units_to_send(&graph));
                self.handle.launch(*graph);
            }
            Command::Cancel(key) => self.handle.cancel(key),
            Command::Drain => self.mode = RunMode::Draining,
            Command::Abandon(answer) => self.graphs.abandon(answer).for_each(|key| self.handle.cancel(key)),
        }
    }
}

/// Guard that ends the process if its thread panics. The panic's message has already been printed when the guard is
/// dropped.
struct ExitOnPanic;

impl Drop for ExitOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            exit::after_logs(exit::INTERNAL);
        }
    }
}

#[cfg(test)]
mod tests;
