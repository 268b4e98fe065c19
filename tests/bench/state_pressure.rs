//! `cargo bench --bench state_pressure`: 64 concurrent requests of a model with recurrent state, while memory for state
//! is short.
//!
//! Three clusters of one worker run one after another. Each gets the same requests, all at once:
//!
//! - `ample`: slots for all requests, and pages for all their tokens.
//! - `slots_short`: slots for few of the requests. The others wait, and nothing is computed twice.
//! - `slots_and_pages_short`: the same few slots, optimistic admission, and pages for a part of the requests that have
//!   slots. Requests are preempted, and their state is computed again.
//!
//! The bench fails if a request fails or ends early, or if the number of preemptions is not as described. The prefix
//! cache is off, because snapshots would take memory, too.

mod support {
    pub mod cluster;
}

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use clap::Parser;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tutti_load::{
    client::{Record, Target},
    plan::Workload,
};
use tutti_measure::{
    results::{self, Origin},
    statistics::{Summary, median},
};

use support::cluster::Cluster;

/// Tokens per page of a worker on a CPU.
const PAGE_TOKENS: u64 = 16;

#[derive(Parser)]
struct Args {
    /// Directory of a Qwen3.5 config. Weights are dummies.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bench/qwen3.5-0.8b"))]
    model: PathBuf,
    #[arg(long, default_value_t = 64)]
    requests: u32,
    /// Number of slots in the variants where slots are short.
    #[arg(long, default_value_t = 8)]
    slots: u32,
    #[arg(long, default_value_t = 64)]
    prompt_tokens: u32,
    #[arg(long, default_value_t = 64)]
    output_tokens: u32,
    /// Number of times that each of the three clusters runs.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    #[command(flatten)]
    output: results::Output,
}

/// The amount of memory of a cluster.
#[derive(Clone, Copy, PartialEq)]
enum Variant {
    Ample,
    SlotsShort,
    SlotsAndPagesShort,
}

impl Variant {
    const ALL: [Self; 3] = [Self::Ample, Self::SlotsShort, Self::SlotsAndPagesShort];

    fn name(self) -> &'static str {
        match self {
            Self::Ample => "ample",
            Self::SlotsShort => "slots_short",
            Self::SlotsAndPagesShort => "slots_and_pages_short",
        }
    }

    fn running(self, args: &Args) -> u32 {
        if self == Self::Ample { args.requests } else { args.slots }
    }

    /// Number of pages for requests, without the null page.
    fn pages(self, args: &Args) -> u64 {
        let of_one = u64::from(args.prompt_tokens + args.output_tokens).div_ceil(PAGE_TOKENS);
        let of_all = of_one * u64::from(self.running(args));
        // The pool must always hold one request.
        if self == Self::SlotsAndPagesShort { (of_all * 6 / 10).max(of_one) } else { of_all }
    }
}

/// Bytes per page and per slot.
#[derive(Debug, Serialize)]
struct Sizes {
    page_bytes: u64,
    slot_bytes: u64,
}

impl Sizes {
    /// Reads the sizes of a Qwen3.5 on the CPU. Keys and values have the type of the weights, and states are f32.
    fn read(model: &Path) -> Result<Self, String> {
        let file = model.join("config.json");
        let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        let config: Value = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))?;
        let config = config.get("text_config").unwrap_or(&config);
        let number = |key: &str| {
            config.get(key).and_then(Value::as_u64).ok_or_else(|| format!("{}: no {key}", file.display()))
        };
        let layers = number("num_hidden_layers")?;
        let full = match config.get("layer_types").and_then(Value::as_array) {
            Some(types) => types.iter().filter(|kind| *kind == "full_attention").count() as u64,
            None => layers / number("full_attention_interval")?,
        };
        let dtype = config.get("dtype").or(config.get("torch_dtype")).and_then(Value::as_str);
        let element = if dtype == Some("bfloat16") { 2 } else { 4 };
        let (keys, values) = (number("linear_num_key_heads")?, number("linear_num_value_heads")?);
        let (key_dim, value_dim) = (number("linear_key_head_dim")?, number("linear_value_head_dim")?);
        let channels = 2 * keys * key_dim + values * value_dim;
        let of_layer = channels * (number("linear_conv_kernel_dim")? - 1) + values * key_dim * value_dim;
        Ok(Self {
            page_bytes: full
                * 2
                * number("num_key_value_heads")?
                * number("head_dim")?
                * PAGE_TOKENS
                * element,
            slot_bytes: (layers - full) * of_layer * 4,
        })
    }

    /// Bytes of the variant's planes, with the null page and the null slot.
    fn memory(&self, variant: Variant, args: &Args) -> u64 {
        self.slot_bytes * u64::from(1 + variant.running(args)) + self.page_bytes * (1 + variant.pages(args))
    }
}

