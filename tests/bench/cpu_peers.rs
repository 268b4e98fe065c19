//! `cargo bench --bench cpu_peers`: compares Tutti on a CPU with other servers for CPUs, at the shape of a real model
//! with random weights. The figures are prefill, decode, a mixed workload, the start, and the ratio to the best peer.
//!
//! `tests/bench/peers/setup` installs the peers and makes the checkpoint. All servers of a group run at the same time
//! and are measured in turns. The figures name each peer that cannot run, and the reason. The machine's limits are
//! measured before each round.

mod support {
    pub mod cluster;
    pub mod goals;
    pub mod mixed;
    pub mod peers;
    pub mod scenario;
    pub mod shape;
    pub mod speed;
    pub mod stream;
}

use std::{collections::BTreeMap, process::ExitCode};

use clap::Parser;
use serde_json::json;
use tutti_measure::results::{self, Origin};

use support::{
    goals,
    peers::{self, Peer},
    scenario::{Scenario, Settings},
    shape::Shape,
};

#[derive(Parser)]
struct Args {
    /// Shape of the model.
    #[arg(long, value_enum, default_value = "qwen3-0.6b")]
    shape: Shape,
    /// Scenarios to run.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Scenario::Prefill, Scenario::Decode, Scenario::Mixed, Scenario::Start, Scenario::Int8])]
    only: Vec<Scenario>,
    /// Servers to compare with Tutti.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Peer::Openvino, Peer::Vllm, Peer::LlamaCpp])]
    peers: Vec<Peer>,
    /// Number of samples of each figure.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Compute threads of each server.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Tutti's ITL target in the mixed workload, in milliseconds. The default is below a quarter of the peers' longest
    /// ITL.
    #[arg(long, default_value_t = 300)]
    target_itl_ms: u32,
    #[command(flatten)]
    output: results::Output,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("cpu_peers", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("cpu_peers");
    let Args { shape, threads, repeats, target_itl_ms, .. } = args;
    let settings = Settings { shape, peers: args.peers, threads, repeats, target_itl_ms };
    let mut found = BTreeMap::new();
    for group in args.only.iter().flat_map(|scenario| scenario.groups()) {
        found.insert(group.name, group.measure(&settings).await?);
    }
    let figures = json!({
        "versions": peers::versions(),
        "settings": settings,
        "must_show": goals::compared(&found, shape),
        "groups": found,
    });
    results::write(&origin, figures, &args.output)
}
