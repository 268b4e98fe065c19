//! `cargo bench --bench tensor_parallel`: cost of tensor parallelism. Two ranks of one thread each are compared with
//! one worker of two threads on the same two cores.
//!
//! Both clusters run during the whole bench; the idle one sleeps. They take turns sample by sample, so that a machine
//! whose speed changes within minutes favours neither. The ratio of a figure is the median of the ratios of adjacent
//! samples.

mod support {
    pub mod cluster;
    pub mod shape;
    pub mod speed;
    pub mod variant;
}

use std::process::ExitCode;

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tutti_measure::{
    results::{self, Origin},
    statistics::median,
};

use support::{
    cluster::Cluster,
    shape::Shape,
    speed::{self, Decode},
    variant::Device,
};

/// Minimum speed of two ranks, relative to one worker.
const GOAL: f64 = 0.85;
const PREFILL: u32 = 512;
const DECODES: [Decode; 2] = [
    Decode { batch: 1, prompt_tokens: 64, max_tokens: 49 },
    Decode { batch: 16, prompt_tokens: 16, max_tokens: 33 },
];

#[derive(Parser)]
struct Args {
    /// Samples of each figure.
    #[arg(long, default_value_t = 7)]
    samples: usize,
    #[command(flatten)]
    output: results::Output,
}

#[derive(Serialize)]
struct Figure {
    what: String,
    /// Speeds in tokens per second.
    one_worker: Rates,
    two_ranks: Rates,
    /// Speed of two ranks divided by that of one worker.
    ratio: f64,
    goal: f64,
}

#[derive(Serialize)]
struct Rates {
    median: f64,
    samples: Vec<f64>,
}

/// A cluster that serves the model, and its flags.
struct Contender {
    flags: [&'static str; 3],
    cluster: Cluster,
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("tensor_parallel", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("tensor_parallel");
    let one = Contender::start(["--workers=1", "--tp=1", "--threads=2"]).await?;
    let two = Contender::start(["--workers=2", "--tp=2", "--threads=1"]).await?;
    let mut figures = Vec::new();
    let prefill = Sample::Prefill;
    for sample in [prefill].into_iter().chain(DECODES.map(Sample::Decode)) {
        // The first sample warms caches and touches pages, and does not count.
        sample.of(&one, 1000).await?;
        sample.of(&two, 1000).await?;
        let (mut of_one, mut of_two) = (Vec::new(), Vec::new());
        for turn in 0..args.samples as u64 {
            if turn % 2 == 0 {
                of_one.push(sample.of(&one, turn).await?);
                of_two.push(sample.of(&two, turn).await?);
            } else {
                of_two.push(sample.of(&two, turn).await?);
                of_one.push(sample.of(&one, turn).await?);
            }
        }
        let ratio = median(of_two.iter().zip(&of_one).map(|(two, one)| two / one));
        let what = sample.name();
        eprintln!("{what}: {ratio:.3}, {of_two:.1?} over {of_one:.1?}");
        let (one_worker, two_ranks) = (Rates::of(of_one), Rates::of(of_two));
        figures.push(Figure { what, one_worker, two_ranks, ratio, goal: GOAL });
    }
    let flags =
        json!({ "one_worker": one.flags, "two_ranks": two.flags, "shared": Device::Cpu.flags(Shape::Qwen3) });
    one.cluster.stop()?;
    two.cluster.stop()?;
    results::write(&origin, json!({ "flags": flags, "figures": figures }), &args.output)
}

#[derive(Clone, Copy)]
enum Sample {
    Prefill,
    Decode(Decode),
}

impl Sample {
    fn name(self) -> String {
        match self {
            Self::Prefill => format!("prefill of {PREFILL} tokens"),
            Self::Decode(decode) => format!("decode at batch {}", decode.batch),
        }
    }

    async fn of(self, contender: &Contender, seed: u64) -> Result<f64, String> {
        let target = &contender.cluster.target;
        match self {
            Self::Prefill => speed::prefill(target, PREFILL, seed).await,
            Self::Decode(decode) => decode.sample(target, seed).await,
        }
    }
}

impl Contender {
    async fn start(flags: [&'static str; 3]) -> Result<Self, String> {
        let mut all = Device::Cpu.flags(Shape::Qwen3);
        all.extend(flags.map(str::to_owned));
        Ok(Self { flags, cluster: Cluster::start(&all).await? })
    }
}

impl Rates {
    fn of(samples: Vec<f64>) -> Self {
        Self { median: median(samples.iter().copied()), samples }
    }
}
