//! Measures the gain from a second thread that works while the device runs, in steps per second of the same engine on
//! one thread and on two.
//!
//! `cargo bench -p tutti-engine --bench overlap -- --out FILE`. Each shape alternates between one thread and two, so
//! that other load of the machine affects both. Only steps in which every request decodes are timed. In both modes a
//! second thread encodes each report, as the thread of the worker's stream does. With two threads, the second thread
//! also makes the report and prepares the next step. `--large` adds the shape of Qwen3-0.6B with dummy weights, which
//! takes minutes.
//!
//! `--idle` instead measures the idle time of a simulated device between steps ([`idle`]).

#[path = "overlap/idle.rs"]
mod idle;

use std::{
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::{self, JoinHandle, available_parallelism},
    time::{Duration, Instant},
};

use prost::Message;
use serde::Serialize;
use tutti_engine::{Engine, EngineHandle, EngineSettings, StepOutput};
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_models::{LoadFormat, LoadOptions, Model, Quantize, SimOptions, load, load_sim};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_settings::{ByteSize, SimProfile, SimSettings};

/// Number of runs per mode; odd, so that there is a median.
const RUNS: usize = 7;
const PROMPT: usize = 16;
const MAX_STEP_TOKENS: usize = 512;
const PAGE_TOKENS: usize = 16;

type Failure = Box<dyn std::error::Error>;

struct Shape {
    name: &'static str,
    model: fn() -> Result<Box<dyn Model>, Failure>,
    rows: usize,
    /// Number of timed steps per run.
    steps: u64,
}

/// Results of one shape.
#[derive(Serialize)]
struct Figures {
    shape: &'static str,
    rows: usize,
    steps: u64,
    /// Steps per second of each run, in the order of the runs.
    one_thread: Vec<f64>,
    two_threads: Vec<f64>,
    /// Gain of the median of two threads, in percent of the median of one thread.
    gain_percent: f64,
}

#[derive(Serialize)]
struct Results {
    cores: usize,
    compute_threads: usize,
    load_1m: f64,
    figures: Vec<Figures>,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let out = arguments.iter().position(|argument| argument == "--out").map(|index| &arguments[index + 1]);
    let mut shapes = vec![
        Shape { name: "tutti-tiny, batch 1", model: tiny, rows: 1, steps: 500 },
        Shape { name: "tutti-tiny, batch 16", model: tiny, rows: 16, steps: 400 },
        Shape { name: "sim instant, 64 rows", model: instant, rows: 64, steps: 900 },
        Shape { name: "sim instant, 256 rows", model: instant, rows: 256, steps: 900 },
        Shape { name: "sim 1 ms a step, 256 rows", model: millisecond, rows: 256, steps: 500 },
    ];
    if arguments.iter().any(|argument| argument == "--large") {
        shapes.push(Shape { name: "Qwen3-0.6B dummy bf16, batch 4", model: large, rows: 4, steps: 60 });
    }
    if arguments.iter().any(|argument| argument == "--idle") {
        let figures = serde_json::to_string_pretty(&idle::measure()?)? + "\n";
        return Ok(out.map_or(Ok(()), |out| std::fs::write(out, figures))?);
    }
    let load_1m = std::fs::read_to_string("/proc/loadavg")?.split(' ').next().unwrap_or("0").parse()?;
    let figures = shapes.iter().map(measure).collect::<Result<Vec<_>, _>>()?;
    let results =
        Results { cores: available_parallelism()?.get(), compute_threads: threads(), load_1m, figures };
    if let Some(out) = out {
        std::fs::write(out, serde_json::to_string_pretty(&results)? + "\n")?;
    }
    Ok(())
}

