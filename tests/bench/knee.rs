//! `cargo bench --bench knee`: from where on long prompts are felt by those that decode.
//!
//! Four requests decode all the time, while prompts arrive at a fixed rate. A cell is one rate, one length of prompts,
//! whether all but their ends has been computed before, and one way to run them. Some of the cells may run at one time,
//! each on a conductor of its own. Whether they disturb each other is shown by cells that run again alone, beside one
//! without arrivals: six at a time, built without optimisation on two CPUs, nearly doubled the 99th percentiles.

mod background;
mod cluster;
mod stream;
mod way;

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tokio::time::{Instant, sleep_until};
use tutti_measure::{
    results::{self, Origin},
    statistics::Summary,
};

use crate::{
    background::Background,
    cluster::Cluster,
    stream::{Stream, prompts},
    way::{Device, Way},
};

const RATES: [f64; 3] = [0.25, 0.5, 1.0];
const PROMPTS: [usize; 3] = [4096, 8192, 12_288];
const WAYS: [&str; 3] = ["off", "scheduler", "scheduler-target"];
/// What differs between prompts that start alike.
const FRESH: usize = 256;

#[derive(Parser)]
struct Args {
    /// For how long prompts arrive in each cell.
    #[arg(long, default_value_t = 8.0)]
    seconds: f64,
    /// Cells that run at one time.
    #[arg(long, default_value_t = 1)]
    together: usize,
    #[command(flatten)]
    output: results::Output,
}

#[derive(Clone, Debug, Serialize)]
struct Cell {
    rate_per_s: f64,
    prompt: usize,
    prefix: Prefix,
    way: &'static str,
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
    /// Between tokens of the four.
    itl_ms: Summary,
    /// Of the prompts that arrived.
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
                waiting.extend(WAYS.map(|way| Cell { rate_per_s, prompt, prefix, way }));
            }
        }
    }
    for group in waiting.chunks(args.together.max(1)) {
        cells.extend(run_together(group.to_vec(), window).await?);
    }
    let alone = |way| Cell { rate_per_s: 1.0, prompt: 8192, prefix: Prefix::Cold, way };
    let mut again = Vec::new();
    for way in WAYS {
        again.extend(run_together(vec![alone(way)], window).await?);
    }
    let nobody = Cell { rate_per_s: 0.0, ..alone("off") };
    let without = run_together(vec![nobody], window).await?;
    let ways = Way::named(Device::Sim.ways(PROMPTS[2]), &WAYS);
    let figures = json!({
        "device": Device::Sim, "ways": ways, "cells": cells, "again_alone": again, "without_arrivals": without,
    });
    results::write(&origin, figures, &args.output)
}

/// Each on a conductor of its own.
async fn run_together(cells: Vec<Cell>, window: Duration) -> Result<Vec<Found>, String> {
    let number = cells.len();
    let tasks: Vec<_> = cells
        .into_iter()
        .enumerate()
        .map(|(place, cell)| tokio::spawn(run(cell, window, place, number)))
        .collect();
    let mut found = Vec::new();
    for task in tasks {
        let cell = task.await.map_err(|e| format!("a cell failed: {e}"))??;
        eprintln!("{:?}: itl {:.1?}, ttft {:.1?}", cell.cell, cell.itl_ms, cell.ttft_ms);
        found.push(cell);
    }
    Ok(found)
}

/// The cell at a `place` among a `number` that run at one time: their prompts arrive one after the other.
async fn run(cell: Cell, window: Duration, place: usize, number: usize) -> Result<Found, String> {
    let ways = Way::named(Device::Sim.ways(PROMPTS[2]), &[cell.way]);
    let mut flags = Device::Sim.flags();
    flags.extend(ways.into_iter().flat_map(|way| way.flags));
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
        let share = arrival as f64 + (place as f64 + 0.5) / number as f64;
        sleep_until(began + Duration::from_secs_f64(share / cell.rate_per_s)).await;
        streams.push(Stream::start(&cluster.target, prompt, 1));
    }
    sleep_until(began + window).await;
    let mut ttft = Vec::new();
    for stream in streams {
        ttft.push(stream.end().await?.ttft_ms());
    }
    let gaps = background.stop(began.into_std(), std::time::Instant::now()).await?;
    // Waits for a process, while other cells need this thread.
    tokio::task::spawn_blocking(|| cluster.stop()).await.map_err(|e| format!("a stop failed: {e}"))??;
    Ok(Found { cell, itl_ms: Summary::of(gaps), ttft_ms: Summary::of(ttft) })
}
