//! Figures of the `first_run` bench.

use serde::Serialize;
use tutti_load::{plan::Workload, run::run};
use tutti_measure::statistics::median;

use super::{
    cluster::{Cluster, cpu_seconds, peak_memory},
    speed,
};

/// Bytes of the worker's KV pool. The worker's peak memory is compared with the sum of weights and pool.
pub const KV_POOL_BYTES: u64 = 1 << 30;
/// Maximum ratio of a worker's peak memory to the size of weights and KV pool.
const MEMORY_LIMIT: f64 = 1.25;
const REPEATS: usize = 3;

#[derive(Serialize)]
pub struct Prefill {
    prompt_tokens: u32,
    samples: usize,
    /// Prompt tokens per second up to the first token at the client: median of the samples. Each sample is one prompt
    /// on an idle server.
    tokens_per_s: f64,
}

pub async fn prefill(cluster: &Cluster) -> Result<Prefill, String> {
    let prompt_tokens = 512;
    let mut rates = Vec::new();
    for seed in 0..REPEATS as u64 {
        rates.push(speed::prefill(&cluster.target, prompt_tokens, seed).await?);
    }
    Ok(Prefill { prompt_tokens, samples: rates.len(), tokens_per_s: median(rates) })
}

#[derive(Serialize)]
pub struct Decode {
    batch: usize,
    prompt_tokens: u32,
    samples: usize,
    /// Tokens per second of all streams while all of them decode: median of the samples.
    tokens_per_s: f64,
}

pub async fn decode(cluster: &Cluster, batch: usize) -> Result<Decode, String> {
    let decode = speed::Decode { batch, prompt_tokens: 128, max_tokens: 64 };
    let mut rates = Vec::new();
    for seed in 0..REPEATS as u64 {
        rates.push(decode.sample(&cluster.target, seed).await?);
    }
    Ok(Decode {
        batch,
        prompt_tokens: decode.prompt_tokens,
        samples: rates.len(),
        tokens_per_s: median(rates),
    })
}

#[derive(Serialize)]
pub struct Memory {
    weight_bytes: u64,
    kv_pool_bytes: u64,
    worker_peak_bytes: u64,
    conductor_peak_bytes: u64,
    /// Peak memory of the worker divided by the size of weights and KV pool.
    ratio: f64,
    limit: f64,
}

pub fn memory(cluster: &Cluster) -> Result<Memory, String> {
    let (weight_bytes, kv_pool_bytes) = (qwen3_0_6b_bytes(), KV_POOL_BYTES);
    let worker_peak_bytes = peak_memory(cluster.worker()?)?;
    let conductor_peak_bytes = peak_memory(cluster.conductor())?;
    let ratio = worker_peak_bytes as f64 / (weight_bytes + kv_pool_bytes) as f64;
    Ok(Memory {
        weight_bytes,
        kv_pool_bytes,
        worker_peak_bytes,
        conductor_peak_bytes,
        ratio,
        limit: MEMORY_LIMIT,
    })
}

/// Bytes of the weights of `tests/bench/qwen3-0.6b/config.json` in bf16. The LM head shares the embedding.
fn qwen3_0_6b_bytes() -> u64 {
    let (vocabulary, hidden, mlp, layers, q, kv, head) = (151_936, 1024, 3072, 28, 2048, 1024, 128);
    let attention = hidden * q * 2 + hidden * kv * 2 + 2 * head;
    let layer = attention + 3 * hidden * mlp + 2 * hidden;
    2 * (vocabulary * hidden + layers * layer + hidden)
}

#[derive(Serialize)]
pub struct ControlPlane {
    streams: usize,
    tokens: u64,
    tokens_per_s: f64,
    /// CPU microseconds per token of the conductor with its embedded router: placement, detokenising, SSE.
    conductor_us_per_token: f64,
    /// CPU microseconds per token of the worker: scheduler and engine.
    worker_us_per_token: f64,
}

pub async fn control_plane(cluster: &Cluster) -> Result<ControlPlane, String> {
    let (streams, max_tokens) = (64, 256);
    let (conductor, worker) = (cluster.conductor(), cluster.worker()?);
    let before = (cpu_seconds(conductor)?, cpu_seconds(worker)?);
    let (mut tokens, mut seconds) = (0, 0.0);
    for seed in 0..REPEATS as u64 {
        let (rate, prompt_tokens) = (f64::INFINITY, (16, 16));
        let workload = Workload { requests: streams, rate, prompt_tokens, max_tokens, vocab_size: 256, seed };
        let (records, duration) = run(&cluster.target, &workload).await;
        if let Some(why) = records.iter().find_map(|record| record.failure.clone()) {
            return Err(why);
        }
        tokens += records.iter().map(|record| u64::from(record.tokens)).sum::<u64>();
        seconds += duration.as_secs_f64();
    }
    let spent = |after: f64, before: f64| (after - before) / tokens as f64 * 1e6;
    Ok(ControlPlane {
        streams,
        tokens,
        tokens_per_s: tokens as f64 / seconds,
        conductor_us_per_token: spent(cpu_seconds(conductor)?, before.0),
        worker_us_per_token: spent(cpu_seconds(worker)?, before.1),
    })
}
