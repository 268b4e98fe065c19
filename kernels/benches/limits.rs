//! `cargo bench -p tutti-kernels --bench limits`: limits of the machine as JSON, for comparison with the kernels:
//! memory bandwidth, operations per second of each instruction path, and `nop` instructions per second. The last rate
//! drops if other programs use the cores.

use std::process::ExitCode;

use clap::Parser;
use serde_json::json;
use tutti_measure::{
    limits::Limits,
    results::{self, Origin},
};

#[derive(Parser)]
struct Args {
    /// Threads that read and compute at the same time [default: one per core].
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    output: results::Output,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let origin = Origin::of("cargo bench -p tutti-kernels --bench limits");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let limits = Limits::of(args.threads.unwrap_or(cores));
    results::exit("limits", results::write(&origin, json!({ "limits": limits }), &args.output))
}
