//! `cargo bench --bench disaggregation`: what a long prompt does to those that decode, and to a short one right behind it,
//! where one worker prefills for another, and where both do everything; and how much of the transfer between the two is
//! not hidden behind the prefill.
//!
//! Starts a conductor for each run. A stream that gives fewer tokens than asked for, or a run whose requests did not
//! overlap as they should, fails the bench.

mod cluster;
mod comparison;
mod seed;
mod stream;
mod way;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tutti_measure::results::{self, Origin};

use crate::{
    cluster::Cluster,
    comparison::{Figure, compare},
    way::{Device, Way},
};

const TOPOLOGY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/topology/disaggregated.toml");
/// Requests of the seed workload, each of which is handed over.
const REQUESTS: f64 = 6.0;
/// For how long workers may keep what they count to themselves.
const REPORT_LIMIT: Duration = Duration::from_secs(10);

#[derive(Parser)]
struct Args {
    /// What the workers compute on.
    #[arg(long, value_enum, default_value = "sim")]
    device: Device,
    /// Runs of each way.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Tokens of the long prompt.
    #[arg(long, default_value_t = 4096)]
    long: usize,
    /// Tokens of the short one.
    #[arg(long, default_value_t = 64)]
    short: usize,
    #[command(flatten)]
    output: results::Output,
}

/// One run of the seed workload.
#[derive(Debug, Serialize)]
struct Run {
    #[serde(flatten)]
    seed: seed::Run,
    /// Of its six requests together, where there is one.
    transfer: Option<Transfer>,
}

#[derive(Debug, Serialize)]
struct Transfer {
    bytes: f64,
    /// From each request's first page to the answer to its last.
    pushing_ms: f64,
    /// The part of it after the prefill's end.
    exposed_ms: f64,
}

impl comparison::Run for Run {
    fn figures(&self) -> Vec<Figure> {
        self.seed.figures()
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("disaggregation", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("disaggregation");
    let Args { device, long, short, .. } = args;
    let threads: &[&str] = if device == Device::Cpu { &["--threads=1"] } else { &[] };
    let way = |name, shape: [&str; 2]| {
        let flags = shape.iter().chain(threads).map(|&flag| flag.to_owned()).collect();
        Way { name, flags }
    };
    let ways = [way("together", ["--workers=2", "--tp=1"]), way("apart", ["--topology", TOPOLOGY])];
    let run = async |way: &Way, repeat: usize| {
        let mut flags = device.flags();
        flags.extend(way.flags.iter().cloned());
        let cluster = Cluster::start(&flags).await?;
        let seed = seed::Run::measure(&cluster, device, (long, short), 100 * repeat as u64).await?;
        let transfer = if way.name == "apart" { Some(Transfer::of(&cluster).await?) } else { None };
        cluster.stop()?;
        Ok(Run { seed, transfer })
    };
    let found = compare(&ways, &["together"], args.repeats, run).await?;
    let figures = json!({ "device": device, "long": long, "short": short, "found": found });
    results::write(&origin, figures, &args.output)
}

impl Transfer {
    /// What the cluster's workers have counted, once they have told of all.
    async fn of(cluster: &Cluster) -> Result<Self, String> {
        let began = Instant::now();
        loop {
            let text = cluster.target.metrics().await?;
            let of = |name: &str, label: &str| sum(&text, name, label);
            if of("tutti_worker_transfers", "outcome=\"handed_over\"") >= REQUESTS {
                return Ok(Self {
                    bytes: of("tutti_worker_transfer_bytes", ""),
                    pushing_ms: 1e3 * of("tutti_worker_transfer_seconds", "time=\"pushing\""),
                    exposed_ms: 1e3 * of("tutti_worker_transfer_seconds", "time=\"exposed\""),
                });
            }
            if began.elapsed() > REPORT_LIMIT {
                return Err(format!("not all hand-overs were counted after {REPORT_LIMIT:?}"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Of all series of that name with that label.
fn sum(metrics: &str, name: &str, label: &str) -> f64 {
    let series = metrics.lines().filter(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') && rest.contains(label))
    });
    series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
