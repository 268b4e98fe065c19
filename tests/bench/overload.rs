//! `cargo bench --bench overload`: five times the load that a cluster can serve.
//!
//! The capacity is measured first, by clients that each send their next request when the last one is answered. Then
//! requests arrive at random times: first at half of the capacity, then at five times the capacity, then at half of it
//! again. The figures show how much of the capacity is still served under overload, how fast the other requests are
//! refused, how full the queue was, and when the waiting time is back to its old value. The devices are simulated, so
//! the costs of a step do not depend on the machine.

mod support {
    pub mod cluster;
}

use std::{
    collections::BTreeMap,
    path::Path,
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{Instant, interval, sleep_until},
};
use tutti_load::{
    client::{Record, Target},
    plan::Workload,
};
use tutti_measure::{
    results::{self, Origin},
    statistics::Summary,
};

use support::cluster::Cluster;

/// Offered load divided by the capacity.
const OVERLOAD: f64 = 5.0;
/// Load before and after the overload, divided by the capacity.
const UNDISTURBED: f64 = 0.5;
/// Number of streams that measure the capacity. It is twice the number of requests that the workers run, so that no
/// worker waits for a client.
const CAPACITY_STREAMS: usize = 64;
/// Maximum number of choices per priority class that wait for their first token. The cluster serves this many in about
/// a second.
const MAX_QUEUED_CHOICES: usize = 96;
const PROMPT_TOKENS: (u32, u32) = (32, 256);
const OUTPUT_TOKENS: u32 = 32;
/// Part of each phase in which the system settles. Its requests do not count.
const SETTLING: Duration = Duration::from_secs(2);
/// A request counts as disturbed if its time to the first token exceeds this many times the 99th percentile of this
/// time before the overload.
const DISTURBED: f64 = 2.0;

/// Goals for the figures.
#[derive(Serialize)]
struct Goals {
    goodput_share: f64,
    refusal_ms_p99: f64,
    recovery_s: f64,
}

const GOALS: Goals = Goals { goodput_share: 0.9, refusal_ms_p99: 5.0, recovery_s: 2.0 };

#[derive(Parser)]
struct Args {
    /// Seconds of each phase.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    #[command(flatten)]
    output: results::Output,
}

/// A request's record and the time of its sending.
struct Sent {
    at: Instant,
    record: Record,
}

#[derive(Debug, Serialize)]
struct Overload {
    offered_per_s: f64,
    /// Number of requests per second that ended with as many tokens as they asked for.
    goodput_per_s: f64,
    /// Goodput divided by the capacity.
    goodput_share: f64,
    served: usize,
    /// Number of requests that were not served, by status or other reason.
    refused: BTreeMap<String, usize>,
    /// Milliseconds from sending to the refusal.
    refusal_ms: Summary,
    /// Milliseconds to the first token of served requests.
    ttft_ms: Summary,
    /// Milliseconds between the planned and the actual time of sending.
    lag_ms: Summary,
    /// Largest number of choices that waited for their first token, sampled every 20 ms.
    most_queued_choices: u64,
    max_queued_choices: usize,
}

#[derive(Debug, Serialize)]
struct Recovery {
    /// Seconds from the end of the overload to the last request that was refused or disturbed.
    seconds: f64,
    disturbed: usize,
    ttft_ms: Summary,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("overload", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("overload");
    let phase = Duration::from_secs(args.seconds.max(5));
    let cluster = Cluster::start(&["--config".into(), settings()?]).await?;
    let capacity = capacity(&cluster.target, phase).await?;
    eprintln!("capacity: {capacity:.1} requests per second");

    let before = arrive(&cluster.target, UNDISTURBED * capacity, phase, 1).await.join_all().await;
    let undisturbed = Summary::of(before.iter().filter_map(|sent| ttft_ms(&sent.record)).collect());
    if let Some(why) = before.iter().find_map(|sent| sent.record.failure.as_ref()) {
        return Err(format!("a request at half of the capacity failed: {why}"));
    }
    eprintln!("undisturbed TTFT: {undisturbed:.1?}");

    let gauge = QueueGauge::watch(cluster.target.clone());
    let began = Instant::now();
    let during = arrive(&cluster.target, OVERLOAD * capacity, phase, 2).await;
    let ended = Instant::now();
    let after = arrive(&cluster.target, UNDISTURBED * capacity, phase, 3).await;
    let (during, after) = (during.join_all().await, after.join_all().await);
    let most_queued_choices = gauge.most().await?;

    let overload = overload(&during, capacity, began + SETTLING..ended, most_queued_choices);
    eprintln!("{overload:.2?}");
    let recovery = recovery(&after, ended, DISTURBED * undisturbed.p99);
    eprintln!("{recovery:.2?}");
    cluster.stop()?;
    let figures = json!({
        "goals": GOALS, "seconds_per_phase": phase.as_secs(), "capacity_per_s": capacity,
        "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS,
        "undisturbed_ttft_ms": undisturbed, "overload": overload, "recovery": recovery,
    });
    results::write(&origin, figures, &args.output)
}

/// Writes the settings of the cluster, and returns the path of their file.
fn settings() -> Result<std::ffi::OsString, String> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tutti-tiny/checkpoint");
    let text = format!(
        r#"workers = 2
device = "sim"
model = {model:?}
max_running_requests = 16
kv_cache_memory = "64MiB"

[sim]
profile = "instant"
fixed_us = 8000
prefill_ns_per_token = 10000

[router]
max_queued_choices = {MAX_QUEUED_CHOICES}
"#
    );
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("overload.toml");
    std::fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(file.into())
}

