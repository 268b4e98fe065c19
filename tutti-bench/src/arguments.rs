//! The command line.

use std::{fs, path::PathBuf, time::Duration};

use clap::{Args, Parser};
use serde_json::{Map, Value, json};

use crate::{
    Error, VERSION,
    arrivals::{Arrivals, Process},
    client::{Api, Dialect, Target},
    lengths::Lengths,
    run::{Limits, Load, Times},
    statistics::Objectives,
    workload::{Alphabet, File, Synthetic, Workload, reserved},
};

/// Number of requests of a run without `--requests`, `--duration` and `--workload`.
const DEFAULT_REQUESTS: u64 = 100;
/// Number of requests in flight in a closed loop without `--concurrency`.
const DEFAULT_CONCURRENCY: usize = 8;

/// Loads an OpenAI-compatible server, or Tutti over gRPC, and measures latency and throughput.
#[derive(Clone, Debug, Parser)]
#[command(name = "tutti-bench", version = VERSION, term_width = 0)]
#[command(after_help = "DURATION is a number with a unit: 250ms, 30s, 5m or 1h. \
    LENGTHS is N, MIN:MAX, normal:MEAN:DEVIATION:MAX or lognormal:MEDIAN:SIGMA:MAX.\n\
    Exit codes: 0 all requests were served, 1 some were not, 64 wrong arguments, 70 the server cannot be reached, \
    130 interrupted.")]
pub struct Arguments {
    #[command(flatten)]
    server: ServerArguments,
    #[command(flatten)]
    load: LoadArguments,
    #[command(flatten)]
    workload: WorkloadArguments,
    #[command(flatten)]
    report: ReportArguments,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
struct ServerArguments {
    /// Base URL of the server [default: http://127.0.0.1:8000, over gRPC http://127.0.0.1:50051]
    #[arg(long)]
    url: Option<String>,
    /// API to load
    #[arg(long, value_enum, default_value = "completions")]
    api: Api,
    /// Model to ask for [default: the first one that the server lists]
    #[arg(long)]
    model: Option<String>,
    /// File with the API key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// File with the certificates of further authorities to trust, in PEM form, for a server whose certificate no
    /// public authority has signed
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Maximum time of a request
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10m")]
    timeout: Duration,
    /// Send only fields of OpenAI's API: outputs may end early, and if the server does not count tokens, each event
    /// counts as one
    #[arg(long)]
    plain: bool,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Load")]
struct LoadArguments {
    /// Closed loop: number of requests in flight [default: 8]
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with_all = ["rate", "replay"])]
    concurrency: Option<usize>,
    /// Open loop: requests per second on average; `inf` sends all at once
    #[arg(long, value_name = "R", value_parser = rate, conflicts_with = "replay")]
    rate: Option<f64>,
    /// Open loop: send each request of the workload at its arrival_s
    #[arg(long, requires = "workload", conflicts_with = "repeat")]
    replay: bool,
    /// Gaps between requests of --rate
    #[arg(long, value_enum, default_value = "poisson")]
    arrivals: Process,
    /// Open loop: maximum number of requests in flight; a request that is due waits for room, and its latency includes
    /// the wait
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value = "10000")]
    max_in_flight: usize,
    /// Number of requests [default: 100; all with --duration or --workload]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Time after which no request is sent
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    duration: Option<Duration>,
    /// Number of requests before the run that are not measured, taken from the start of the workload
    #[arg(long, value_name = "N", default_value_t = 1)]
    warm_up: u64,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Workload")]
