//! Variants of chunking that the benches compare, and the devices that they run on.
#![allow(dead_code, reason = "each bench uses some of it")]

use clap::ValueEnum;
use serde::Serialize;

use super::shape::Shape;

/// Device of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The cost model of an H200 with a model of 8 billion parameters.
    Sim,
    /// This machine's CPU, with dummy bf16 weights.
    Cpu,
}

/// A variant: its name and the flags of its conductor.
#[derive(Clone, Debug, Serialize)]
pub struct Variant {
    pub name: &'static str,
    pub flags: Vec<String>,
}

impl Device {
    /// Flags that all variants share, for a model of this shape.
    pub fn flags(self, shape: Shape) -> Vec<String> {
        let model = shape.dir().display().to_string();
        let own: &[&str] = match self {
            Self::Sim => &["--device=sim"],
            Self::Cpu => &["--device=cpu", "--load-format=dummy", "--kv-cache-memory=1073741824"],
        };
        let shared = ["--skip-tokenizer-init", "--model", &model];
        shared.iter().chain(own).map(|&flag| flag.to_owned()).collect()
    }

    /// Maximum number of tokens per step if prompts are chunked. A step of this many tokens takes a few times as long
    /// as an empty step.
    fn step_tokens(self) -> usize {
        match self {
            Self::Sim => 512,
            Self::Cpu => 256,
        }
    }

    /// ITL target: three to twenty times the duration of a step with four decodes.
    fn target_itl_ms(self) -> u32 {
        match self {
            Self::Sim => 12,
            Self::Cpu => 1000,
        }
    }

    /// Returns all variants, for prompts of up to `long` tokens. Without chunking, the budget of a step is larger than
    /// any prompt, so that each prompt is computed in one step.
    pub fn variants(self, long: usize) -> Vec<Variant> {
        let whole = format!("--max-step-tokens={}", long + 1024);
        let chunk = format!("--max-prefill-chunk-size={}", self.step_tokens());
        let cut = format!("--max-step-tokens={}", self.step_tokens());
        let target = format!("--target-itl-ms={}", self.target_itl_ms());
        let variant =
            |name, flags: &[&str]| Variant { name, flags: flags.iter().map(|&f| f.to_owned()).collect() };
        vec![
            variant("serial", &["--chunking=off", &whole, "--max-running-requests=1"]),
            variant("off", &["--chunking=off", &whole]),
            variant("engine", &["--chunking=engine", &whole, &chunk]),
            variant("engine-target", &["--chunking=engine", &whole, &chunk, &target]),
            variant("scheduler", &["--chunking=scheduler", &cut]),
            variant("scheduler-fair", &["--chunking=scheduler", &cut, "--prefill-sharing=fair"]),
            variant("scheduler-first-come", &["--chunking=scheduler", &cut, "--prefill-sharing=first-come"]),
            // In this variant, the ITL target limits the size of steps, because the budget is too large to do so.
            variant("scheduler-target", &["--chunking=scheduler", "--max-step-tokens=2048", &target]),
        ]
    }
}

impl Variant {
    /// Selects the variants with these names, in the order of `variants`.
    pub fn named(variants: Vec<Self>, names: &[&str]) -> Vec<Self> {
        variants.into_iter().filter(|variant| names.contains(&variant.name)).collect()
    }
}
