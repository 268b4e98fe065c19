//! Four requests decode while a long prompt arrives. A short prompt follows the long one at once.

use std::time::Instant;

use serde::Serialize;
use tutti_measure::statistics::Summary;

use super::{
    cluster::Cluster,
    comparison::{self, Better, Figure},
    stream::{Ended, Stream, prompts},
    variant::Device,
};

const DECODING: usize = 4;
const DECODING_PROMPT: usize = 64;
/// Number of tokens that each of the four decoding requests has when the long prompt is sent.
const BEFORE: usize = 20;
/// Number of tokens that the long and the short prompt each ask for.
const NEW_TOKENS: u32 = 8;

/// Figures of one run.
#[derive(Debug, Serialize)]
pub struct Run {
    /// Milliseconds from sending the long prompt to its first token.
    ttft_ms_of_long: f64,
    /// Milliseconds from sending the short prompt to its first token. The short prompt is sent when the server has
    /// accepted the long one.
    ttft_ms_of_short: f64,
    /// Milliseconds between tokens of the four decoding requests, until the long prompt is sent.
    itl_ms_before: Summary,
    /// Milliseconds between tokens of the four decoding requests, from sending the long prompt to its first token.
    itl_ms_during: Summary,
    /// Tokens per second of all requests, from sending the long prompt to the last token of the run.
    output_tokens_per_s: f64,
}

impl Run {
    /// Runs the workload on an idle cluster.
    pub async fn measure(
        cluster: &Cluster,
        device: Device,
        (long, short): (usize, usize),
        seed: u64,
    ) -> Result<Self, String> {
        // Enough tokens for the four decoding requests to outlast the long prompt's prefill in every variant.
        let max_tokens = BEFORE as u32 + if device == Device::Sim { 80 } else { 130 };
        let target = &cluster.target;
        let short = prompts(1, short, seed + 2).remove(0);
        let long = prompts(1, long, seed + 1).remove(0);
        let four = prompts(DECODING, DECODING_PROMPT, seed);
        let mut four: Vec<Stream> =
            four.into_iter().map(|prompt| Stream::start(target, prompt, max_tokens)).collect();
        for stream in &mut four {
            stream.tokens(BEFORE).await?;
        }
        let mut long = Stream::start(target, long, NEW_TOKENS);
        long.accepted().await?;
        let short = Stream::start(target, short, NEW_TOKENS);
        let mut ended = Vec::new();
        for stream in four {
            ended.push(stream.end().await?);
        }
        let (long, short) = (long.end().await?, short.end().await?);
        check_overlap(&ended, &short, long.first_token())?;
        Ok(Self::of(&ended, &long, &short))
    }

    fn of(four: &[Ended], long: &Ended, short: &Ended) -> Self {
        let (sent, first) = (long.began, long.first_token());
        let began = four.iter().map(Ended::first_token).max().unwrap_or(sent);
        let all = || four.iter().chain([long, short]);
        let last = all().map(Ended::last_token).max().unwrap_or(sent);
        let tokens: u32 = all().map(|stream| stream.tokens_after(sent)).sum();
        let gaps = |from, until| Summary::of(four.iter().flat_map(|s| s.gaps_ms(from, until)).collect());
        Self {
            ttft_ms_of_long: long.ttft_ms(),
            ttft_ms_of_short: short.ttft_ms(),
            itl_ms_before: gaps(began, sent),
            itl_ms_during: gaps(sent, first),
            output_tokens_per_s: f64::from(tokens) / (last - sent).as_secs_f64(),
        }
    }
}

/// Fails unless the four requests still decode at `first`, the arrival of the long prompt's first token, and the short
/// prompt was sent before `first`.
fn check_overlap(four: &[Ended], short: &Ended, first: Instant) -> Result<(), String> {
    if four.iter().any(|stream| stream.last_token() <= first) {
        return Err("a request stopped decoding before the long prompt had its first token".into());
    }
    if short.began >= first {
        return Err("the short prompt was sent after the long one had its first token".into());
    }
    Ok(())
}

impl comparison::Run for Run {
    fn figures(&self) -> Vec<Figure> {
        let lower = |name, value| Figure { name, value, better: Better::Lower };
        vec![
            lower("ttft_ms_of_long", self.ttft_ms_of_long),
            lower("ttft_ms_of_short", self.ttft_ms_of_short),
            lower("itl_ms_before_p50", self.itl_ms_before.p50),
            lower("itl_ms_during_p50", self.itl_ms_during.p50),
            lower("itl_ms_during_p99", self.itl_ms_during.p99),
            lower("itl_ms_during_max", self.itl_ms_during.max),
            Figure { name: "output_tokens_per_s", value: self.output_tokens_per_s, better: Better::Higher },
        ]
    }
}
