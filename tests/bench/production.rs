//! The production form: twelve long prompts, four at a time, each with an answer.

use std::time::Instant;

use serde::Serialize;
use tokio::task::JoinSet;
use tutti_load::report::Summary;

use crate::{
    cluster::Cluster,
    results::median,
    stream::{Ended, Stream, prompts},
};

const REQUESTS: usize = 12;
const CONCURRENCY: usize = 4;

/// One run of it.
#[derive(Debug, Serialize)]
pub struct Run {
    ttft_ms: Summary,
    itl_ms: Summary,
    output_tokens_per_s: f64,
    seconds: f64,
}

/// The middle of each figure over the runs.
#[derive(Debug, Serialize)]
pub struct Medians {
    samples: usize,
    pub ttft_ms_mean: f64,
    ttft_ms_p50: f64,
    ttft_ms_max: f64,
    pub itl_ms_p50: f64,
    itl_ms_p99: f64,
    itl_ms_max: f64,
    pub output_tokens_per_s: f64,
}

impl Run {
    /// Runs it on a cluster that serves nothing else. A new request is sent as soon as one has ended.
    pub async fn measure(
        cluster: &Cluster,
        prompt: usize,
        max_tokens: u32,
        seed: u64,
    ) -> Result<Self, String> {
        let began = Instant::now();
        let mut waiting = prompts(REQUESTS, prompt, seed).into_iter();
        let start = |prompt| Stream::start(&cluster.target, prompt, max_tokens).end();
        let mut running = JoinSet::new();
        for prompt in waiting.by_ref().take(CONCURRENCY) {
            running.spawn(start(prompt));
        }
        let mut ended: Vec<Ended> = Vec::new();
        while let Some(stream) = running.join_next().await {
            ended.push(stream.map_err(|e| format!("a client failed: {e}"))??);
            if let Some(prompt) = waiting.next() {
                running.spawn(start(prompt));
            }
        }
        let now = Instant::now();
        let seconds = (now - began).as_secs_f64();
        Ok(Self {
            ttft_ms: Summary::of(ended.iter().map(Ended::ttft_ms).collect()),
            itl_ms: Summary::of(ended.iter().flat_map(|stream| stream.gaps_ms(began, now)).collect()),
            output_tokens_per_s: f64::from(max_tokens) * REQUESTS as f64 / seconds,
            seconds,
        })
    }
}

impl Medians {
    pub fn of(runs: &[Run]) -> Self {
        let of = |figure: fn(&Run) -> f64| median(runs.iter().map(figure));
        Self {
            samples: runs.len(),
            ttft_ms_mean: of(|run| run.ttft_ms.mean),
            ttft_ms_p50: of(|run| run.ttft_ms.p50),
            ttft_ms_max: of(|run| run.ttft_ms.max),
            itl_ms_p50: of(|run| run.itl_ms.p50),
            itl_ms_p99: of(|run| run.itl_ms.p99),
            itl_ms_max: of(|run| run.itl_ms.max),
            output_tokens_per_s: of(|run| run.output_tokens_per_s),
        }
    }
}
