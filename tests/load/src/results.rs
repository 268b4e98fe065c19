//! What a bench found, as JSON with everything that is needed to judge it.

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, ExitCode},
};

use serde::Serialize;
use serde_json::{Value, json};

use crate::machine::Machine;

/// What was run, on what, and of which source.
#[derive(Debug, Serialize)]
pub struct Origin {
    command: String,
    commit: String,
    machine: Machine,
}

impl Origin {
    /// Of a bench of the root package. To be taken before anything runs, since it tells how busy the machine is.
    pub fn now(bench: &str) -> Self {
        Self::of(&format!("cargo bench --bench {bench}"))
    }

    /// Of the bench that this command runs, to which the arguments of this process are added.
    pub fn of(command: &str) -> Self {
        // Cargo adds --bench.
        let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
        let command = format!("{command} -- {}", args.join(" "));
        Self {
            command: command.trim_end_matches(" -- ").to_owned(),
            commit: commit(),
            machine: Machine::this(),
        }
    }
}

/// Of the working tree, with a mark if its sources differ from it.
fn commit() -> String {
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output();
        out.ok().map_or(String::new(), |out| String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let sources = ["--", ":/*.rs", ":/*Cargo.*"];
    let changed = git(&[&["status", "--porcelain", "--untracked-files=no"], &sources[..]].concat());
    git(&["rev-parse", "--short=12", "HEAD"]) + if changed.is_empty() { "" } else { " with changes" }
}

/// Flags that every bench has.
#[derive(Debug, clap::Args)]
pub struct Output {
    /// Where to write the figures; standard output where this is not given.
    #[arg(long)]
    out: Option<PathBuf>,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Writes them where the flags say.
pub fn write(origin: &Origin, figures: Value, output: &Output) -> Result<(), String> {
    let mut all = json!({ "origin": origin });
    if let (Some(all), Value::Object(figures)) = (all.as_object_mut(), figures) {
        all.extend(figures);
    }
    let text = serde_json::to_string_pretty(&all).map_err(|e| e.to_string())? + "\n";
    match &output.out {
        Some(file) => std::fs::write(file, text).map_err(|e| format!("{}: {e}", file.display())),
        None => std::io::stdout().write_all(text.as_bytes()).map_err(|e| e.to_string()),
    }
}

/// How the bench's process ends.
pub fn exit(bench: &str, measured: Result<(), String>) -> ExitCode {
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{bench}: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The middle one.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return 0.0 };
    (values[last / 2] + values[values.len() / 2]) / 2.0
}