struct WorkloadArguments {
    /// File of requests, a JSON object per line: prompt or messages, max_tokens, and optionally arrival_s and body
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input_tokens", "output_tokens", "shared_prefix", "prefixes", "vocab_size", "words"])]
    workload: Option<PathBuf>,
    /// Send the requests of the file again and again
    #[arg(long, requires = "workload")]
    repeat: bool,
    /// Tokens of a prompt
    #[arg(long, value_name = "LENGTHS", default_value = "128")]
    input_tokens: Lengths,
    /// Tokens of an output
    #[arg(long, value_name = "LENGTHS", default_value = "64")]
    output_tokens: Lengths,
    /// Number of tokens at the start of a prompt that other prompts share
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    shared_prefix: u32,
    /// Number of different shared prefixes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), default_value_t = 1)]
    prefixes: u32,
    /// Upper bound, exclusive, of a prompt's token ids
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), default_value_t = 256)]
    vocab_size: u32,
    /// Make prompts of words, each about one token long, instead of token ids; always so for --api chat
    #[arg(long)]
    words: bool,
    /// Seed of prompts, lengths and arrivals
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Further fields of every request, as a JSON object
    #[arg(long, value_name = "JSON", value_parser = object)]
    body: Option<Map<String, Value>>,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Report")]
struct ReportArguments {
    /// Maximum time to the first token of a good request
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    slo_ttft: Option<Duration>,
    /// Maximum mean time per token after the first of a good request
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    slo_itl: Option<Duration>,
    /// File for the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// File for the report as an HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// A checked command line.
#[derive(Debug)]
pub struct Plan {
    /// The server.
    pub target: Target,
    /// The requests.
    pub workload: Workload,
    /// Number of requests before the run that are not measured.
    pub warm_up: u64,
    /// The times at which requests are sent.
    pub load: Load,
    /// The end of the run.
    pub limits: Limits,
    /// Latency bounds of a good request.
    pub objectives: Objectives,
    /// The load, for the report.
    pub described_load: Value,
    /// The workload, for the report.
    pub described_workload: Value,
    /// File that receives the report as JSON.
    pub json: Option<PathBuf>,
    /// File that receives the report as an HTML page.
    pub html: Option<PathBuf>,
}

impl Arguments {
    /// Checks the flags together, and reads the files that flags name.
    pub fn plan(self) -> Result<Plan, Error> {
        let Self { server, load, workload, report } = self;
        let api = server.api;
        let api_key = server.api_key_file.as_ref().map(|file| {
            let text = fs::read_to_string(file).map_err(|e| Error::file(file, e))?;
            let key = text.trim();
            if key.is_empty() || key.chars().any(|c| c.is_control() || !c.is_ascii()) {
                let why = format!("{} must hold one key in ASCII on one line", file.display());
                return Err(Error::argument("--api-key-file", why));
            }
            Ok(key.to_owned())
        });
        let default_url = if api == Api::Grpc { "http://127.0.0.1:50051" } else { "http://127.0.0.1:8000" };
        let url = server.url.unwrap_or_else(|| default_url.to_owned());
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(Error::argument(
                "--url",
                format!("must begin with http:// or https://, and is {url}"),
            ));
        }
        for file in [&report.json, &report.html].into_iter().flatten() {
            // The file is opened now, so that a run of hours does not end with a report that cannot be written.
            let open = fs::OpenOptions::new().create(true).append(true).open(file);
            open.map_err(|e| Error::file(file, e))?;
        }
        let requests = match (load.requests, load.duration, &workload.workload) {
            (None, None, None) => Some(DEFAULT_REQUESTS),
            (None, None, Some(_)) if workload.repeat => {
                return Err(Error::argument(
                    "--repeat",
                    "needs --requests or --duration, or it would never end",
                ));
            }
            (requests, ..) => requests,
        };
        let warm_up = load.warm_up;
        let limits = Limits { requests, duration: load.duration };
        let seed = workload.seed;
        let (workload, described_workload) = workload.read(api)?;
        if let (true, Workload::File(File { timed: false, .. })) = (load.replay, &workload) {
            return Err(Error::argument("--replay", "needs a workload whose lines have arrival_s"));
        }
        if load.replay && warm_up > 0 {
            return Err(Error::argument("--replay", "needs --warm-up 0, because it sends each request once"));
        }
        let (load, described_load) = load.describe(seed);
        let in_flight = match load {
            Load::Closed { concurrency } => concurrency,
            Load::Open { max_in_flight, .. } => max_in_flight,
        };
        let target = Target {
            url,
            api,
            model: server.model,
            api_key: api_key.transpose()?,
            authorities: server.ca,
            timeout: server.timeout,
            dialect: if server.plain { Dialect::Plain } else { Dialect::Extended },
            in_flight,
        };
        Ok(Plan {
            target,
            workload,
            warm_up,
            load,
            limits,
            objectives: Objectives { ttft: report.slo_ttft, itl: report.slo_itl },
            described_load,
            described_workload,
            json: report.json,
            html: report.html,
        })
    }
}

