//! `cargo bench --bench knee`: finds the load of long prompts at which the streams that decode begin to slow down.
//!
//! Four requests decode all the time while prompts arrive at a fixed rate. A cell is one arrival rate, one prompt
//! length, a cold or warm prefix cache, and one variant of chunking. Several cells may run at the same time, each on
//! its own conductor, and can disturb each other. Some cells therefore run again alone. A cell without arrivals also
//! runs alone.

mod support {
    pub mod background;
    pub mod cluster;
    pub mod shape;
    pub mod stream;
    pub mod variant;
}

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tokio::time::{Instant, sleep_until};
use tutti_measure::{
    results::{self, Origin},
    statistics::Summary,
};

use support::{
    background::Background,
    cluster::Cluster,
    shape::Shape,
    stream::{Stream, prompts},
    variant::{Device, Variant},
};

const RATES: [f64; 3] = [0.25, 0.5, 1.0];
const PROMPTS: [usize; 3] = [4096, 8192, 12_288];
const VARIANTS: [&str; 3] = ["off", "scheduler", "scheduler-target"];
/// Number of tokens at the end of a prompt that no other prompt shares. With a warm prefix, prompts share all other
/// tokens.
const FRESH: usize = 256;

#[derive(Parser)]
struct Args {
    /// Seconds for which prompts arrive in each cell.
    #[arg(long, default_value_t = 8.0)]
    seconds: f64,
    /// Cells that run at the same time.
    #[arg(long, default_value_t = 1)]
    concurrent_cells: usize,
    #[command(flatten)]
    output: results::Output,
}

#[derive(Clone, Debug, Serialize)]
struct Cell {
    rate_per_s: f64,
    prompt: usize,
    prefix: Prefix,
    variant: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Prefix {
    Warm,
    Cold,
}

#[derive(Debug, Serialize)]
struct Found {
    #[serde(flatten)]
    cell: Cell,
    /// Milliseconds between tokens of the four streams.
    itl_ms: Summary,
    /// Milliseconds to the first token of the arriving prompts.
    ttft_ms: Summary,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("knee", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("knee");
    let window = Duration::from_secs_f64(args.seconds);
    let (mut waiting, mut cells) = (Vec::new(), Vec::new());
    for rate_per_s in RATES {
        for prompt in PROMPTS {
            for prefix in [Prefix::Cold, Prefix::Warm] {
                waiting.extend(VARIANTS.map(|variant| Cell { rate_per_s, prompt, prefix, variant }));
            }
        }
    }
    for group in waiting.chunks(args.concurrent_cells.max(1)) {
        cells.extend(run_cells(group.to_vec(), window).await?);
    }
    let alone = |variant| Cell { rate_per_s: 1.0, prompt: 8192, prefix: Prefix::Cold, variant };
    let mut again = Vec::new();
    for variant in VARIANTS {
        again.extend(run_cells(vec![alone(variant)], window).await?);
    }
    let without_arrivals = Cell { rate_per_s: 0.0, ..alone("off") };
    let without_arrivals = run_cells(vec![without_arrivals], window).await?;
    let variants = Variant::named(Device::Sim.variants(PROMPTS[2]), &VARIANTS);
    let figures = json!({
        "device": Device::Sim, "variants": variants, "cells": cells, "again_alone": again, "without_arrivals": without_arrivals,
    });
    results::write(&origin, figures, &args.output)
}

/// Runs cells at the same time, each on its own conductor.
async fn run_cells(cells: Vec<Cell>, window: Duration) -> Result<Vec<Found>, String> {
    let number = cells.len();
    let tasks: Vec<_> = cells
        .into_iter()
        .enumerate()
        .map(|(index, cell)| tokio::spawn(run(cell, window, index, number)))
        .collect();
    let mut found = Vec::new();
    for task in tasks {
        let cell = task.await.map_err(|e| format!("a cell failed: {e}"))??;
        eprintln!("{:?}: itl {:.1?}, ttft {:.1?}", cell.cell, cell.itl_ms, cell.ttft_ms);
        found.push(cell);
    }
    Ok(found)
}

/// Runs the cell `index` of the `number` cells that run at the same time. Arrivals of different cells are staggered.
async fn run(cell: Cell, window: Duration, index: usize, number: usize) -> Result<Found, String> {
    let variants = Variant::named(Device::Sim.variants(PROMPTS[2]), &[cell.variant]);
    let mut flags = Device::Sim.flags(Shape::Qwen3);
    flags.extend(variants.into_iter().flat_map(|variant| variant.flags));
    let cluster = Cluster::start(&flags).await?;
    let arrivals = (cell.rate_per_s * window.as_secs_f64()).round() as usize;
    let mut arriving = prompts(arrivals, cell.prompt, 1);
    if cell.prefix == Prefix::Warm {
        let start = prompts(1, cell.prompt, 0).remove(0);
        arriving
            .iter_mut()
            .for_each(|prompt| prompt[..cell.prompt - FRESH].copy_from_slice(&start[..cell.prompt - FRESH]));
        Stream::start(&cluster.target, start, 1).end().await?;
    }
    let background = Background::start(&cluster.target).await?;
    let began = Instant::now();
    let mut streams = Vec::new();
    for (arrival, prompt) in arriving.into_iter().enumerate() {
        let share = arrival as f64 + (index as f64 + 0.5) / number as f64;
        sleep_until(began + Duration::from_secs_f64(share / cell.rate_per_s)).await;
        streams.push(Stream::start(&cluster.target, prompt, 1));
    }
    sleep_until(began + window).await;
    let mut ttft = Vec::new();
    for stream in streams {
        ttft.push(stream.end().await?.ttft_ms());
    }
    let gaps = background.stop(began.into_std(), std::time::Instant::now()).await?;
    // `stop` blocks until the process has ended, but other cells need this thread meanwhile.
    tokio::task::spawn_blocking(|| cluster.stop()).await.map_err(|e| format!("a stop failed: {e}"))??;
    Ok(Found { cell, itl_ms: Summary::of(gaps), ttft_ms: Summary::of(ttft) })
}
