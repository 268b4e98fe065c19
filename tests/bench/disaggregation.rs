//! `cargo bench --bench disaggregation`: latency of streams that decode, and of a short prompt, while a long prompt is
//! prefilled. It compares two colocated workers with two disaggregated workers, of which one prefills and the other
//! decodes. It also reports the part of the transfer time that the prefill does not hide.
//!
//! The bench starts a conductor for each run. It fails if a stream returns fewer tokens than it asked for, or if the
//! requests of a run do not overlap as they must.

mod support {
    pub mod cluster;
    pub mod comparison;
    pub mod one_long_prompt;
    pub mod shape;
    pub mod stream;
    pub mod variant;
}

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tutti_measure::results::{self, Origin};

use support::{
    cluster::Cluster,
    comparison::{self, Figure, compare},
    one_long_prompt,
    shape::Shape,
    variant::{Device, Variant},
};

const TOPOLOGY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/topology/disaggregated.toml");
/// Number of requests per run. Each is transferred once.
const REQUESTS: f64 = 6.0;
/// Maximum time until the workers have reported all transfers.
const REPORT_LIMIT: Duration = Duration::from_secs(10);

#[derive(Parser)]
struct Args {
    /// Device of the workers.
    #[arg(long, value_enum, default_value = "sim")]
    device: Device,
    /// Runs of each variant.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Tokens of the long prompt.
    #[arg(long, default_value_t = 4096)]
    long: usize,
    /// Tokens of the short prompt.
    #[arg(long, default_value_t = 64)]
    short: usize,
    #[command(flatten)]
    output: results::Output,
}

/// Result of one run.
#[derive(Debug, Serialize)]
struct Run {
    #[serde(flatten)]
    latency: one_long_prompt::Run,
    /// Figures of the transfers of all requests of the run. `None` if the workers are colocated.
    transfer: Option<Transfer>,
}

#[derive(Debug, Serialize)]
struct Transfer {
    bytes: f64,
    /// Milliseconds from sending a request's first KV page to the receiver's acknowledgement of its last page, summed
    /// over requests.
    pushing_ms: f64,
    /// Part of `pushing_ms` after the end of the prefill.
    exposed_ms: f64,
}

impl comparison::Run for Run {
    fn figures(&self) -> Vec<Figure> {
        self.latency.figures()
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
    let variant = |name, shape: [&str; 2]| {
        let flags = shape.iter().chain(threads).map(|&flag| flag.to_owned()).collect();
        Variant { name, flags }
    };
    let variants =
        [variant("colocated", ["--workers=2", "--tp=1"]), variant("disaggregated", ["--topology", TOPOLOGY])];
    let run = async |variant: &Variant, repeat: usize| {
        let mut flags = device.flags(Shape::Qwen3);
        flags.extend(variant.flags.iter().cloned());
        let cluster = Cluster::start(&flags).await?;
        let latency =
            one_long_prompt::Run::measure(&cluster, device, (long, short), 100 * repeat as u64).await?;
        let transfer =
            if variant.name == "disaggregated" { Some(Transfer::of(&cluster).await?) } else { None };
        cluster.stop()?;
        Ok(Run { latency, transfer })
    };
    let found = compare(&variants, &["colocated"], args.repeats, run).await?;
    let figures = json!({ "device": device, "long": long, "short": short, "found": found });
    results::write(&origin, figures, &args.output)
}

impl Transfer {
    /// Reads the transfer counters of the cluster's workers, after they have reported all transfers.
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

/// Returns the sum of all series with this name and label.
fn sum(metrics: &str, name: &str, label: &str) -> f64 {
    let series = metrics.lines().filter(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') && rest.contains(label))
    });
    series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
