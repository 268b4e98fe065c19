//! Control-plane overhead of prompts of 220 KB, with 100 concurrent streams.
//!
//! Each stream sends one request after another. The first requests of the streams are spread evenly over the duration
//! of one request. No two prompts are alike, and the prefill of each takes one step of its simulated device. If a step
//! is running when a prompt arrives, the rest of that step counts as overhead.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tutti_load::client::Record;
use tutti_measure::statistics::Summary;

use super::contender::{Contender, Cpu, cpu_us_per};

pub const STEP: Duration = Duration::from_millis(20);
pub const STREAMS: u32 = 100;
pub const BYTES: usize = 220_000;
/// Goal for the 99th percentile of the overhead.
pub const AIM_MS: f64 = 100.0;
/// Number of requests per stream. The first one does not count, because it opens the connection.
const ROUNDS: u64 = 3;

/// Form of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    TokenIds,
    Text,
}

#[derive(Debug, Serialize)]
pub struct LargeBodies {
    requests_per_s: f64,
    /// Time to the first token minus one step.
    ttft_overhead_ms: Summary,
    cpu_us_per_request: Cpu,
}

impl LargeBodies {
    pub async fn measure(contender: &Contender, form: Form) -> Result<Self, String> {
        let tokens = form.tokens();
        let life = STEP * tokens;
        let before = contender.cpu()?;
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for stream in 0..STREAMS {
            let target = contender.target().clone();
            tasks.spawn(async move {
                let mut records = Vec::new();
                for round in 0..ROUNDS {
                    let prompt = form.prompt(u64::from(stream) * ROUNDS + round);
                    let body = target.body(prompt, tokens, 0);
                    if round == 0 {
                        sleep_until(start + life * stream / STREAMS).await;
                    }
                    records.push(target.send(body, tokens, |_| {}).await);
                }
                records
            });
        }
        let records: Vec<Vec<Record>> = tasks.join_all().await;
        let seconds = start.elapsed().as_secs_f64();
        let after = contender.cpu()?;
        if let Some(why) = records.iter().flatten().find_map(|record| record.failure.clone()) {
            return Err(why);
        }
        let first = |record: &Record| record.arrivals.first().map(|(at, _)| *at);
        let counted = records.iter().flat_map(|stream| &stream[1..]).filter_map(first);
        let overheads = counted.map(|ttft| (ttft.as_secs_f64() - STEP.as_secs_f64()) * 1e3);
        let requests = f64::from(STREAMS) * ROUNDS as f64;
        Ok(Self {
            requests_per_s: requests / seconds,
            ttft_overhead_ms: Summary::of(overheads.collect()),
            cpu_us_per_request: cpu_us_per(requests, &before, &after),
        })
    }
}

impl Form {
    pub fn name(self) -> &'static str {
        match self {
            Self::TokenIds => "token_ids",
            Self::Text => "text",
        }
    }

    /// Number of tokens to generate per request. It determines the duration of a request, and thus the rate of new
    /// prompts. Two cores can serve this rate.
    fn tokens(self) -> u32 {
        match self {
            Self::TokenIds => 200,
            Self::Text => 400,
        }
    }

    /// Returns prompt `number`, about [`BYTES`] bytes long in JSON.
    fn prompt(self, number: u64) -> Value {
        let mut state = number;
        let mut draw = move || {
            // The high bits of Knuth's linear congruential generator.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        match self {
            // Each id takes four bytes, including the comma.
            Self::TokenIds => json!((0..BYTES / 4).map(|_| 100 + draw() % 900).collect::<Vec<_>>()),
            Self::Text => {
                let mut text = String::with_capacity(BYTES);
                while text.len() < BYTES {
                    text.push_str(WORDS[draw() % WORDS.len()]);
                    text.push(' ');
                }
                json!(text)
            }
        }
    }
}

const WORDS: [&str; 32] = [
    "the",
    "of",
    "and",
    "to",
    "violin",
    "a",
    "orchestra",
    "in",
    "is",
    "that",
    "conductor",
    "score",
    "for",
    "it",
    "with",
    "movement",
    "as",
    "was",
    "strings",
    "on",
    "be",
    "quartet",
    "by",
    "at",
    "rehearsal",
    "this",
    "composer",
    "from",
    "harmony,",
    "tempo.",
    "woodwinds",
    "percussion",
];
