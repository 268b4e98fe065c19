//! Throughput of the control plane, and how evenly the tokens of each stream arrive.
//!
//! Every stream gets one token per step of its simulated device, so the number of streams sets the load. The overhead
//! of an event is the time since the stream's previous event, minus the duration of one step. If an event brings two
//! tokens, its overhead is thus about one step.

use std::time::Duration;

use serde::Serialize;
use tokio::task::JoinSet;
use tutti_load::client::Record;
use tutti_measure::statistics::Summary;

use super::contender::{Contender, Cpu, cpu_us_per};

pub const STEP: Duration = Duration::from_millis(20);
/// Bound on the 99th percentile of the overhead.
pub const LIMIT_MS: f64 = 5.0;
const TOKENS: u32 = 150;
const PROMPT: &str = "Tell me how an orchestra tunes before it plays.";
/// Time for which all streams must have run before events are counted.
const SETTLING: Duration = Duration::from_millis(300);

/// Figures for one number of concurrent streams.
#[derive(Debug, Serialize)]
pub struct Level {
    pub streams: usize,
    /// Tokens per second while all streams run.
    pub tokens_per_s: f64,
    pub itl_overhead_ms: Summary,
    /// CPU microseconds per token by group of processes, over the whole run.
    pub cpu_us_per_token: Cpu,
}

impl Level {
    pub fn holds(&self) -> bool {
        self.itl_overhead_ms.p99 <= LIMIT_MS
    }

    pub async fn measure(contender: &Contender, streams: usize) -> Result<Self, String> {
        let before = contender.cpu()?;
        let mut tasks = JoinSet::new();
        let began = std::time::Instant::now();
        for _ in 0..streams {
            let target = contender.target().clone();
            tasks.spawn(async move {
                let lag = began.elapsed();
                let body = target.body(PROMPT, TOKENS, 0);
                Record { lag, ..target.send(body, TOKENS, |_| {}).await }
            });
        }
        let records = tasks.join_all().await;
        let after = contender.cpu()?;
        if let Some(why) = records.iter().find_map(|record| record.failure.clone()) {
            return Err(why);
        }
        let (tokens_per_s, overheads) = while_all_run(&records)?;
        let tokens = streams as f64 * f64::from(TOKENS);
        Ok(Self {
            streams,
            tokens_per_s,
            itl_overhead_ms: Summary::of(overheads),
            cpu_us_per_token: cpu_us_per(tokens, &before, &after),
        })
    }
}

/// Tokens per second, and the overhead of each event in milliseconds, while all streams run.
fn while_all_run(records: &[Record]) -> Result<(f64, Vec<f64>), String> {
    let at = |record: &Record, arrival: Option<&(Duration, u32)>| arrival.map(|(at, _)| record.lag + *at);
    let from = records.iter().filter_map(|record| at(record, record.arrivals.first())).max();
    let from = from.unwrap_or_default() + SETTLING;
    let until =
        records.iter().filter_map(|record| at(record, record.arrivals.last())).min().unwrap_or_default();
    if until <= from {
        return Err("the streams did not run at the same time".into());
    }
    let (mut tokens, mut overheads) = (0, Vec::new());
    for record in records {
        for pair in record.arrivals.windows(2) {
            let ((before, _), (now, number)) = (pair[0], pair[1]);
            if (from..until).contains(&(record.lag + now)) {
                tokens += number;
                overheads.push(((now - before).as_secs_f64() - STEP.as_secs_f64()) * 1e3);
            }
        }
    }
    Ok((f64::from(tokens) / (until - from).as_secs_f64(), overheads))
}
