//! The benchmark on a GPU. Prints the milliseconds of each kind of step, and writes them as JSON.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::json;
use tutti_kernels::{
    Device, Quantize, SamplingParams,
    cuda::{self, CudaDevice, KernelCache},
};
use tutti_models::{LoadFormat, LoadOptions, load};

use super::steps::{PAGE, Steps};
use crate::Failure;

/// Number of context tokens before the token that a decode step computes.
const CONTEXT: usize = 512;
/// Tokens of the longest prefill, which runs in one step.
const LONG: usize = 2048;
/// Requests of the largest batch.
const BATCH: usize = 64;
/// Steps per round of each kind of prefill and of each kind of decode.
const PREFILLS: usize = 10;
const DECODES: usize = 50;

/// Name of the kinds of decodes that draw their tokens.
const DRAWN: &str = "sampled";

/// The parameters with which a kind samples: the likeliest token, or those that Qwen3 recommends.
fn params(drawn: bool) -> SamplingParams {
    let greedy = SamplingParams { seed: 1, ..SamplingParams::GREEDY };
    match drawn {
        false => greedy,
        true => SamplingParams { temperature: 0.6, top_k: 20, top_p: 0.95, ..greedy },
    }
}

/// The options of the bench.
pub struct Bench {
    pub shape: PathBuf,
    /// Kinds of steps to run; empty means all.
    pub only: Vec<String>,
    pub json: Option<PathBuf>,
    pub rounds: usize,
    pub times: Option<usize>,
}

/// One kind of step.
struct Kind {
    name: String,
    batch: usize,
    tokens: usize,
    start: usize,
    times: usize,
    /// Draws tokens with the defaults of Qwen3, instead of taking the likeliest ones.
    drawn: bool,
}

fn kinds(bench: &Bench) -> Vec<Kind> {
    let times = |default| bench.times.unwrap_or(default).max(1);
    let prefill = |tokens: usize| Kind {
        name: format!("prefill-{tokens}"),
        batch: 1,
        tokens,
        start: 0,
        times: times(PREFILLS),
        drawn: false,
    };
    let decode = |name: &str, batch: usize| Kind {
        name: format!("{name}-{batch}"),
        batch,
        tokens: 1,
        start: CONTEXT,
        times: times(DECODES),
        drawn: name == DRAWN,
    };
    let mut kinds: Vec<Kind> = [CONTEXT, LONG].map(prefill).into_iter().collect();
    kinds.extend([1, 2, 4, 8, 16, 32, BATCH].map(|batch| decode("decode", batch)));
    kinds.extend([1, 32].map(|batch| decode(DRAWN, batch)));
    kinds.retain(|kind| bench.only.is_empty() || bench.only.contains(&kind.name));
    kinds
}

/// Runs the bench on the first GPU.
pub fn run(bench: &Bench) -> Result<(), Failure> {
    cuda::gpus()?;
    let began = Instant::now();
    let device = CudaDevice::open(0, &KernelCache::of_user())?;
    let opened = began.elapsed();
    let name = device.describe();
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir: bench.shape.clone(),
        load_format: LoadFormat::Dummy,
        max_step_tokens: LONG,
        page_tokens: PAGE,
        expert_parallel: false,
        nodes: None,
        quantize: Quantize::None,
        seed: 1,
    };
    let mut steps = Steps::new(load(&options, device, &mut |_| {})?, BATCH, CONTEXT, LONG)?;
    let model = steps.describe();
    println!("{model}");
    println!("opened, with its kernels, in {opened:.1?}; loaded and warm in {:.1?}", began.elapsed());
    let mut figures = Vec::new();
    for kind in kinds(bench) {
        steps.sample_with(params(kind.drawn));
        let mut rounds = (0..bench.rounds.max(1))
            .map(|_| round(&mut steps, &kind))
            .collect::<Result<Vec<Duration>, _>>()?;
        rounds.sort();
        let (median, best) = (rounds[rounds.len() / 2].as_secs_f64(), rounds[0].as_secs_f64());
        let rate = (kind.batch * kind.tokens) as f64 / median;
        println!("{:13} {:9.3} ms (best {:.3}) {rate:10.1} tok/s", kind.name, median * 1e3, best * 1e3);
        figures.push(json!({
            "kind": kind.name, "ms": median * 1e3, "best_ms": best * 1e3, "tokens_per_second": rate,
        }));
    }
    if let Some(file) = &bench.json {
        let result = json!({
            "device": name, "model": model, "open_seconds": opened.as_secs_f64(), "rounds": bench.rounds,
            "steps_in_flight": steps.in_flight(), "figures": figures,
        });
        std::fs::write(file, serde_json::to_vec_pretty(&result)?)?;
    }
    Ok(())
}

/// Runs one round, with as many steps in flight as the device holds. Returns the time per step.
fn round(steps: &mut Steps, kind: &Kind) -> Result<Duration, tutti_kernels::DeviceError> {
    let Kind { batch, tokens, start, times, .. } = *kind;
    // The first step of a kind may allocate memory, so it is not timed.
    steps.run(batch, tokens, start, true)?;
    let (began, in_flight) = (Instant::now(), steps.in_flight());
    for step in 0..times {
        if step >= in_flight {
            steps.collect()?;
        }
        steps.enqueue(batch, tokens, start, true)?;
    }
    (0..times.min(in_flight)).try_for_each(|_| steps.collect())?;
    Ok(began.elapsed() / times as u32)
}
