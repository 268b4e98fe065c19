//! The thread that computes: commands in, reports out, both bounded.
//!
//! The engine never runs a step whose report has no room to go to: it then waits, and goes on taking cancels while it
//! does, so that a conductor that stops reading for a while stops the work and nothing else. A panic here ends the
//! process at once, since nothing could be trusted behind a heartbeat that goes on.

use std::{io, process, thread};

use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot, watch},
};
use tutti_engine::Engine;
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
};

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
pub struct Wires {
    /// Commands, in the order in which the conductor gave them.
    pub commands: mpsc::Receiver<Command>,
    /// Reports, to the conductor.
    pub outbox: mpsc::Sender<pb::WorkerMessage>,
    /// The load as of the last step, for heartbeats.
    pub load: watch::Sender<pb::WorkerLoad>,
}

/// Starts the thread: it loads, says Ready or LoadFailed, and then steps until it has drained or `commands` ends; a rank of
/// a TP group that does not lead it follows until its leader leaves. The receiver gives how it ended. Must be called
/// inside a Tokio runtime.
pub fn start(
    settings: WorkerSettings,
    rank: Rank,
    group: Option<Formation>,
    wires: Wires,
) -> io::Result<oneshot::Receiver<Result<(), Error>>> {
    let (done, ended) = oneshot::channel();
    let runtime = Handle::current();
    thread::Builder::new().name("engine".into()).spawn(move || {
        let _guard = ExitOnPanic;
        // The receiver is gone only when the process is ending.
        let _ = done.send(run(&settings, rank, group.as_ref(), wires, &runtime));
    })?;
    Ok(ended)
}

fn run(
    settings: &WorkerSettings,
    rank: Rank,
    group: Option<&Formation>,
    mut wires: Wires,
    runtime: &Handle,
) -> Result<(), Error> {
    let outbox = wires.outbox.clone();
    let tell = |progress: pb::LoadProgress| {
        let end = progress.bytes_done >= progress.bytes_total;
        let message = pb::WorkerMessage { message: Some(ToConductor::LoadProgress(progress)) };
        // What comes in between may be lost where there is no room; the end may not.
        let _ = if end { outbox.blocking_send(message).ok() } else { outbox.try_send(message).ok() };
    };
    let mut loaded = loading::load_worker(settings, rank, group, tell);
    let said = match &mut loaded {
        Ok(Loaded::Engine(engine)) => {
            wires.load.send_replace(engine.load());
            ToConductor::Ready(loading::ready(engine))
        }
        Ok(Loaded::Follower(member)) => ToConductor::Ready(loading::ready_to_follow(member)),
        Err(error) => ToConductor::LoadFailed(pb::LoadFailed { fault: Some(error.clone().into()) }),
    };
    // Without an outbox the process is ending, and stepping ends at once.
    let _ = wires.outbox.blocking_send(pb::WorkerMessage { message: Some(said) });
    let mut engine = match loaded? {
        Loaded::Engine(engine) => *engine,
        Loaded::Follower(member) => return follow(member, &wires),
    };
    if let Some(path) = &settings.trace_steps {
        engine.set_observer(Box::new(StepTrace::start(path, rank, &engine, settings.max_step_tokens)));
    }
    step_until_done(&mut engine, &mut wires, runtime)
}

/// Runs the leader's plans. Heartbeats tell how many.
fn follow(member: Member, wires: &Wires) -> Result<(), Error> {
    let kv_pages_total = member.pages().saturating_sub(1) as u32;
    member.follow(|steps| {
        wires.load.send_replace(pb::WorkerLoad { steps, kv_pages_total, ..Default::default() });
    })
}

/// What stepping needs of an engine.
trait Steps {
    fn launch(&mut self, graph: pb::LaunchGraph);
    fn cancel(&mut self, key: GraphKey);
    fn step(&mut self) -> Result<Option<pb::StepReport>, Error>;
    fn is_idle(&self) -> bool;
}

impl Steps for Engine {
    fn launch(&mut self, graph: pb::LaunchGraph) {
        Engine::launch(self, graph);
    }

    fn cancel(&mut self, key: GraphKey) {
        Engine::cancel(self, key);
    }

    fn step(&mut self) -> Result<Option<pb::StepReport>, Error> {
        Engine::step(self)
    }

    fn is_idle(&self) -> bool {
        Engine::is_idle(self)
    }
}

/// Whether the conductor wants the engine to end once it is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    Told,
    Idle,
}

fn step_until_done(engine: &mut impl Steps, wires: &mut Wires, runtime: &Handle) -> Result<(), Error> {
    let Wires { commands, outbox, load } = wires;
    let mut until = Until::Told;
    loop {
        while let Ok(command) = commands.try_recv() {
            take(engine, command, &mut until);
        }
        let Some(room) = runtime.block_on(room(engine, commands, outbox, &mut until)) else { return Ok(()) };
        match engine.step()? {
            Some(report) => {
                load.send_replace(report.load.unwrap_or_default());
                room.send(pb::WorkerMessage { message: Some(ToConductor::StepReport(report)) });
            }
            None if until == Until::Idle && engine.is_idle() => return Ok(()),
            None => match runtime.block_on(commands.recv()) {
                Some(command) => take(engine, command, &mut until),
                None => return Ok(()),
            },
        }
    }
}

