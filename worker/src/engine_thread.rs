//! The engine: commands in, reports out, both bounded.
//!
//! A thread of its own loads, and then runs steps and decides between two of them what runs next. Meanwhile the *desk*, a
//! task beside the stream, takes commands and makes reports: that thread wakes for each report anyway, so the engine's
//! spends nothing on either, and no third one takes a core from the device. The news of a few steps may wait for the desk,
//! which sends no report without room for it, so a conductor that stops reading stops the work soon and nothing else:
//! commands are still taken. A panic ends the process at once, since nothing could be trusted behind a heartbeat
//! that goes on.

use std::{
    io, process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot, watch},
};
use tutti_engine::{EngineHandle, StepOutput, DeviceLoop};
use tutti_proto::{
    GraphKey, Rank,
    cluster::v1::{self as pb, worker_message::Message as ToConductor},
};
use tutti_runtime::{Error, exit};

use crate::{
    config::WorkerSettings,
    group::{Formation, Member},
    loading::{self, Loaded},
    step_trace::StepTrace,
    transfer::Transfer,
};

/// Steps whose output may wait for the handle. Enough that a desk that comes late on a busy machine stops no short step.
pub(crate) const PENDING_OUTPUTS: usize = 16;

/// What the engine is told.
#[derive(Debug)]
pub enum Command {
    /// Run this graph.
    Launch(Box<pb::LaunchGraph>),
    /// Let go of this one.
    Cancel(GraphKey),
    /// Finish what is here, then end.
    Drain,
}

/// The engine's ways to and from the process's other half.
#[derive(Debug)]
pub struct EngineChannels {
    /// Commands, in the order in which the conductor gave them.
    pub commands: mpsc::Receiver<Command>,
    /// Reports, to the conductor.
    pub outbox: mpsc::Sender<pb::WorkerMessage>,
    /// The load as of the last step, for heartbeats.
    pub load: watch::Sender<pb::WorkerLoad>,
    /// Forwards that have come back, for heartbeats during a step.
    pub forwards: Arc<AtomicU64>,
}

