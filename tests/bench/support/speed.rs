//! Samples of prefill and decode speed.

use std::time::Duration;

use tutti_load::{
    client::{Record, Target},
    plan::Workload,
    run::run,
};

/// Exclusive upper bound of the random token ids in prompts. The vocabulary of every model in the benches is at least
/// as large.
const VOCABULARY: u32 = 150_000;

/// A number of requests that decode at the same time.
#[derive(Clone, Copy, Debug)]
pub struct Decode {
    pub batch: usize,
    pub prompt_tokens: u32,
    pub max_tokens: u32,
}

impl Decode {
    /// Tokens per second of all streams while all of them decode.
    pub async fn sample(&self, target: &Target, seed: u64) -> Result<f64, String> {
        let records = served(target, self.batch, self.prompt_tokens, self.max_tokens, seed).await?;
        shared_rate(&records)
    }
}

/// Prompt tokens per second of a single request, from sending to its first token at the client.
pub async fn prefill(target: &Target, prompt_tokens: u32, seed: u64) -> Result<f64, String> {
    let records = served(target, 1, prompt_tokens, 1, seed).await?;
    let (first, _) = records[0].arrivals.first().ok_or("no token came")?;
    Ok(f64::from(prompt_tokens) / first.as_secs_f64())
}

async fn served(
    target: &Target,
    requests: usize,
    prompt: u32,
    max_tokens: u32,
    seed: u64,
) -> Result<Vec<Record>, String> {
    let (rate, prompt_tokens) = (f64::INFINITY, (prompt, prompt));
    let workload = Workload { requests, rate, prompt_tokens, max_tokens, vocab_size: VOCABULARY, seed };
    let (records, _) = run(target, &workload).await;
    match records.iter().find_map(|record| record.failure.clone()) {
        Some(why) => Err(why),
        None => Ok(records),
    }
}

/// Tokens per second from the last stream's first token to the first stream's last token. All streams were sent at the
/// same time, so their times are comparable.
fn shared_rate(records: &[Record]) -> Result<f64, String> {
    let firsts = records.iter().filter_map(|r| r.arrivals.first());
    let lasts = records.iter().filter_map(|r| r.arrivals.last());
    let from: Duration = firsts.map(|(at, _)| *at).max().unwrap_or_default();
    let to: Duration = lasts.map(|(at, _)| *at).min().unwrap_or_default();
    if to <= from {
        return Err("the streams did not decode at the same time".into());
    }
    let inside = records.iter().flat_map(|r| &r.arrivals).filter(|(at, _)| from < *at && *at <= to);
    Ok(inside.map(|(_, tokens)| f64::from(*tokens)).sum::<f64>() / (to - from).as_secs_f64())
}
