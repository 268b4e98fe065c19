//! Control-plane overhead of short requests that arrive at random times. The device answers each with one token and
//! takes no time.

use std::time::Duration;

use serde::Serialize;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tutti_load::{client::Record, plan::Workload};
use tutti_measure::statistics::Summary;

use super::contender::{Contender, Cpu, cpu_us_per};

pub const STEP: Duration = Duration::ZERO;
pub const RATE: f64 = 1000.0;
/// Goal for the 99th percentile of the latency.
pub const AIM_MS: f64 = 1.0;
const SECONDS: f64 = 8.0;
const WARM_UP: usize = 500;
const PROMPT: &str = "Name three instruments of a string quartet, and say which of them is the largest.";

#[derive(Debug, Serialize)]
pub struct SmallRequests {
    /// Milliseconds from sending to the end of the answer.
    latency_ms: Summary,
    /// Milliseconds between the planned and the actual time of sending.
    lag_ms: Summary,
    requests_per_s: f64,
    cpu_us_per_request: Cpu,
}

impl SmallRequests {
    pub async fn measure(contender: &Contender) -> Result<Self, String> {
        send(contender, WARM_UP, 1).await?;
        let requests = (RATE * SECONDS) as usize;
        let before = contender.cpu()?;
        let began = Instant::now();
        let records = send(contender, requests, 0).await?;
        let seconds = began.elapsed().as_secs_f64();
        let after = contender.cpu()?;
        let ms = |time: fn(&Record) -> Duration| {
            Summary::of(records.iter().map(|record| time(record).as_secs_f64() * 1e3).collect())
        };
        Ok(Self {
            latency_ms: ms(|record| record.end),
            lag_ms: ms(|record| record.lag),
            requests_per_s: requests as f64 / seconds,
            cpu_us_per_request: cpu_us_per(requests as f64, &before, &after),
        })
    }
}

async fn send(contender: &Contender, requests: usize, seed: u64) -> Result<Vec<Record>, String> {
    let workload =
        Workload { requests, rate: RATE, prompt_tokens: (1, 1), max_tokens: 1, vocab_size: 1, seed };
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for planned in workload.plan() {
        let due = start + planned.at;
        sleep_until(due).await;
        let target = contender.target().clone();
        tasks.spawn(async move {
            let body = target.body(PROMPT, 1, planned.seed);
            let lag = due.elapsed();
            Record { lag, ..target.send(body, 1, |_| {}).await }
        });
    }
    let records = tasks.join_all().await;
    match records.iter().find_map(|record| record.failure.clone()) {
        Some(why) => Err(why),
        None => Ok(records),
    }
}