/// Starts the engine's thread: it loads, says Ready or LoadFailed, and then steps until it has drained or `commands`
/// ends; a rank of a TP group that does not lead it follows until its leader leaves. The receiver gives how it ended.
/// Must be called inside a Tokio runtime.
pub fn start(
    settings: WorkerSettings,
    rank: Rank,
    group: Option<Formation>,
    channels: EngineChannels,
) -> io::Result<oneshot::Receiver<Result<(), Error>>> {
    let (done, ended) = oneshot::channel();
    let runtime = Handle::current();
    thread::Builder::new().name("engine".into()).spawn(move || {
        let _guard = ExitOnPanic;
        // The receiver is gone only when the process is ending.
        let _ = done.send(run(&settings, rank, group.as_ref(), channels, &runtime));
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
        // What comes in between may be lost where there is no room; the end may not.
        let _ = if end { outbox.blocking_send(message).ok() } else { outbox.try_send(message).ok() };
    };
    let mut loaded = loading::load_worker(settings, rank, group, on_progress);
    let greeting = match &mut loaded {
        Ok(Loaded::Engine(engine)) => {
            engine.count_forwards(channels.forwards.clone());
            channels.load.send_replace(engine.load());
            ToConductor::Ready(loading::ready(engine, settings))
        }
        Ok(Loaded::Follower(member)) => ToConductor::Ready(loading::ready_to_follow(member)),
        Err(error) => ToConductor::LoadFailed(pb::LoadFailed { fault: Some(error.clone().into()) }),
    };
    // Without an outbox the process is ending, and stepping ends at once.
    let _ = channels.outbox.blocking_send(pb::WorkerMessage { message: Some(greeting) });
    let mut engine = match loaded? {
        Loaded::Engine(engine) => *engine,
        Loaded::Follower(member) => return follow(member, &channels),
    };
    if let Some(path) = &settings.trace_steps {
        engine.set_observer(Box::new(StepTrace::start(path, rank, &engine, settings.max_step_tokens)));
    }
    let (device_loop, handle) = engine.split();
    run_engine(device_loop, handle, channels, runtime)
}

/// Runs the leader's plans. Heartbeats tell how many.
fn follow(member: Member, channels: &EngineChannels) -> Result<(), Error> {
    let kv_pages_total = member.pages().saturating_sub(1) as u32;
    member.follow(|steps| {
        channels.forwards.store(steps, Ordering::Relaxed);
        channels.load.send_replace(pb::WorkerLoad { steps, kv_pages_total, ..Default::default() });
    })
}

/// Runs the engine until it has drained or `commands` ends. By then all that was told is in the outbox.
pub(crate) fn run_engine(
    mut device_loop: DeviceLoop,
    handle: EngineHandle,
    channels: EngineChannels,
    runtime: &Handle,
) -> Result<(), Error> {
    let (sender, outputs) = mpsc::channel(PENDING_OUTPUTS);
    let serving = runtime.spawn(serve_handle(handle, channels, outputs));
    let ended = step_until_done(&mut device_loop, &sender);
    drop(sender);
    // A panic there has ended the process; where the runtime is gone, so is whoever would be told.
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

/// Whether the conductor wants the engine to end once it is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunMode {
    Serving,
    Draining,
}

/// Returns once nobody is left to work for, or the engine has ended and all of its news are sent.
async fn serve_handle(mut handle: EngineHandle, channels: EngineChannels, mut outputs: mpsc::Receiver<StepOutput>) {
    let _guard = ExitOnPanic;
    let EngineChannels { mut commands, outbox, load, .. } = channels;
    let transfer = Transfer::connect(&mut handle, &outbox);
    let mut mode = RunMode::Serving;
    while mode == RunMode::Serving || !handle.is_idle() {
        let output = tokio::select! {
            biased;
            // First of all, or a cancel could wait for as long as steps are shorter than their reports take.
            command = commands.recv() => match command {
                Some(command) => {
                    handle_command(&mut handle, &transfer, command, &mut mode);
                    continue;
                }
                None => return,
            },
            output = outputs.recv() => output,
        };
        let Some(output) = output else { return };
        let mut report = handle.report(output);
        if let Some(load) = &mut report.load {
            load.transfers = transfer.tally();
        }
        load.send_replace(report.load.unwrap_or_default());
        let permit = reserve_outbox(&mut handle, &transfer, &mut commands, &outbox, &mut mode).await;
        let Some(permit) = permit else { return };
        permit.send(pb::WorkerMessage { message: Some(ToConductor::StepReport(report)) });
        handle.plan_ahead();
    }
}

/// Room for one report, taking commands while there is none. `None` once nobody is left to work for.
async fn reserve_outbox<'a>(
    handle: &mut EngineHandle,
    transfer: &Transfer,
    commands: &mut mpsc::Receiver<Command>,
    outbox: &'a mpsc::Sender<pb::WorkerMessage>,
    mode: &mut RunMode,
) -> Option<mpsc::Permit<'a, pb::WorkerMessage>> {
    loop {
        tokio::select! {
            biased;
            permit = outbox.reserve() => return permit.ok(),
            command = commands.recv() => handle_command(handle, transfer, command?, mode),
        }
    }
}

fn handle_command(handle: &mut EngineHandle, transfer: &Transfer, command: Command, mode: &mut RunMode) {
    match command {
        Command::Launch(graph) => {
            transfer.launched(&graph, handle);
            handle.launch(*graph);
        }
        Command::Cancel(key) => handle.cancel(key),
        Command::Drain => *mode = RunMode::Draining,
    }
}

/// Ends the process when its thread unwinds; the panic's message has been printed by then.
struct ExitOnPanic;

