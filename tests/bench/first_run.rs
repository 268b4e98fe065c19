//! `cargo bench --bench first_run`: basic figures of a running cluster, as JSON.
//!
//! The bench starts two conductors on loopback. One serves the shape of Qwen3-0.6B with dummy bf16 weights, for time to
//! the first token, memory, prefill and decode. The other serves the shipped model to many streams. The CPU time of its
//! conductor is the cost of the control plane.

mod support {
    pub mod cluster;
    pub mod figures;
    pub mod speed;
}

use std::process::ExitCode;

use clap::Parser;
use serde_json::json;
use tutti_measure::results::{self, Origin};

use support::{cluster::Cluster, figures};

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    output: results::Output,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("first_run", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("first_run");
    let shape = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bench/qwen3-0.6b");
    let pool = figures::KV_POOL_BYTES.to_string();
    let large = Cluster::start(&[
        "--model",
        shape,
        "--load-format=dummy",
        "--skip-tokenizer-init",
        "--max-model-len=4096",
        "--kv-cache-memory",
        &pool,
    ])
    .await?;
    let start = large.first_token().await?;
    let prefill = figures::prefill(&large).await?;
    let mut decode = Vec::new();
    for batch in [1, 4, 16] {
        decode.push(figures::decode(&large, batch).await?);
    }
    let memory = figures::memory(&large)?;
    large.stop()?;

    let defaults: [&str; 0] = [];
    let small = Cluster::start(&defaults).await?;
    small.first_token().await?;
    let control = figures::control_plane(&small).await?;
    small.stop()?;

    let figures = json!({
        "qwen3_0_6b_bf16": { "start": start, "prefill": prefill, "decode": decode, "memory": memory },
        "control_plane": control,
    });
    results::write(&origin, figures, &args.output)
}