/// Measures the capacity in requests per second, with clients that always have a request in progress.
async fn capacity(target: &Target, phase: Duration) -> Result<f64, String> {
    let began = Instant::now();
    let (from, until) = (began + SETTLING, began + phase);
    let mut clients = JoinSet::new();
    for client in 0..CAPACITY_STREAMS {
        let target = target.clone();
        clients.spawn(async move {
            let mut served = 0;
            // Each client has more prompts than it can send in the phase.
            for planned in workload(f64::INFINITY, 10_000, 1000 + client as u64).plan() {
                if Instant::now() >= until {
                    break;
                }
                let record = target.generate(&planned.prompt, OUTPUT_TOKENS, planned.seed).await;
                match record.failure {
                    Some(why) => return Err(why),
                    None => served += usize::from((from..until).contains(&Instant::now())),
                }
            }
            Ok(served)
        });
    }
    let served: Vec<usize> = clients.join_all().await.into_iter().collect::<Result<_, String>>()?;
    Ok(served.iter().sum::<usize>() as f64 / (until - from).as_secs_f64())
}

fn workload(rate: f64, requests: usize, seed: u64) -> Workload {
    Workload {
        requests,
        rate,
        prompt_tokens: PROMPT_TOKENS,
        max_tokens: OUTPUT_TOKENS,
        vocab_size: 256,
        seed,
    }
}

/// Sends requests at random times for the duration of a phase. Returns without waiting for their answers.
async fn arrive(target: &Target, rate: f64, phase: Duration, seed: u64) -> JoinSet<Sent> {
    let start = Instant::now();
    let mut requests = JoinSet::new();
    for planned in workload(rate, (rate * phase.as_secs_f64()) as usize, seed).plan() {
        let due = start + planned.at;
        sleep_until(due).await;
        let target = target.clone();
        requests.spawn(async move {
            let at = Instant::now();
            let record = target.generate(&planned.prompt, OUTPUT_TOKENS, planned.seed).await;
            Sent { at, record: Record { lag: at - due, ..record } }
        });
    }
    requests
}

/// Figures of the overload. Goodput counts the requests that ended within `window`. Refusals and waiting times are
/// those of all requests.
fn overload(sent: &[Sent], capacity: f64, window: std::ops::Range<Instant>, most_queued: u64) -> Overload {
    let (served, refused): (Vec<&Sent>, Vec<&Sent>) = sent.iter().partition(|s| s.record.failure.is_none());
    let within = served.iter().filter(|s| window.contains(&(s.at + s.record.end))).count();
    let goodput_per_s = within as f64 / (window.end - window.start).as_secs_f64();
    let mut reasons = BTreeMap::new();
    for sent in &refused {
        let why = sent.record.failure.clone().unwrap_or_default();
        // The text up to the first colon is the status. The text after it describes the queue, and differs between
        // refusals.
        let status = why.split(':').next().unwrap_or_default().to_owned();
        *reasons.entry(status).or_insert(0) += 1;
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    Overload {
        offered_per_s: OVERLOAD * capacity,
        goodput_per_s,
        goodput_share: goodput_per_s / capacity,
        served: served.len(),
        refused: reasons,
        refusal_ms: Summary::of(refused.iter().map(|s| ms(s.record.end)).collect()),
        ttft_ms: Summary::of(served.iter().filter_map(|s| ttft_ms(&s.record)).collect()),
        lag_ms: Summary::of(sent.iter().map(|s| ms(s.record.lag)).collect()),
        most_queued_choices: most_queued,
        max_queued_choices: MAX_QUEUED_CHOICES,
    }
}

/// Figures of the time after the overload's end. A request is disturbed if it failed, or if its first token took more
/// than `limit_ms`.
fn recovery(sent: &[Sent], ended: Instant, limit_ms: f64) -> Recovery {
    let is_disturbed =
        |s: &&Sent| ttft_ms(&s.record).is_none_or(|ms| ms > limit_ms) || s.record.failure.is_some();
    let disturbed: Vec<f64> =
        sent.iter().filter(is_disturbed).map(|s| (s.at - ended).as_secs_f64()).collect();
    Recovery {
        seconds: disturbed.iter().copied().fold(0.0, f64::max),
        disturbed: disturbed.len(),
        ttft_ms: Summary::of(sent.iter().filter_map(|s| ttft_ms(&s.record)).collect()),
    }
}

fn ttft_ms(record: &Record) -> Option<f64> {
    record.arrivals.first().map(|(at, _)| at.as_secs_f64() * 1e3)
}

/// A task that reads the length of the queue of normal priority.
struct QueueGauge {
    stopped: std::sync::Arc<AtomicBool>,
    task: tokio::task::JoinHandle<Result<u64, String>>,
}

impl QueueGauge {
    fn watch(target: Target) -> Self {
        let stopped = std::sync::Arc::new(AtomicBool::new(false));
        let flag = stopped.clone();
        let task = tokio::spawn(async move {
            let (mut most, mut ticks) = (0, interval(Duration::from_millis(20)));
            while !flag.load(Ordering::Relaxed) {
                ticks.tick().await;
                most = most.max(queued(&target.metrics().await?)?);
            }
            Ok(most)
        });
        Self { stopped, task }
    }

    /// Stops the readings, and returns the largest one.
    async fn most(self) -> Result<u64, String> {
        self.stopped.store(true, Ordering::Relaxed);
        self.task.await.map_err(|e| format!("the readings of the queue failed: {e}"))?
    }
}

fn queued(metrics: &str) -> Result<u64, String> {
    let name = r#"tutti_router_queued_choices{class="normal"} "#;
    let value = metrics.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.trim().parse().ok()).ok_or_else(|| format!("/metrics has no {name}"))
}
