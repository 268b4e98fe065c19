//! `cargo bench --bench long_prompt`: latency of streams that decode, and of a short prompt, while a long prompt is
//! prefilled, for each variant of chunking. Then 12 long prompts, 4 at a time and all at once. The variant `engine` is
//! a serial prefill: its chunks run back to back, without decodes.
//!
//! The bench starts a conductor for each run. It fails if a stream returns fewer tokens than it asked for, or if the
//! requests of a run do not overlap as they must.

mod support {
    pub mod cluster;
    pub mod comparison;
    pub mod concurrent_prompts;
    pub mod one_long_prompt;
    pub mod shape;
    pub mod stream;
    pub mod variant;
}

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use serde_json::{Value, json};
use tutti_measure::results::{self, Origin};

use support::{
    cluster::Cluster,
    comparison::compare,
    concurrent_prompts, one_long_prompt,
    shape::Shape,
    variant::{Device, Variant},
};

const LONG_PROMPT_VARIANTS: [&str; 5] = ["off", "engine", "engine-target", "scheduler", "scheduler-target"];
const CONCURRENT_VARIANTS: [&str; 7] =
    ["serial", "off", "engine", "scheduler", "scheduler-fair", "scheduler-first-come", "scheduler-target"];
/// Variants for the CPU device, on which a run takes minutes.
const FEW_VARIANTS: [&str; 4] = ["serial", "off", "scheduler", "scheduler-target"];

#[derive(Parser)]
struct Args {
    /// Device of the workers.
    #[arg(long, value_enum, default_value = "sim")]
    device: Device,
    /// Shape of the model.
    #[arg(long, value_enum, default_value = "qwen3-0.6b")]
    shape: Shape,
    /// Runs of each variant [default: on sim 5 with one long prompt and 3 with concurrent ones, on cpu 1]
    #[arg(long)]
    repeats: Option<usize>,
    /// Tokens of the long prompt.
    #[arg(long, default_value_t = 4096)]
    long: usize,
    /// Tokens of the short prompt.
    #[arg(long, default_value_t = 64)]
    short: usize,
    /// Tokens of each of the 12 concurrent prompts, 0 to skip them [default: 4096 on sim, 1024 on cpu].
    #[arg(long)]
    concurrent_prompt: Option<usize>,
    /// Directory for the step traces of each variant's first run with one long prompt.
    #[arg(long)]
    traces: Option<PathBuf>,
    #[command(flatten)]
    output: results::Output,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("long_prompt", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("long_prompt");
    let mut figures =
        json!({ "device": args.device, "shape": args.shape, "seed_workload": one_long_prompt(&args).await? });
    let prompt = args.concurrent_prompt.unwrap_or(if args.device == Device::Sim { 4096 } else { 1024 });
    if prompt > 0 {
        figures["concurrent_prompts_4_of_12"] = concurrent_prompts(&args, prompt, 4).await?;
        if args.device == Device::Sim {
            figures["concurrent_prompts_12_of_12"] = concurrent_prompts(&args, prompt, 12).await?;
        }
    }
    results::write(&origin, figures, &args.output)
}

async fn one_long_prompt(args: &Args) -> Result<Value, String> {
    let Args { device, long, short, .. } = *args;
    let variants = Variant::named(device.variants(long), &LONG_PROMPT_VARIANTS);
    let repeats = args.repeats.unwrap_or(if device == Device::Sim { 5 } else { 1 });
    let run = async |variant: &Variant, repeat: usize| {
        let cluster = start(args, variant, args.traces.as_deref().filter(|_| repeat == 0)).await?;
        let run = one_long_prompt::Run::measure(&cluster, device, (long, short), 100 * repeat as u64).await?;
        cluster.stop()?;
        Ok(run)
    };
    let found = compare(&variants, &["off", "engine"], repeats, run).await?;
    Ok(json!({ "long": long, "short": short, "found": found }))
}

async fn concurrent_prompts(args: &Args, prompt: usize, at_a_time: usize) -> Result<Value, String> {
    let device = args.device;
    let (names, repeats, max_tokens) = match device {
        Device::Sim => (&CONCURRENT_VARIANTS[..], 3, 256),
        Device::Cpu => (&FEW_VARIANTS[..], 1, 64),
    };
    let variants = Variant::named(device.variants(prompt), names);
    let run = async |variant: &Variant, repeat: usize| {
        let cluster = start(args, variant, None).await?;
        let seed = 100 * repeat as u64;
        let run = concurrent_prompts::Run::measure(&cluster, (prompt, max_tokens), at_a_time, seed).await?;
        cluster.stop()?;
        Ok(run)
    };
    let found =
        compare(&variants, &["serial", "off", "engine"], args.repeats.unwrap_or(repeats), run).await?;
    Ok(json!({ "prompt": prompt, "max_tokens": max_tokens, "at_a_time": at_a_time, "found": found }))
}

async fn start(args: &Args, variant: &Variant, traces: Option<&Path>) -> Result<Cluster, String> {
    let mut flags = args.device.flags(args.shape);
    flags.extend(variant.flags.iter().cloned());
    if let Some(traces) = traces {
        std::fs::create_dir_all(traces).map_err(|e| format!("{}: {e}", traces.display()))?;
        flags.push(format!("--trace-steps={}", traces.join(variant.name).display()));
    }
    Cluster::start(&flags).await
}
