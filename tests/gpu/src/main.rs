//! Runs checks and benches of the CUDA device from a bundle, on a machine that has only a driver and the libraries of
//! CUDA 13. `tests/gpu/bundle` makes the bundle, in which this program is called `run`.
//!
//! ```text
//! run ──┬── kernel-tests    each operation against the CPU device
//!       ├── golden-tests    golden models against Hugging Face transformers
//!       ├── conductor       the shipped model over HTTP
//!       └── forward         milliseconds of steps at the shapes of real models
//! ```
//!
//! One time limit applies to all parts together. The results so far are written after each part, so that an interrupted
//! run leaves them.

#![allow(clippy::print_stdout)] // The results are the output.

mod child;
mod figures;
mod libraries;
mod report;
mod serving;
mod suites;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

use self::report::Report;

#[derive(Parser)]
#[command(about = "Checks and benches the CUDA device on this machine")]
struct Args {
    /// Run only a part of the checks, and the benches of a small model. For emulated GPUs.
    #[arg(long)]
    short: bool,
    /// Time limit of all parts, in seconds.
    #[arg(long, default_value_t = 540)]
    limit: u64,
    /// File for the results.
    #[arg(long, default_value = "gpu-results.json")]
    json: PathBuf,
    /// Workers that serve the shipped model.
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// Parts to run: kernels, goldens, serving, benches [default: all].
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

/// Settings of a run.
struct Bundle {
    /// Folder of the bundle.
    folder: PathBuf,
    /// Folders that the loader searches for the libraries of CUDA.
    libraries: String,
    /// Moment at which the time limit of all parts ends.
    deadline: Instant,
    short: bool,
    workers: usize,
}

impl Bundle {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let began = Instant::now();
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new(".")).to_owned();
    let deadline = began + Duration::from_secs(args.limit);
    let libraries = libraries::search_path();
    println!("libraries of CUDA are looked for in {libraries:?}, and where the loader looks else");
    let bundle = Bundle { folder, libraries, deadline, short: args.short, workers: args.workers };
    let mut report = Report::new(args.json);
    type Run = fn(&Bundle, &mut Report);
    let phases: [(&str, Run); 4] = [
        ("kernels", suites::kernels),
        ("goldens", suites::goldens),
        ("serving", serving::run),
        ("benches", figures::run),
    ];
    for (name, run) in phases {
        if args.only.is_empty() || args.only.iter().any(|only| only == name) {
            let began = Instant::now();
            println!("== {name}");
            run(&bundle, &mut report);
            println!("== {name}: {:.0} s", began.elapsed().as_secs_f64());
            report.write(began.elapsed());
        }
    }
    match report.end() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
