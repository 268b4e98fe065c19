//! The JSON of a bench: its figures, the command, the commit and the machine.

use std::{
    io::Write,
    path::PathBuf,
    process::{Command, ExitCode},
};

use serde::Serialize;
use serde_json::{Value, json};

use crate::machine::Machine;

/// The command, commit and machine that figures come from.
#[derive(Debug, Serialize)]
pub struct Origin {
    command: String,
    commit: String,
    machine: Machine,
}

impl Origin {
    /// Describes a bench of the root package. Call it before the bench runs anything, because it records how busy the
    /// machine is.
    pub fn now(bench: &str) -> Self {
        Self::of(&format!("cargo bench --bench {bench}"))
    }

    /// Describes the bench that `command` runs, with the arguments of this process added.
    pub fn of(command: &str) -> Self {
        // `--bench` is left out, because Cargo adds it by itself.
        let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
        let command = format!("{command} -- {}", args.join(" "));
        Self {
            command: command.trim_end_matches(" -- ").to_owned(),
            commit: commit(),
            machine: Machine::this(),
        }
    }
}

/// Returns the commit of the working tree, with a mark if tracked sources were changed.
fn commit() -> String {
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output();
        out.ok().map_or(String::new(), |out| String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let sources = ["--", ":/*.rs", ":/*Cargo.*"];
    let changed = git(&[&["status", "--porcelain", "--untracked-files=no"], &sources[..]].concat());
    git(&["rev-parse", "--short=12", "HEAD"]) + if changed.is_empty() { "" } else { " with changes" }
}

/// Flags of every bench.
#[derive(Debug, clap::Args)]
pub struct Output {
    /// File for the figures [default: standard output].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Ignored; `cargo bench` adds this flag.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Writes the figures as JSON to the file of `--out`, else to standard output.
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

/// Prints a failure and returns the exit code of the bench.
pub fn exit(bench: &str, measured: Result<(), String>) -> ExitCode {
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{bench}: {message}");
            ExitCode::FAILURE
        }
    }
}
