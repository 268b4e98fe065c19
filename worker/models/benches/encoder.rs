//! Benchmark of the vision encoder of Qwen3-VL-2B with dummy bfloat16 weights: pictures per second, and the time of
//! each operation, compared with the machine's limits, as the benchmark `forward` shows it for text.
//!
//! `cargo bench -p tutti-models --bench encoder`. `tests/bench/peers/encoder.py` runs the same shape in other programs.
#![allow(clippy::print_stdout)] // The table is the output.

mod forward {
    pub mod limits;
    pub mod report;
    pub mod timing;
}

use std::{path::Path, sync::PoisonError};

use clap::Parser;
use tutti_kernels::{
    Quantize, Recorder,
    cpu::{CpuDevice, Isa},
};
use tutti_models::{EncoderItem, KvCacheDtype, LoadFormat, LoadOptions, load};
use tutti_proto::cluster::v1::{MediaGrid, MediaKind};

use self::forward::{
    limits::{Clock, Limits, Probe},
    report::{Round, report},
    timing::Timing,
};

/// Pixels per side of a patch.
const PATCH: u32 = 16;

#[derive(Parser)]
struct Args {
    /// Threads that compute [default: all cores].
    #[arg(long)]
    threads: Option<usize>,
    /// Measure the CPU time of the only computing thread instead of wall-clock time. Needs --threads 1.
    #[arg(long)]
    own_time: bool,
    /// Sides of the square pictures in pixels.
    #[arg(long, value_delimiter = ',', default_values_t = [448, 1024])]
    sides: Vec<u32>,
    /// Number of rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The argument that `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (threads, isa) = (args.threads.unwrap_or(cores), Isa::detect());
    if args.own_time && threads != 1 {
        return Err("--own-time measures one thread and needs --threads 1".into());
    }
    let clock = if args.own_time { Clock::Own } else { Clock::Wall };
    let timing = Timing::new(clock);
    let table = timing.table.clone();
    let options = LoadOptions {
        kv_cache_dtype: KvCacheDtype::Auto,
        dir: Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/bench/qwen3-vl-2b"),
        load_format: LoadFormat::Dummy,
        max_step_tokens: 512,
        page_tokens: 16,
        expert_parallel: false,
        nodes: Some(vec!["vision_encoder".into()]),
        quantize: Quantize::None,
        seed: 1,
    };
    let mut model = load(&options, Recorder::new(CpuDevice::new(threads, isa)?, timing), &mut |_| {})?;
    println!("{}", model.describe());
    let walk = model.declaration().media_input(MediaKind::Image).ok_or("the model takes no pictures")?.walk;
    let probe = Probe::new(threads, isa, false);
    let mut rounds: Vec<Vec<Round>> = args.sides.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (side, rounds) in args.sides.iter().zip(&mut rounds) {
            let data: Vec<u8> =
                (0..side * side * 3).map(|byte| (byte.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let grid = MediaGrid { frames: 1, height: side / PATCH, width: side / PATCH };
            let limits = probe.measure();
            let mut out = Vec::new();
            let clear = || std::mem::take(&mut *table.lock().unwrap_or_else(PoisonError::into_inner));
            clear();
            let began = clock.now();
            model.encode(walk, &[EncoderItem { data: &data, grid: Some(grid) }], None, &mut out)?;
            let time = (clock.now() - began).as_secs_f64();
            rounds.push(Round { time, limits, operations: clear() });
        }
    }
    let limits = rounds.iter().flatten().fold(Limits::default(), |best, round| best.best(round.limits));
    for (side, rounds) in args.sides.iter().zip(&mut rounds) {
        report(&format!("picture of {side} x {side}"), "pictures", 1.0, rounds, limits);
    }
    Ok(())
}
