//! Benchmark of steps of a model with the shape of Qwen3-0.6B. On the CPU it shows the time of each operation, compared
//! with the machine's limits. On a GPU it shows the time of each kind of step.
//!
//! `cargo bench -p tutti-models --bench forward` runs dummy bfloat16 weights in this process, without a cluster and
//! without clients; `--int8` quantises them. Each round measures the machine's limits and then a few steps of every
//! kind, so that other work on the machine affects all kinds alike. The table shows the round with the median time. For
//! each operation, it shows the time, and the fraction of this time that the operation would take at the best limits of
//! all rounds.
//!
//! `--device cuda` runs on the first GPU, with as many steps in flight as the device holds. `tests/gpu` does this on
//! machines without Rust.
#![allow(clippy::print_stdout)] // The table is the output.

mod forward {
    pub mod gpu;
    pub mod limits;
    pub mod report;
    pub mod steps;
    pub mod timing;
}

use std::{
    path::{Path, PathBuf},
    sync::PoisonError,
};

use clap::{Parser, ValueEnum};
use tutti_kernels::{
    Quantize, Recorder,
    cpu::{CpuDevice, Isa},
};
use tutti_models::{LoadFormat, LoadOptions, load};

use self::forward::{
    gpu,
    limits::{Clock, Limits, Probe},
    report::{Round, report},
    steps::{PAGE, Steps},
    timing::{Table, Timing},
};

type Failure = Box<dyn std::error::Error>;

/// Tokens per prefill step, and number of context tokens before the token that a decode step computes.
const CONTEXT: usize = 512;
/// Number of requests of the largest batch.
const BATCH: usize = 16;
/// Tokens of the longest prompt. Only the first request has pages for it.
const LONG: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DeviceKind {
    Cpu,
    Cuda,
}

#[derive(Parser)]
struct Args {
    /// Device to run on; `cuda` takes the first GPU.
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    device: DeviceKind,
    /// Folder of the config.json whose shape runs [default: tests/bench/qwen3-0.6b].
    #[arg(long)]
    model: Option<PathBuf>,
    /// File to write a GPU's figures to.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Repetitions of each kind of step per round, on a GPU [default: depends on the kind].
    #[arg(long)]
    times: Option<usize>,
    /// Threads that compute [default: all cores].
    #[arg(long)]
    threads: Option<usize>,
    /// Instruction path [default: the best that the CPU has].
    #[arg(long)]
    isa: Option<String>,
    /// Measure the CPU time of the only computing thread instead of wall-clock time, to lessen the effect of other work
    /// on the machine. Needs --threads 1.
    #[arg(long)]
    own_time: bool,
    /// Quantise the weights to int8.
    #[arg(long)]
    int8: bool,
    /// Number of rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Kinds of steps: prefill-512, prefill-4096, decode-1, decode-4, decode-16, and on a GPU prefill-512,
    /// prefill-2048, decode-1 and so on to decode-64, sampled-1, sampled-32 [default: all].
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// The argument that `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A kind of step: its sizes, and how often a round repeats it.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// Number of requests.
    batch: usize,
    /// Tokens per request and step.
    tokens: usize,
    /// Position of each request's first token in the step.
    start: usize,
    /// Number of consecutive steps that compute one prompt. Only the last step samples.
    chunks: usize,
    /// Number of repetitions per round.
    times: usize,
}

const KINDS: [Kind; 5] = [
    Kind { name: "decode-1", batch: 1, tokens: 1, start: CONTEXT, chunks: 1, times: 15 },
    Kind { name: "decode-4", batch: 4, tokens: 1, start: CONTEXT, chunks: 1, times: 10 },
    Kind { name: "decode-16", batch: BATCH, tokens: 1, start: CONTEXT, chunks: 1, times: 6 },
    Kind { name: "prefill-512", batch: 1, tokens: CONTEXT, start: 0, chunks: 1, times: 1 },
    Kind { name: "prefill-4096", batch: 1, tokens: CONTEXT, start: 0, chunks: 8, times: 1 },
];

fn main() -> Result<(), Failure> {
    let args = Args::parse();
    let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/bench/qwen3-0.6b");
    let shape = args.model.clone().unwrap_or(shape);
    if args.device == DeviceKind::Cuda {
        let Args { only, json, rounds, times, .. } = args;
        return gpu::run(&gpu::Bench { shape, only, json, rounds, times });
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores);
    let isa = match &args.isa {
        None => Isa::detect(),
        Some(name) => {
            let named = Isa::ALL.into_iter().find(|isa| isa.to_string() == *name);
            named.ok_or_else(|| format!("no instruction path {name}"))?
        }
    };
    let mut kinds = KINDS.to_vec();
    kinds.retain(|kind| args.only.is_empty() || args.only.iter().any(|name| name == kind.name));

    if args.own_time && threads != 1 {
        return Err("--own-time measures one thread and needs --threads 1".into());
    }
    let clock = if args.own_time { Clock::Own } else { Clock::Wall };
    let timing = Timing::new(clock);
    let table = timing.table.clone();
    let device = Recorder::new(CpuDevice::new(threads, isa)?, timing);
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir: shape,
        load_format: LoadFormat::Dummy,
        max_step_tokens: CONTEXT,
        page_tokens: PAGE,
        expert_parallel: false,
        nodes: None,
        quantize: if args.int8 { Quantize::Int8 } else { Quantize::None },
        seed: 1,
    };
    let began = Clock::Wall.now();
    let mut bench =
        Bench { steps: Steps::new(load(&options, device, &mut |_| {})?, BATCH, CONTEXT, LONG)?, clock };
    println!("{}", bench.steps.describe());
    println!("loaded and warm in {:.1} s", (Clock::Wall.now() - began).as_secs_f64());
    let probe = Probe::new(threads, isa, args.int8);
    let mut rounds: Vec<Vec<Round>> = kinds.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (kind, rounds) in kinds.iter().zip(&mut rounds) {
            let limits = probe.measure();
            rounds.push(bench.round(*kind, limits, &table)?);
        }
    }
    let limits = rounds.iter().flatten().fold(Limits::default(), |best, round| best.best(round.limits));
    for (kind, rounds) in kinds.iter().zip(&mut rounds) {
        report(kind.name, "tok", (kind.batch * kind.tokens * kind.chunks) as f64, rounds, limits);
    }
    Ok(())
}

/// The steps to run, and the clock that times them.
struct Bench {
    steps: Steps,
    clock: Clock,
}

impl Bench {
    /// Runs a kind's steps, and returns the time and the operations of the fastest repetition.
    fn round(&mut self, kind: Kind, limits: Limits, table: &Table) -> Result<Round, Failure> {
        let Kind { batch, tokens, start, chunks, times, .. } = kind;
        let clear = || std::mem::take(&mut *table.lock().unwrap_or_else(PoisonError::into_inner));
        let mut best: Option<Round> = None;
        for _ in 0..times {
            clear();
            let began = self.clock.now();
            for chunk in 0..chunks {
                self.steps.run(batch, tokens, start + chunk * tokens, chunk + 1 == chunks)?;
            }
            let round = Round { time: (self.clock.now() - began).as_secs_f64(), limits, operations: clear() };
            if best.as_ref().is_none_or(|best| round.time < best.time) {
                best = Some(round);
            }
        }
        best.ok_or_else(|| "no step in a round".into())
    }
}
