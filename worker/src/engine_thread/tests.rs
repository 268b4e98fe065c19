mod transfer;

use std::{
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
};

use tokio::task::{JoinHandle, spawn_blocking};
use tutti_engine::{Engine, EngineSettings};
use tutti_models::{SimOptions, load_sim};
use tutti_settings::{DeviceChoice, SimProfile, SimSettings};

use super::*;
use crate::device;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

struct Bench {
    commands: mpsc::Sender<Command>,
    reports: mpsc::Receiver<pb::WorkerMessage>,
    ended: JoinHandle<Result<(), Error>>,
}

fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tutti-tiny/checkpoint")
}

/// Starts an engine with room for two reports. Its device is lost after `lose_after` steps.
fn bench(lose_after: Option<u64>) -> Bench {
    let sim = SimSettings { profile: SimProfile::Instant, lose_after, ..Default::default() };
    let options = SimOptions {
        dir: &shipped(),
        max_step_tokens: 64,
        page_tokens: 16,
        nodes: None,
        rank: 0,
        settings: &sim,
    };
    let model = load_sim(&options).unwrap();
    let settings =
        EngineSettings { max_step_tokens: 64, max_running_requests: Some(4), ..EngineSettings::default() };
    let (device_loop, handle) = Engine::new(model, Rank(0), &settings, 4).unwrap().split();
    let (commands, inbox) = mpsc::channel(16);
    let (outbox, reports) = mpsc::channel(2);
    let (load, _) = watch::channel(pb::WorkerLoad::default());
    let channels = EngineChannels {
        commands: inbox,
        outbox,
        load,
        forwards: Arc::default(),
        device_memory: LastReading::default(),
        network: LOCALHOST.into(),
        lifetime: Lifetime::default(),
    };
    let runtime = Handle::current();
    Bench {
        commands,
        reports,
        ended: spawn_blocking(move || run_engine(device_loop, (Rank(0), handle), channels, &runtime)),
    }
}

fn key(request: u64) -> GraphKey {
    pb::GraphKey { request, ..Default::default() }.into()
}

/// A request that stops only at `max_tokens`.
fn launch(request: u64, max_tokens: u32) -> Command {
    let spec = pb::RequestSpec {
        prompt: vec![7; 5],
        sampling: Some(pb::SamplingParams::GREEDY),
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
    // Two reports fill the outbox, which the test does not read. The engine still takes many more commands than the
    // inbox holds.
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
    // The bound counts the steps whose reports are in the outbox, with the task, or waiting for the task. It also
    // allows a few steps that ran before the cancel was taken.
    assert!(steps <= PENDING_OUTPUTS + 16, "{steps} steps ran");
    assert_eq!(bench.ended.await.unwrap(), Ok(()));
}

#[tokio::test]
async fn a_drain_ends_the_engine_once_it_is_idle_and_all_is_reported() {
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
async fn a_launch_wakes_an_idle_engine() {
    let mut bench = bench(None);
    for request in 1..50 {
        bench.commands.send(launch(request, 1)).await.unwrap();
        while completions(bench.reports.recv().await.unwrap()).is_empty() {}
    }
    drop(bench.commands);
    assert_eq!(bench.ended.await.unwrap(), Ok(()));
}

#[tokio::test]
async fn the_engine_ends_when_its_commands_close() {
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

/// This thread stands for the stream's thread, which sends the heartbeats. The thread waits and runs no task. The test
/// shows that no step, command or report needs this thread, so heartbeats continue while the engine's tasks are busy.
#[test]
fn the_engine_needs_no_time_of_the_streams_thread() {
    let settings = WorkerSettings {
        model_dir: shipped(),
        sim: SimSettings { profile: SimProfile::Instant, ..SimSettings::default() },
        ..device::tests::settings(DeviceChoice::Sim)
    };
    let (commands, inbox) = mpsc::channel(16);
    let (outbox, mut reports) = mpsc::channel(2);
    let (load, _) = watch::channel(pb::WorkerLoad::default());
    let channels = EngineChannels {
        commands: inbox,
        outbox,
        load,
        forwards: Arc::default(),
        device_memory: LastReading::default(),
        network: LOCALHOST.into(),
        lifetime: Lifetime::default(),
    };
    let ended = start(settings, Rank(0), None, channels).unwrap();
    commands.blocking_send(launch(1, 20)).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        let message = reports.blocking_recv().unwrap();
        if matches!(message.message, Some(ToConductor::StepReport(_))) {
            done = completions(message);
        }
    }
    assert_eq!(done, [key(1)]);
    drop(commands);
    assert_eq!(ended.blocking_recv().unwrap(), Ok(()));
}
