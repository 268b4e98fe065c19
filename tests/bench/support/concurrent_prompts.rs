//! 12 long prompts, each with an answer, sent a few at a time, as in production, or all at once.

use std::time::Instant;

use serde::Serialize;
use tokio::task::JoinSet;
use tutti_measure::statistics::Summary;

use super::{
    cluster::Cluster,
    comparison::{self, Better, Figure},
    stream::{Ended, Stream, prompts},
};

const REQUESTS: usize = 12;

/// Figures of one run.
#[derive(Debug, Serialize)]
pub struct Run {
    ttft_ms: Summary,
    itl_ms: Summary,
    output_tokens_per_s: f64,
    seconds: f64,
}

impl Run {
    /// Runs the workload on an idle cluster. A new request is sent as soon as one has ended.
    pub async fn measure(
        cluster: &Cluster,
        (prompt, max_tokens): (usize, u32),
        at_a_time: usize,
        seed: u64,
    ) -> Result<Self, String> {
        let began = Instant::now();
        let mut waiting = prompts(REQUESTS, prompt, seed).into_iter();
        let start = |prompt| Stream::start(&cluster.target, prompt, max_tokens).end();
        let mut running = JoinSet::new();
        for prompt in waiting.by_ref().take(at_a_time) {
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

impl comparison::Run for Run {
    fn figures(&self) -> Vec<Figure> {
        let lower = |name, value| Figure { name, value, better: Better::Lower };
        vec![
            lower("ttft_ms_mean", self.ttft_ms.mean),
            lower("ttft_ms_p50", self.ttft_ms.p50),
            lower("ttft_ms_max", self.ttft_ms.max),
            lower("itl_ms_p50", self.itl_ms.p50),
            lower("itl_ms_p99", self.itl_ms.p99),
            lower("itl_ms_max", self.itl_ms.max),
            Figure { name: "output_tokens_per_s", value: self.output_tokens_per_s, better: Better::Higher },
        ]
    }
}
