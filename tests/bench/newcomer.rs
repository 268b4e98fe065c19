//! `cargo bench --bench newcomer`: what a long prompt does to those that decode, and to a short one right behind it, with
//! each way to run long prompts; and the same under twelve long prompts, four at a time.
//!
//! Starts a conductor for each run. The ways take turns, forwards and backwards, so that a machine that warms up or is
//! disturbed favours none. A stream that gives fewer tokens than asked for, or a run whose requests did not overlap as
//! they should, fails the bench.

mod cluster;
mod production;
mod results;
mod seed;
mod stream;
mod way;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use serde_json::{Map, Value, json};

use crate::{
    cluster::Cluster,
    results::Origin,
    way::{Device, Way},
};

const SEED_WAYS: [&str; 5] = ["off", "engine", "engine-target", "scheduler", "scheduler-target"];
const PRODUCTION_WAYS: [&str; 6] =
    ["serial", "off", "engine", "scheduler", "scheduler-first-come", "scheduler-target"];
/// Each run takes minutes there.
const FEW_WAYS: [&str; 4] = ["serial", "off", "scheduler", "scheduler-target"];

#[derive(Parser)]
struct Args {
    /// What the workers compute on.
    #[arg(long, value_enum, default_value = "sim")]
    device: Device,
    /// Runs of each way [default: 5 of the seed workload and 3 of the production form on sim, 1 on cpu]
    #[arg(long)]
    repeats: Option<usize>,
    /// Tokens of the long prompt.
    #[arg(long, default_value_t = 4096)]
    long: usize,
    /// Tokens of the short one.
    #[arg(long, default_value_t = 64)]
    short: usize,
    /// Tokens of each of the twelve prompts [default: 4096 on sim, 1024 on cpu]; 0 leaves them out.
    #[arg(long)]
    twelve: Option<usize>,
    /// Writes the step traces of each way's first run of the seed workload to this directory.
    #[arg(long)]
    traces: Option<PathBuf>,
    /// Where to write the figures; standard output where this is not given.
    #[arg(long)]
    out: Option<PathBuf>,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    match measure(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("newcomer: {message}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("newcomer");
    let seed = seed_workload(&args).await?;
    let mut figures = json!({ "device": args.device, "seed_workload": seed });
    let twelve = args.twelve.unwrap_or(if args.device == Device::Sim { 4096 } else { 1024 });
    if twelve > 0 {
        figures["production_form"] = production_form(&args, twelve).await?;
    }
    results::write(&origin, figures, args.out.as_deref())
}

async fn seed_workload(args: &Args) -> Result<Value, String> {
    let Args { device, long, short, .. } = *args;
    let ways = Way::named(device.ways(long), &SEED_WAYS);
    let repeats = args.repeats.unwrap_or(if device == Device::Sim { 5 } else { 1 });
    let mut runs: Vec<Vec<seed::Run>> = ways.iter().map(|_| Vec::new()).collect();
    for (repeat, place) in turns(ways.len(), repeats) {
        let trace = args.traces.as_deref().filter(|_| repeat == 0);
        let cluster = start(device, &ways[place], trace).await?;
        let run = seed::Run::measure(&cluster, device, (long, short), 100 * repeat as u64).await?;
        cluster.stop()?;
        eprintln!("{} {repeat}: {run:.1?}", ways[place].name);
        runs[place].push(run);
    }
    let mut found = Map::new();
    let mut medians = Vec::new();
    for (way, runs) in ways.iter().zip(&runs) {
        let of = seed::Medians::of(runs).map_err(|doubt| format!("{}: {doubt}", way.name))?;
        found.insert(way.name.into(), json!({ "flags": way.flags, "medians": &of, "runs": runs }));
        medians.push((way.name, of));
    }
    let of = |name: &str| medians.iter().find(|(way, _)| *way == name).map(|(_, medians)| medians);
    let mut ratios = Map::new();
    for base in ["off", "engine"] {
        for way in ["scheduler", "scheduler-target"] {
            let (Some(base_of), Some(way_of)) = (of(base), of(way)) else { continue };
            let ratios_of = json!({
                "ttft_of_long": base_of.ttft_ms_of_long / way_of.ttft_ms_of_long,
                "ttft_of_short": base_of.ttft_ms_of_short / way_of.ttft_ms_of_short,
                "throughput": way_of.output_tokens_per_s / base_of.output_tokens_per_s,
            });
            ratios.insert(format!("{way} over {base}"), ratios_of);
        }
    }
    Ok(json!({ "long": long, "short": short, "times_better": ratios, "ways": found }))
}

async fn production_form(args: &Args, prompt: usize) -> Result<Value, String> {
    let device = args.device;
    let (names, repeats, max_tokens) = match device {
        Device::Sim => (&PRODUCTION_WAYS[..], 3, 256),
        Device::Cpu => (&FEW_WAYS[..], 1, 64),
    };
    let ways = Way::named(device.ways(prompt), names);
    let mut runs: Vec<Vec<production::Run>> = ways.iter().map(|_| Vec::new()).collect();
    for (repeat, place) in turns(ways.len(), args.repeats.unwrap_or(repeats)) {
        let cluster = start(device, &ways[place], None).await?;
        let run = production::Run::measure(&cluster, prompt, max_tokens, 100 * repeat as u64).await?;
        cluster.stop()?;
        eprintln!("{} {repeat}: {run:.1?}", ways[place].name);
        runs[place].push(run);
    }
    let mut found = Map::new();
    let mut medians = Vec::new();
    for (way, runs) in ways.iter().zip(&runs) {
        let of = production::Medians::of(runs);
        found.insert(way.name.into(), json!({ "flags": way.flags, "medians": &of, "runs": runs }));
        medians.push((way.name, of));
    }
    let of = |name: &str| medians.iter().find(|(way, _)| *way == name).map(|(_, medians)| medians);
    let mut ratios = Map::new();
    for base in ["serial", "off", "engine"] {
        for way in ["scheduler", "scheduler-first-come", "scheduler-target"] {
            let (Some(base_of), Some(way_of)) = (of(base), of(way)) else { continue };
            let ratios_of = json!({
                "ttft_mean": base_of.ttft_ms_mean / way_of.ttft_ms_mean,
                "throughput": way_of.output_tokens_per_s / base_of.output_tokens_per_s,
                "itl_p50": base_of.itl_ms_p50 / way_of.itl_ms_p50,
            });
            ratios.insert(format!("{way} over {base}"), ratios_of);
        }
    }
    Ok(json!({ "prompt": prompt, "max_tokens": max_tokens, "times_better": ratios, "ways": found }))
}

/// Which way runs in each repeat: in order, then backwards, and so on.
fn turns(ways: usize, repeats: usize) -> impl Iterator<Item = (usize, usize)> {
    let place = move |repeat, turn| if repeat % 2 == 0 { turn } else { ways - 1 - turn };
    (0..repeats).flat_map(move |repeat| (0..ways).map(move |turn| (repeat, place(repeat, turn))))
}

async fn start(device: Device, way: &Way, traces: Option<&Path>) -> Result<Cluster, String> {
    let mut flags = device.flags();
    flags.extend(way.flags.iter().cloned());
    if let Some(traces) = traces {
        std::fs::create_dir_all(traces).map_err(|e| format!("{}: {e}", traces.display()))?;
        flags.push(format!("--trace-steps={}", traces.join(way.name).display()));
    }
    Cluster::start(&flags).await
}
