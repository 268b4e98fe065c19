//! `cargo bench --bench first_run`: the baseline figures of a running cluster, as JSON with the machine they are from.
//!
//! Starts real conductors on loopback: one serving the Qwen3-0.6B shape with dummy bf16 weights (start to first token,
//! memory, prefill, decode), and one serving the shipped model under many streams, where what the conductor's process
//! spends beside its worker's is the control plane's own cost.

mod cluster;
mod figures;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use serde_json::json;
use tutti_load::machine::Machine;

use crate::cluster::Cluster;

#[derive(Parser)]
struct Args {
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
            eprintln!("first_run: {message}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(args: Args) -> Result<(), String> {
    let machine = Machine::this();
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
        "machine": machine,
        "qwen3_0_6b_bf16": { "start": start, "prefill": prefill, "decode": decode, "memory": memory },
        "control_plane": control,
    });
    let text = serde_json::to_string_pretty(&figures).map_err(|e| e.to_string())? + "\n";
    match args.out {
        Some(file) => std::fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display())),
        None => {
            use std::io::Write;
            std::io::stdout().write_all(text.as_bytes()).map_err(|e| e.to_string())
        }
    }
}