impl Drop for ExitOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            process::exit(exit::INTERNAL.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::task::{JoinHandle, spawn_blocking};
    use tutti_engine::{Engine, EngineSettings};
    use tutti_models::load_sim;
    use tutti_runtime::sim::{SimProfile, SimSettings};

    use super::*;

    struct Bench {
        commands: mpsc::Sender<Command>,
        reports: mpsc::Receiver<pb::WorkerMessage>,
        ended: JoinHandle<Result<(), Error>>,
    }

    /// A running engine with room for two reports, whose device is lost after so many steps.
    fn bench(lose_after: Option<u64>) -> Bench {
        let sim = SimSettings { profile: SimProfile::Instant, lose_after, ..Default::default() };
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tutti-tiny/checkpoint");
        let model = load_sim(&shipped, 64, 16, 0, &sim, None).unwrap();
        let settings = EngineSettings::bounded(64, 4, 4);
        let (device_loop, handle) = Engine::new(model, Rank(0), &settings).unwrap().split();
        let (commands, inbox) = mpsc::channel(16);
        let (outbox, reports) = mpsc::channel(2);
        let (load, _) = watch::channel(pb::WorkerLoad::default());
        let channels = EngineChannels { commands: inbox, outbox, load, forwards: Arc::default() };
        let runtime = Handle::current();
        Bench { commands, reports, ended: spawn_blocking(move || run_engine(device_loop, handle, channels, &runtime)) }
    }

    fn key(request: u64) -> GraphKey {
        pb::GraphKey { request, ..Default::default() }.into()
    }

    /// A request that goes on for as long as the context lasts.
    fn launch(request: u64, max_tokens: u32) -> Command {
        let spec = pb::RequestSpec {
            prompt: vec![7; 5],
            sampling: Some(pb::Sampling { top_p: 1.0, repetition_penalty: 1.0, ..Default::default() }),
            stopping: Some(pb::Stopping { max_tokens, ignore_eos: true, ..Default::default() }),
            ..Default::default()
        };
        Command::Launch(Box::new(pb::LaunchGraph {
            key: Some(key(request).into()),
            walks: vec![0, 1],
            spec: Some(spec),
            ..Default::default()
        }))
    }

    fn report(message: pb::WorkerMessage) -> pb::StepReport {
        let Some(ToConductor::StepReport(report)) = message.message else { panic!("not a report") };
        report
    }

    fn completions(message: pb::WorkerMessage) -> Vec<GraphKey> {
        report(message).completions.into_iter().map(|completion| completion.key.unwrap().into()).collect()
    }

    const LONG: u32 = 1000;

    #[tokio::test]
    async fn a_full_outbox_stops_the_steps_but_not_the_cancels() {
        let mut bench = bench(None);
        bench.commands.send(launch(1, LONG)).await.unwrap();
        // Nobody reads: two reports fill the outbox. Many more commands than the inbox holds are still taken.
        for _ in 0..100 {
            bench.commands.send(Command::Cancel(key(9))).await.unwrap();
        }
        bench.commands.send(Command::Cancel(key(1))).await.unwrap();
        bench.commands.send(Command::Drain).await.unwrap();
        let (mut ended, mut steps) = (Vec::new(), 0);
        while let Some(message) = bench.reports.recv().await {
            ended.extend(completions(message));
            steps += 1;
        }
        assert_eq!(ended, [key(1)]);
        // Those in the outbox, at the desk and waiting for it, and the few that ran while the cancel was taken.
        assert!(steps <= PENDING_OUTPUTS + 16, "{steps} steps ran");
        assert_eq!(bench.ended.await.unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn a_drain_ends_it_once_it_is_idle_and_everything_is_told() {
        let mut bench = bench(None);
        bench.commands.send(launch(1, 20)).await.unwrap();
        bench.commands.send(launch(2, LONG)).await.unwrap();
        bench.commands.send(Command::Drain).await.unwrap();
        let (mut tokens, mut ended, mut cancelled) = (0, Vec::new(), false);
        while let Some(message) = bench.reports.recv().await {
            let report = report(message);
            let of = |request| report.rows.iter().filter(move |row| row.key.unwrap().request == request);
            tokens += of(1).map(|row| row.tokens.len()).sum::<usize>();
            ended.extend(report.completions.iter().map(|completion| completion.key.unwrap().request));
            if ended == [1] && !std::mem::replace(&mut cancelled, true) {
                bench.commands.send(Command::Cancel(key(2))).await.unwrap();
            }
        }
        assert_eq!((tokens, ended), (20, vec![1, 2]));
        assert_eq!(bench.ended.await.unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn a_launch_is_taken_when_nothing_has_run_for_long() {
        let mut bench = bench(None);
        for request in 1..50 {
            bench.commands.send(launch(request, 1)).await.unwrap();
            while completions(bench.reports.recv().await.unwrap()).is_empty() {}
        }
        drop(bench.commands);
        assert_eq!(bench.ended.await.unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn it_ends_with_its_commands() {
        let bench = bench(None);
        bench.commands.send(launch(1, LONG)).await.unwrap();
        drop(bench.commands);
        assert_eq!(bench.ended.await.unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn a_lost_device_is_an_error_after_all_reports_before_it() {
        let mut bench = bench(Some(5));
        bench.commands.send(launch(1, LONG)).await.unwrap();
        let mut tokens = 0;
        while let Some(message) = bench.reports.recv().await {
            tokens += report(message).rows.len();
        }
        assert_eq!(tokens, 6, "steps 0 to 5, the last of which ran");
        assert!(bench.ended.await.unwrap().is_err());
    }
}
