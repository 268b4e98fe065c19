//! `cargo bench --bench newcomer`: what a long prompt does to those that decode, and to a short one right behind it, with
//! each way to run long prompts; and the same of twelve long prompts, four at a time and all at once.
//!
//! Starts a conductor for each run. A stream that gives fewer tokens than asked for, or a run whose requests did not
//! overlap as they should, fails the bench.

mod cluster;
mod comparison;
mod seed;
mod stream;
mod twelve;
mod way;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use serde_json::{Value, json};
use tutti_measure::results::{self, Origin};

use crate::{
    cluster::Cluster,
    comparison::compare,
    way::{Device, Way},
};

const SEED_WAYS: [&str; 5] = ["off", "engine", "engine-target", "scheduler", "scheduler-target"];
const TWELVE_WAYS: [&str; 7] =
    ["serial", "off", "engine", "scheduler", "scheduler-fair", "scheduler-first-come", "scheduler-target"];
/// Each run takes minutes there.
const FEW_WAYS: [&str; 4] = ["serial", "off", "scheduler", "scheduler-target"];

#[derive(Parser)]
struct Args {
    /// What the workers compute on.
    #[arg(long, value_enum, default_value = "sim")]
    device: Device,
    /// Runs of each way [default: 5 of the seed workload and 3 of the twelve on sim, 1 on cpu]
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
    #[command(flatten)]
    output: results::Output,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("newcomer", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("newcomer");
    let mut figures = json!({ "device": args.device, "seed_workload": seed_workload(&args).await? });
    let twelve = args.twelve.unwrap_or(if args.device == Device::Sim { 4096 } else { 1024 });
    if twelve > 0 {
        figures["twelve_four_at_a_time"] = twelve_prompts(&args, twelve, 4).await?;
        if args.device == Device::Sim {
            figures["twelve_at_once"] = twelve_prompts(&args, twelve, 12).await?;
        }
    }
    results::write(&origin, figures, &args.output)
}

async fn seed_workload(args: &Args) -> Result<Value, String> {
    let Args { device, long, short, .. } = *args;
    let ways = Way::named(device.ways(long), &SEED_WAYS);
    let repeats = args.repeats.unwrap_or(if device == Device::Sim { 5 } else { 1 });
    let run = async |way: &Way, repeat: usize| {
        let cluster = start(device, way, args.traces.as_deref().filter(|_| repeat == 0)).await?;
        let run = seed::Run::measure(&cluster, device, (long, short), 100 * repeat as u64).await?;
        cluster.stop()?;
        Ok(run)
    };
    let found = compare(&ways, &["off", "engine"], repeats, run).await?;
    Ok(json!({ "long": long, "short": short, "found": found }))
}

async fn twelve_prompts(args: &Args, prompt: usize, at_a_time: usize) -> Result<Value, String> {
    let device = args.device;
    let (names, repeats, max_tokens) = match device {
        Device::Sim => (&TWELVE_WAYS[..], 3, 256),
        Device::Cpu => (&FEW_WAYS[..], 1, 64),
    };
    let ways = Way::named(device.ways(prompt), names);
    let run = async |way: &Way, repeat: usize| {
        let cluster = start(device, way, None).await?;
        let seed = 100 * repeat as u64;
        let run = twelve::Run::measure(&cluster, (prompt, max_tokens), at_a_time, seed).await?;
        cluster.stop()?;
        Ok(run)
    };
    let found = compare(&ways, &["serial", "off", "engine"], args.repeats.unwrap_or(repeats), run).await?;
    Ok(json!({ "prompt": prompt, "max_tokens": max_tokens, "at_a_time": at_a_time, "found": found }))
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
