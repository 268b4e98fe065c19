//! `load --url http://127.0.0.1:8000 --rate 8 --requests 200` prints figures as JSON, with exit code 1 if they
//! are invalid.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use serde_json::json;
use tutti_load::{client::Target, plan::Workload, report::Report, run::run};
use tutti_measure::machine::Machine;

/// Sends requests to an OpenAI-compatible server at times drawn in advance, and reports latency and throughput.
#[derive(Debug, Parser)]
struct Args {
    /// Base URL of the server.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Model to ask for [default: the first one that the server lists].
    #[arg(long)]
    model: Option<String>,
    /// Requests per second on average (Poisson); `inf` sends all at once.
    #[arg(long, default_value_t = 4.0, value_parser = positive)]
    rate: f64,
    /// Number of requests.
    #[arg(long, default_value_t = 100)]
    requests: usize,
    /// Prompt length in tokens, or MIN:MAX.
    #[arg(long, default_value = "128", value_parser = range)]
    prompt_tokens: (u32, u32),
    /// Tokens to generate per request.
    #[arg(long, default_value_t = 64)]
    max_tokens: u32,
    /// Exclusive bound of prompt token ids.
    #[arg(long, default_value_t = 256)]
    vocab_size: u32,
    /// Seed of arrival times and prompts.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Requests before the run that do not count.
    #[arg(long, default_value_t = 1)]
    warmup: usize,
    /// Timeout of a request, in seconds.
    #[arg(long, default_value_t = 600)]
    timeout_s: u64,
    /// File for the report [default: standard output].
    #[arg(long)]
    out: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 => Ok(rate),
        _ => Err("must be a number over 0, or inf".into()),
    }
}

fn range(text: &str) -> Result<(u32, u32), String> {
    let (low, high) = text.split_once(':').unwrap_or((text, text));
    match (low.parse(), high.parse()) {
        (Ok(low), Ok(high)) if 1 <= low && low <= high => Ok((low, high)),
        _ => Err("must be a length of at least 1, or MIN:MAX".into()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match measure(Args::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("load: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the load and writes the report. Returns true if its figures are valid.
async fn measure(args: Args) -> Result<bool, String> {
    let target = Target::new(&args.url, args.model, Duration::from_secs(args.timeout_s)).await?;
    let workload = Workload {
        requests: args.requests,
        rate: args.rate,
        prompt_tokens: args.prompt_tokens,
        max_tokens: args.max_tokens,
        vocab_size: args.vocab_size,
        seed: args.seed,
    };
    let machine = Machine::this();
    let warmup = Workload { requests: args.warmup, rate: f64::INFINITY, ..workload.clone() };
    run(&target, &warmup).await;
    let (records, duration) = run(&target, &workload).await;
    let report = Report::new(workload, &records, duration);
    let text = json!({ "machine": machine, "model": target.model, "report": report });
    let text = serde_json::to_string_pretty(&text).map_err(|e| format!("the report is no JSON: {e}"))? + "\n";
    match args.out {
        Some(file) => std::fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))?,
        None => {
            use std::io::Write;
            std::io::stdout().write_all(text.as_bytes()).map_err(|e| format!("standard output: {e}"))?;
        }
    }
    for doubt in &report.invalid {
        eprintln!("load: not valid: {doubt}");
    }
    Ok(report.invalid.is_empty())
}