fn measure(shape: &Shape) -> Result<Figures, Failure> {
    let mut one = OneThread::start(engine(shape)?);
    let mut two = TwoThreads::start(engine(shape)?)?;
    let (mut one_thread, mut two_threads) = (Vec::new(), Vec::new());
    for run in 0..RUNS as u64 {
        one_thread.push(steps_per_second(&mut one, shape, run)?);
        two_threads.push(steps_per_second(&mut two, shape, run)?);
    }
    two.end()?;
    let (before, after) = (median(&one_thread), median(&two_threads));
    let gain_percent = (after / before - 1.0) * 100.0;
    eprintln!("{}: {before:.1} steps/s on one thread, {after:.1} on two: {gain_percent:+.1} %", shape.name);
    let Shape { name, rows, steps, .. } = *shape;
    Ok(Figures { shape: name, rows, steps, one_thread, two_threads, gain_percent })
}

fn median(runs: &[f64]) -> f64 {
    let mut runs = runs.to_vec();
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}

/// The calls that the benchmark makes to an engine on one thread or on two.
trait Working {
    fn launch(&mut self, graph: pb::LaunchGraph);
    fn cancel(&mut self, key: pb::GraphKey);
    fn report(&mut self) -> Result<pb::StepReport, Failure>;
}

/// An engine on one thread. The benchmark's thread only encodes the reports.
struct OneThread {
    commands: SyncSender<Command>,
    reports: Receiver<pb::StepReport>,
}

enum Command {
    Launch(Box<pb::LaunchGraph>),
    Cancel(pb::GraphKey),
}

impl OneThread {
    fn start(mut engine: Engine) -> Self {
        let (commands, inbox) = sync_channel(1024);
        let (outbox, reports) = sync_channel(64);
        thread::spawn(move || {
            let take = |engine: &mut Engine, command| match command {
                Command::Launch(graph) => engine.launch(*graph),
                Command::Cancel(key) => engine.cancel(key.into()),
            };
            loop {
                inbox.try_iter().for_each(|command| take(&mut engine, command));
                match engine.step() {
                    Ok(Some(report)) => outbox.send(report).ok()?,
                    Ok(None) => take(&mut engine, inbox.recv().ok()?),
                    Err(_) => return Some(()),
                }
            }
        });
        Self { commands, reports }
    }
}

impl Working for OneThread {
    fn launch(&mut self, graph: pb::LaunchGraph) {
        let _ = self.commands.send(Command::Launch(Box::new(graph)));
    }

    fn cancel(&mut self, key: pb::GraphKey) {
        let _ = self.commands.send(Command::Cancel(key));
    }

    fn report(&mut self) -> Result<pb::StepReport, Failure> {
        Ok(self.reports.recv()?)
    }
}

struct TwoThreads {
    engine: EngineHandle,
    outputs: Receiver<StepOutput>,
    device: JoinHandle<Result<(), tutti_runtime::Error>>,
}

impl TwoThreads {
    fn start(engine: Engine) -> Result<Self, Failure> {
        let (mut device_loop, handle) = engine.split();
        let (sender, outputs) = sync_channel(16);
        let device = thread::Builder::new().name("engine".into()).spawn(move || {
            loop {
                if let Some(output) = device_loop.turn()? {
                    let _ = sender.send(output);
                }
                if !device_loop.run()? && !device_loop.wait() {
                    return Ok(());
                }
            }
        })?;
        Ok(Self { engine: handle, outputs, device })
    }

    fn end(self) -> Result<(), Failure> {
        drop((self.engine, self.outputs));
        self.device.join().map_err(|_| "the device's thread panicked")??;
        Ok(())
    }
}

impl Working for TwoThreads {
    fn launch(&mut self, graph: pb::LaunchGraph) {
        self.engine.launch(graph);
    }

    fn cancel(&mut self, key: pb::GraphKey) {
        self.engine.cancel(key.into());
    }

    fn report(&mut self) -> Result<pb::StepReport, Failure> {
        let report = self.engine.report(self.outputs.recv()?);
        self.engine.plan_ahead();
        Ok(report)
    }
}