/// Room for one report, taking commands while there is none. `None` once nobody is left to work for.
async fn room<'a>(
    engine: &mut impl Steps,
    commands: &mut mpsc::Receiver<Command>,
    outbox: &'a mpsc::Sender<pb::WorkerMessage>,
    until: &mut Until,
) -> Option<mpsc::Permit<'a, pb::WorkerMessage>> {
    loop {
        tokio::select! {
            biased;
            room = outbox.reserve() => return room.ok(),
            command = commands.recv() => take(engine, command?, until),
        }
    }
}

fn take(engine: &mut impl Steps, command: Command, until: &mut Until) {
    match command {
        Command::Launch(graph) => engine.launch(*graph),
        Command::Cancel(key) => engine.cancel(key),
        Command::Drain => *until = Until::Idle,
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
    use std::collections::BTreeSet;

    use super::*;

    /// Every step emits one report for as long as it holds a graph; a cancel takes it away at the next one.
    #[derive(Default)]
    struct Fake {
        held: BTreeSet<GraphKey>,
        cancelled: Vec<GraphKey>,
        steps: u64,
        steps_left: u64,
    }

    impl Steps for Fake {
        fn launch(&mut self, graph: pb::LaunchGraph) {
            self.held.insert(graph.key.unwrap().into());
        }

        fn cancel(&mut self, key: GraphKey) {
            if self.held.remove(&key) {
                self.cancelled.push(key);
            }
        }

        fn step(&mut self) -> Result<Option<pb::StepReport>, Error> {
            if self.held.is_empty() && self.cancelled.is_empty() {
                return Ok(None);
            }
            if self.steps_left == 0 {
                return Err(Error::internal("device lost"));
            }
            self.steps_left -= 1;
            self.steps += 1;
            let completion = |key: GraphKey| pb::Completion { key: Some(key.into()), ..Default::default() };
            let completions = self.cancelled.drain(..).map(completion).collect();
            Ok(Some(pb::StepReport { step: self.steps, completions, ..Default::default() }))
        }

        fn is_idle(&self) -> bool {
            self.held.is_empty() && self.cancelled.is_empty()
        }
    }

    struct Bench {
        commands: mpsc::Sender<Command>,
        reports: mpsc::Receiver<pb::WorkerMessage>,
        ended: thread::JoinHandle<Result<(), Error>>,
    }

    /// A running engine with room for two reports.
    fn bench(steps_left: u64) -> Bench {
        let (commands, inbox) = mpsc::channel(16);
        let (outbox, reports) = mpsc::channel(2);
        let (load, _) = watch::channel(pb::WorkerLoad::default());
        let mut wires = Wires { commands: inbox, outbox, load };
        let runtime = Handle::current();
        let ended = thread::spawn(move || {
            let mut engine = Fake { steps_left, ..Fake::default() };
            step_until_done(&mut engine, &mut wires, &runtime)
        });
        Bench { commands, reports, ended }
    }

    fn key(request: u64) -> GraphKey {
        pb::GraphKey { request, ..Default::default() }.into()
    }

    fn launch(request: u64) -> Command {
        Command::Launch(Box::new(pb::LaunchGraph { key: Some(key(request).into()), ..Default::default() }))
    }

    fn completions(message: pb::WorkerMessage) -> Vec<GraphKey> {
        let Some(ToConductor::StepReport(report)) = message.message else { panic!("not a report") };
        report.completions.into_iter().map(|completion| completion.key.unwrap().into()).collect()
    }

    #[tokio::test]
    async fn a_full_outbox_stops_the_steps_but_not_the_cancels() {
        let mut bench = bench(u64::MAX);
        bench.commands.send(launch(1)).await.unwrap();
        // Nobody reads: two reports fill the outbox. Many more commands than the inbox holds are still taken.
        for _ in 0..100 {
            bench.commands.send(Command::Cancel(key(9))).await.unwrap();
        }
        bench.commands.send(Command::Cancel(key(1))).await.unwrap();
        bench.commands.send(Command::Drain).await.unwrap();
        let mut ended = Vec::new();
        while let Some(message) = bench.reports.recv().await {
            ended.extend(completions(message));
        }
        assert_eq!(ended, [key(1)]);
        assert_eq!(bench.ended.join().unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn a_drain_ends_it_once_it_is_idle() {
        let mut bench = bench(u64::MAX);
        bench.commands.send(launch(1)).await.unwrap();
        bench.commands.send(Command::Drain).await.unwrap();
        assert_eq!(completions(bench.reports.recv().await.unwrap()), [], "it goes on with what is here");
        bench.commands.send(Command::Cancel(key(1))).await.unwrap();
        while bench.reports.recv().await.is_some() {}
        assert_eq!(bench.ended.join().unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn it_ends_with_its_commands() {
        let bench = bench(u64::MAX);
        drop(bench.commands);
        assert_eq!(bench.ended.join().unwrap(), Ok(()));
    }

    #[tokio::test]
    async fn a_lost_device_is_an_error() {
        let bench = bench(0);
        bench.commands.send(launch(1)).await.unwrap();
        assert!(bench.ended.join().unwrap().is_err());
    }
}
