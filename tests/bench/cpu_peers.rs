//! `cargo bench --bench cpu_peers`: Tutti on a CPU beside the strongest servers there are for one, at the shape of
//! Qwen3-0.6B with random weights: prefill, decode, the mixed workload, the start, and what all of it is over the best peer.
//!
//! tests/bench/peers/setup installs the peers and makes the checkpoint. All servers of a part run at the same time, and one
//! after the other is asked; a peer that cannot run is in the figures with its reason. The machine's limits are measured
//! before each round.

mod cluster;
mod goals;
mod mixed;
mod part;
mod peers;
mod speed;
mod stream;

use std::{collections::BTreeMap, process::ExitCode};

use clap::Parser;
use serde_json::json;
use tutti_measure::results::{self, Origin};

use crate::{
    part::{Part, Settings},
    peers::Peer,
};

#[derive(Parser)]
struct Args {
    /// The parts to run.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Part::Prefill, Part::Decode, Part::Mixed, Part::Start, Part::Int8])]
    only: Vec<Part>,
    /// Who is compared with Tutti.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Peer::Openvino, Peer::Vllm, Peer::LlamaCpp])]
    peers: Vec<Peer>,
    /// Samples of each figure.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// Compute threads of each server.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// What Tutti is to keep to in the mixed workload: below a quarter of the peers' longest ITL.
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
    let Args { threads, repeats, target_itl_ms, .. } = args;
    let settings = Settings { peers: args.peers, threads, repeats, target_itl_ms };
    let mut found = BTreeMap::new();
    for group in args.only.iter().flat_map(|part| part.groups()) {
        found.insert(group.name, group.measure(&settings).await?);
    }
    let figures = json!({
        "shape": "Qwen3-0.6B, random weights",
        "versions": peers::versions(),
        "settings": settings,
        "must_show": goals::compared(&found),
        "parts": found,
    });
    results::write(&origin, figures, &args.output)
}