fn steps_per_second(engine: &mut impl Working, shape: &Shape, run: u64) -> Result<f64, Failure> {
    let key = |row: usize| pb::GraphKey { request: run * 1000 + row as u64, incarnation: 0, graph: 0 };
    for row in 0..shape.rows {
        engine.launch(launch(key(row), (shape.steps + shape.steps / 10) as u32 + 100));
    }
    // The first tenth of the steps is a warm-up.
    let warm = shape.steps / 10;
    let (mut full, mut began, mut message) = (0, Instant::now(), Vec::new());
    while full < warm + shape.steps {
        let report = engine.report()?;
        message.clear();
        report.encode(&mut message)?;
        full += u64::from(report.rows.len() == shape.rows);
        if full == warm {
            began = Instant::now();
        }
    }
    let took: Duration = began.elapsed();
    (0..shape.rows).for_each(|row| engine.cancel(key(row)));
    let mut ended = 0;
    while ended < shape.rows {
        ended += engine.report()?.completions.len();
    }
    Ok(shape.steps as f64 / took.as_secs_f64())
}

fn launch(key: pb::GraphKey, max_tokens: u32) -> pb::LaunchGraph {
    let sampling = pb::SamplingParams::GREEDY;
    pb::LaunchGraph {
        key: Some(key),
        walks: vec![0, 1],
        spec: Some(pb::RequestSpec {
            prompt: (0..PROMPT as u32).map(|index| 10 + (index * 7 + key.request as u32) % 200).collect(),
            sampling: Some(sampling),
            stopping: Some(pb::Stopping { max_tokens, ignore_eos: true, ..Default::default() }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn threads() -> usize {
    available_parallelism().map_or(1, usize::from)
}

fn engine(shape: &Shape) -> Result<Engine, Failure> {
    let model = (shape.model)()?;
    let pages = shape.rows * (PROMPT + 2 * shape.steps as usize + 100).div_ceil(PAGE_TOKENS) + 1;
    let settings = EngineSettings {
        max_step_tokens: MAX_STEP_TOKENS,
        max_running_requests: Some(shape.rows),
        kv_cache_memory: Some(ByteSize((pages * model.page_bytes()) as u64)),
        ..EngineSettings::default()
    };
    let mut engine = Engine::new(model, Rank(0), &settings, shape.rows)?;
    engine.warm_up()?;
    Ok(engine)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sim(settings: &SimSettings) -> Result<Box<dyn Model>, Failure> {
    Ok(load_sim(&SimOptions {
        dir: &root().join("tests/tutti-tiny/checkpoint"),
        max_step_tokens: MAX_STEP_TOKENS,
        page_tokens: PAGE_TOKENS,
        nodes: None,
        rank: 0,
        settings,
    })?)
}

fn instant() -> Result<Box<dyn Model>, Failure> {
    sim(&SimSettings { profile: SimProfile::Instant, ..Default::default() })
}

fn millisecond() -> Result<Box<dyn Model>, Failure> {
    sim(&SimSettings { profile: SimProfile::Instant, fixed_us: Some(1000), ..Default::default() })
}

fn cpu(dir: PathBuf, load_format: LoadFormat) -> Result<Box<dyn Model>, Failure> {
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir,
        load_format,
        quantize: Quantize::None,
        max_step_tokens: MAX_STEP_TOKENS,
        page_tokens: PAGE_TOKENS,
        expert_parallel: false,
        nodes: None,
        seed: 0,
    };
    Ok(load(&options, CpuDevice::new(threads(), Isa::detect())?, &mut |_| {})?)
}

fn tiny() -> Result<Box<dyn Model>, Failure> {
    cpu(root().join("tests/tutti-tiny/checkpoint"), LoadFormat::Auto)
}

fn large() -> Result<Box<dyn Model>, Failure> {
    cpu(root().join("tests/bench/qwen3-0.6b"), LoadFormat::Dummy)
}
