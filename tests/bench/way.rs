//! What is compared: ways to run long prompts, on a device.
#![allow(dead_code, reason = "each bench uses its own part")]

use clap::ValueEnum;
use serde::Serialize;

/// What the worker computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The cost model of an H200 under 8 billion parameters.
    Sim,
    /// This machine's CPU, dummy bf16 weights at the shape of Qwen3-0.6B.
    Cpu,
}

/// How long prompts are run, in flags of the conductor.
#[derive(Clone, Debug, Serialize)]
pub struct Way {
    pub name: &'static str,
    pub flags: Vec<String>,
}

impl Device {
    /// Flags that all ways share.
    pub fn flags(self) -> Vec<String> {
        let shape = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bench/qwen3-0.6b");
        let own: &[&str] = match self {
            Self::Sim => &["--device=sim"],
            Self::Cpu => &["--device=cpu", "--load-format=dummy", "--kv-cache-memory=1073741824"],
        };
        let shared = ["--skip-tokenizer-init", "--model", shape];
        shared.iter().chain(own).map(|&flag| flag.to_owned()).collect()
    }

    /// The most tokens of a step where prompts are cut: a few times what costs as much as a step does by itself.
    fn step_tokens(self) -> usize {
        match self {
            Self::Sim => 512,
            Self::Cpu => 256,
        }
    }

    /// Three to twenty times what a step of four decodes takes.
    fn target_itl_ms(self) -> u32 {
        match self {
            Self::Sim => 12,
            Self::Cpu => 1000,
        }
    }

    /// All ways to run prompts of up to `long` tokens. Whole prompts get a budget that each fits in, so that none is
    /// held back as too large for a step.
    pub fn ways(self, long: usize) -> Vec<Way> {
        let whole = format!("--max-step-tokens={}", long + 1024);
        let chunk = format!("--max-prefill-chunk-size={}", self.step_tokens());
        let cut = format!("--max-step-tokens={}", self.step_tokens());
        let target = format!("--target-itl-ms={}", self.target_itl_ms());
        let way = |name, flags: &[&str]| Way { name, flags: flags.iter().map(|&f| f.to_owned()).collect() };
        vec![
            way("serial", &["--chunking=off", &whole, "--max-running-requests=1"]),
            way("off", &["--chunking=off", &whole]),
            way("engine", &["--chunking=engine", &whole, &chunk]),
            way("engine-target", &["--chunking=engine", &whole, &chunk, &target]),
            way("scheduler", &["--chunking=scheduler", &cut]),
            way("scheduler-fair", &["--chunking=scheduler", &cut, "--prefill-sharing=fair"]),
            way("scheduler-first-come", &["--chunking=scheduler", &cut, "--prefill-sharing=first-come"]),
            // The target decides, not the budget.
            way("scheduler-target", &["--chunking=scheduler", "--max-step-tokens=2048", &target]),
        ]
    }
}

impl Way {
    /// Of those with these names, in their order.
    pub fn named(ways: Vec<Self>, names: &[&str]) -> Vec<Self> {
        ways.into_iter().filter(|way| names.contains(&way.name)).collect()
    }
}