/// Figures of one run of a cluster.
#[derive(Clone, Debug, Serialize)]
struct Ran {
    memory_bytes: u64,
    slots: u64,
    pages: u64,
    preemptions: u64,
    seconds: f64,
    output_tokens_per_s: f64,
    ttft_ms_p50: f64,
    ttft_ms_max: f64,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("state_pressure", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("state_pressure");
    let sizes = Sizes::read(&args.model)?;
    let mut ran: [Vec<Ran>; 3] = Default::default();
    for round in 0..args.rounds.max(1) {
        // Every other round runs in reverse order, so that no variant gains by its position.
        let mut order = [0, 1, 2];
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let figures = run(Variant::ALL[index], &args, &sizes).await?;
            eprintln!("{}: {figures:.1?}", Variant::ALL[index].name());
            ran[index].push(figures);
        }
    }
    let speed = |ran: &[Ran]| median(ran.iter().map(|ran| ran.output_tokens_per_s));
    let ample = speed(&ran[0]);
    let variants: serde_json::Map<String, Value> = Variant::ALL
        .iter()
        .zip(&ran)
        .map(|(variant, ran)| {
            let figures = json!({
                "output_tokens_per_s": speed(ran), "share_of_ample": speed(ran) / ample, "turns": ran,
            });
            (variant.name().to_owned(), figures)
        })
        .collect();
    let figures = json!({
        "requests": args.requests, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens,
        "sizes": sizes, "variants": variants,
    });
    results::write(&origin, figures, &args.output)
}

/// Sends all requests at once to a new cluster, and waits until all have ended.
async fn run(variant: Variant, args: &Args, sizes: &Sizes) -> Result<Ran, String> {
    let memory_bytes = sizes.memory(variant, args);
    let admission = if variant == Variant::SlotsAndPagesShort { "optimistic" } else { "whole-life" };
    let cluster = Cluster::start(&[
        "--model".to_owned(),
        args.model.display().to_string(),
        "--load-format=dummy".to_owned(),
        "--skip-tokenizer-init".to_owned(),
        "--no-prefix-cache".to_owned(),
        format!("--max-running-requests={}", variant.running(args)),
        format!("--kv-cache-memory={memory_bytes}"),
        format!("--admission={admission}"),
    ])
    .await?;
    let before = cluster.target.generate(&[1; 16], 1, 0).await;
    if let Some(why) = before.failure {
        return Err(format!("{}: {why}", variant.name()));
    }
    let (seconds, records) = send_all(&cluster.target, args).await;
    let metrics = cluster.target.metrics().await?;
    cluster.stop()?;
    if let Some(why) = records.iter().find_map(|record| record.failure.as_ref()) {
        return Err(format!("{}: {why}", variant.name()));
    }
    let tokens: u64 = records.iter().map(|record| u64::from(record.tokens)).sum();
    let first = |record: &Record| record.arrivals.first().map(|(at, _)| at.as_secs_f64() * 1e3);
    let ttft = Summary::of(records.iter().filter_map(first).collect());
    let preemptions = metric(&metrics, "tutti_worker_preemptions")?;
    if (preemptions > 0) != (variant == Variant::SlotsAndPagesShort) {
        return Err(format!("{}: {preemptions} preemptions", variant.name()));
    }
    let slots = metric(&metrics, "tutti_slots_total")?;
    if slots != u64::from(variant.running(args)) {
        return Err(format!("{}: {slots} slots in {memory_bytes} bytes, of {sizes:?}", variant.name()));
    }
    Ok(Ran {
        memory_bytes,
        slots,
        pages: metric(&metrics, "tutti_kv_pages_total")?,
        preemptions,
        seconds,
        output_tokens_per_s: tokens as f64 / seconds,
        ttft_ms_p50: ttft.p50,
        ttft_ms_max: ttft.max,
    })
}

/// Seconds from the first request to the last token, and the record of each request.
async fn send_all(target: &Target, args: &Args) -> (f64, Vec<Record>) {
    let workload = Workload {
        requests: args.requests as usize,
        rate: f64::INFINITY,
        prompt_tokens: (args.prompt_tokens, args.prompt_tokens),
        max_tokens: args.output_tokens,
        vocab_size: 256,
        seed: 1,
    };
    let began = Instant::now();
    let mut requests = JoinSet::new();
    for planned in workload.plan() {
        let (target, output_tokens) = (target.clone(), args.output_tokens);
        requests.spawn(async move { target.generate(&planned.prompt, output_tokens, planned.seed).await });
    }
    let records = requests.join_all().await;
    (began.elapsed().as_secs_f64(), records)
}

/// The value of a metric of worker 0.
fn metric(metrics: &str, name: &str) -> Result<u64, String> {
    let prefix = format!("{name}{{worker=\"0\"}} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&prefix));
    value.and_then(|value| value.trim().parse().ok()).ok_or_else(|| format!("/metrics has no {prefix}"))
}