impl LoadArguments {
    fn describe(&self, seed: u64) -> (Load, Value) {
        let max_in_flight = self.max_in_flight;
        let limits =
            json!({ "requests": self.requests, "duration_s": self.duration.map(|d| d.as_secs_f64()) });
        let (load, mut described) = match self.rate {
            _ if self.replay => (
                Load::Open { times: Times::OfWorkload, max_in_flight },
                json!({ "loop": "open", "arrivals": "replay", "max_in_flight": max_in_flight }),
            ),
            Some(rate) => (
                Load::Open { times: Times::Drawn(Arrivals::new(self.arrivals, rate, seed)), max_in_flight },
                // JSON has no infinity.
                json!({
                    "loop": "open", "arrivals": self.arrivals, "max_in_flight": max_in_flight,
                    "rate": if rate.is_finite() { json!(rate) } else { json!("inf") },
                }),
            ),
            None => {
                let concurrency = self.concurrency.unwrap_or(DEFAULT_CONCURRENCY);
                (Load::Closed { concurrency }, json!({ "loop": "closed", "concurrency": concurrency }))
            }
        };
        described["limits"] = limits;
        (load, described)
    }
}

impl WorkloadArguments {
    fn read(self, api: Api) -> Result<(Workload, Value), Error> {
        let extra = self.body.unwrap_or_default();
        for key in extra.keys() {
            if let Some(why) = reserved(key, api) {
                return Err(Error::argument("--body", format!("{key} {why}")));
            }
        }
        let describe = |described: serde_json::Result<Value>| {
            described.map_err(|e| Error::Internal(format!("the workload is no JSON: {e}")))
        };
        if let Some(path) = &self.workload {
            let file = File::check(path, api, self.repeat, extra)?;
            let described = describe(serde_json::to_value(&file))?;
            return Ok((Workload::File(file), described));
        }
        let words = self.words || api == Api::Chat;
        let synthetic = Synthetic {
            input_tokens: self.input_tokens,
            output_tokens: self.output_tokens,
            shared_prefix: self.shared_prefix,
            prefixes: self.prefixes,
            alphabet: if words { Alphabet::Words } else { Alphabet::TokenIds },
            vocab_size: self.vocab_size,
            seed: self.seed,
            extra,
            next: 0,
        };
        let described = describe(serde_json::to_value(&synthetic))?;
        Ok((Workload::Synthetic(synthetic), described))
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        // Tokio's semaphores bound their permits. A million is below that bound, and more requests than a machine can
        // hold.
        Ok(number) if (1..=1_000_000).contains(&number) => Ok(number),
        _ => Err("must be an integer from 1 to 1000000".into()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // At a lower rate, arrival times would overflow the clock.
        Ok(rate) if rate >= 1e-6 => Ok(rate),
        _ => Err("must be a number from 0.000001 on, or inf".into()),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let found = units.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)));
    match found.map(|(number, seconds)| (number.parse::<f64>(), seconds)) {
        Some((Ok(number), seconds)) if number > 0.0 && number * seconds <= 3e7 => {
            Ok(Duration::from_secs_f64(number * seconds))
        }
        _ => Err("must be a number over 0 with a unit, such as 250ms, 30s, 5m or 1h".into()),
    }
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|e| format!("must be a JSON object: {e}"))
}

#[cfg(test)]
mod tests;
