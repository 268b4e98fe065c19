//! Scenarios of the comparison with other servers. The servers of a scenario are measured in turns.

use std::{collections::BTreeMap, mem};

use clap::ValueEnum;
use serde::Serialize;
use tutti_measure::{limits::Limits, statistics::median};

use super::{
    mixed::{self, Mixed},
    peers::{GgufTypes, Peer, Purpose, Running, Weights},
    shape::Shape,
    speed::{self, Decode},
};

/// Number of tokens per stream in a decode measurement. With 16 streams, the first has received a third of its tokens
/// before the last begins to decode.
const DECODED: u32 = 64;
/// Maximum number of prefill steps of a peer in the mixed workload. A chunk of a peer has 512 tokens.
const STEPS_OF_PEERS: u32 = 16;
/// Maximum number of prefill steps of Tutti in the mixed workload. These steps may be many and short.
const STEPS_OF_OURS: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Prompts of 512 and of 4,096 tokens, one at a time, bf16.
    Prefill,
    /// 1, 4 and 16 streams after prompts of 512 tokens, bf16.
    Decode,
    /// Only the 16 streams of `decode`.
    #[value(name = "decode-16")]
    DecodeSixteen,
    /// Four streams that decode while a long prompt arrives, bf16.
    Mixed,
    /// Time from the start of the process to the first token, bf16.
    Start,
    /// Prefill and decode with int8 weights.
    Int8,
    /// Only the prefill of `int8`.
    #[value(name = "prefill-int8")]
    PrefillInt8,
    /// Prefill and decode with weights of four bits: quantised at load, and from GGUF files.
    Int4,
    /// Only the decode of `int4`.
    #[value(name = "decode-int4")]
    DecodeInt4,
}

/// Settings of the comparison.
#[derive(Debug, Serialize)]
pub struct Settings {
    pub shape: Shape,
    pub peers: Vec<Peer>,
    pub threads: usize,
    pub repeats: usize,
    pub target_itl_ms: u32,
}

/// One measurement of a server.
#[derive(Clone, Copy, Debug)]
enum Measurement {
    /// Prefill of a prompt of this many tokens.
    Prefill(u32),
    /// Decode of this many streams.
    Decode(usize),
    Mixed,
    /// Time to the first token of a server that is started for each sample.
    Start,
}

/// Servers that run at the same time, and the measurements that are made of each.
pub struct Group {
    pub name: &'static str,
    weights: Weights,
    measurements: &'static [Measurement],
}

impl Scenario {
    pub fn groups(self) -> Vec<Group> {
        let bf16 = |name, measurements| Group { name, weights: Weights::Bf16, measurements };
        let int8 = |name, measurements| Group { name, weights: Weights::Int8, measurements };
        let int4 = |name, measurements| Group { name, weights: Weights::Int4, measurements };
        let decode_int4 = || {
            int4("decode_int4", &[Measurement::Decode(1), Measurement::Decode(4), Measurement::Decode(16)])
        };
        match self {
            Self::Prefill => {
                vec![bf16("prefill_bf16", &[Measurement::Prefill(512), Measurement::Prefill(4096)])]
            }
            Self::Decode => vec![bf16(
                "decode_bf16",
                &[Measurement::Decode(1), Measurement::Decode(4), Measurement::Decode(16)],
            )],
            Self::DecodeSixteen => vec![bf16("decode_bf16", &[Measurement::Decode(16)])],
            Self::Mixed => vec![bf16("mixed_bf16", &[Measurement::Mixed])],
            Self::Start => vec![bf16("start_bf16", &[Measurement::Start])],
            Self::PrefillInt8 => vec![int8("prefill_int8", &[Measurement::Prefill(512)])],
            Self::Int4 => vec![
                int4("prefill_int4", &[Measurement::Prefill(512), Measurement::Prefill(4096)]),
                decode_int4(),
            ],
            Self::DecodeInt4 => vec![decode_int4()],
            Self::Int8 => vec![
                int8("prefill_int8", &[Measurement::Prefill(512)]),
                int8(
                    "decode_int8",
                    &[Measurement::Decode(1), Measurement::Decode(4), Measurement::Decode(16)],
                ),
            ],
        }
    }
}

/// A server of a group, and its figures so far.
struct Contender {
    name: String,
    peer: Peer,
    purpose: Purpose,
    running: Option<Running>,
    figures: Figures,
    /// The reason why the server could not start or is no longer measured; `None` while it works.
    failure: Option<String>,
}

/// Samples of each figure.
type Figures = BTreeMap<&'static str, Vec<f64>>;

/// Figures of a group.
#[derive(Debug, Serialize)]
pub struct Found {
    /// Limits of the machine, measured before each round.
    pub limits: Vec<Limits>,
    pub contenders: BTreeMap<String, ContenderFigures>,
}

/// Figures of one contender.
#[derive(Debug, Serialize)]
pub struct ContenderFigures {
    pub medians: BTreeMap<&'static str, f64>,
    samples: Figures,
    /// The reason why samples are missing.
    could_not: Option<String>,
}

impl Group {
    pub async fn measure(&self, settings: &Settings) -> Result<Found, String> {
        let mut contenders = self.contenders(settings);
        let resident = !matches!(self.measurements, [Measurement::Start]);
        if resident {
            for contender in &mut contenders {
                contender.start().await;
            }
        } else {
            // Each server is started once before the samples, to fill the page cache and to write the packed weights.
            for contender in &mut contenders {
                if let Err(why) = contender.sample(Measurement::Start, 0).await {
                    contender.failed(why);
                }
            }
        }
        let mut limits = Vec::new();
        for round in 0..settings.repeats {
            // The limits are measured while the servers are idle.
            limits.push(tokio::task::block_in_place(|| Limits::of(settings.threads)));
            for (index, measurement) in self.measurements.iter().enumerate() {
                // Seeds differ, so that no prompt repeats within a process: a prefix cache would skip the prefill of a
                // repeated prompt.
                let seed = (round * self.measurements.len() + index) as u64 * 10 + 1;
                for turn in 0..contenders.len() {
                    let turn = if round % 2 == 0 { turn } else { contenders.len() - 1 - turn };
                    contenders[turn].take(self.name, *measurement, seed).await;
                }
            }
        }
        let mut found = Found { limits, contenders: BTreeMap::new() };
        for mut contender in contenders {
            if let Some(running) = contender.running.take() {
                let peak = running.peak_memory()? as f64;
                contender.figures.insert("peak_memory_bytes", vec![peak]);
                running.stop().await?;
            }
            found.contenders.insert(mem::take(&mut contender.name), contender.into_figures());
        }
        Ok(found)
    }

    fn contenders(&self, settings: &Settings) -> Vec<Contender> {
        let (requests, context) = match self.measurements[0] {
            Measurement::Prefill(_) | Measurement::Start => (1, mixed::CONTEXT),
            Measurement::Decode(_) => (16, 512 + DECODED as usize),
            Measurement::Mixed => (mixed::REQUESTS, mixed::CONTEXT),
        };
        let target_itl_ms =
            matches!(self.measurements, [Measurement::Mixed]).then_some(settings.target_itl_ms);
        let contender = |name: &str, peer, weights| {
            let packed_weights = matches!(self.measurements, [Measurement::Start]);
            let threads = settings.threads;
            let shape = settings.shape;
            let purpose =
                Purpose { shape, weights, threads, requests, context, target_itl_ms, packed_weights };
            let (running, figures, failure) = (None, Figures::new(), None);
            Contender { name: name.to_owned(), peer, purpose, running, figures, failure }
        };
        let mut contenders = vec![contender(Peer::Tutti.name(), Peer::Tutti, self.weights)];
        if self.weights != Weights::Bf16 {
            // For the ratio to bf16, Tutti with bf16 weights runs at the same time.
            contenders.push(contender("tutti-bf16", Peer::Tutti, Weights::Bf16));
        }
        if self.weights == Weights::Int4 {
            contenders.push(contender("tutti-int8", Peer::Tutti, Weights::Int8));
            contenders.push(contender("tutti-q4_0", Peer::Tutti, Weights::Gguf(GgufTypes::Q4)));
            contenders.push(contender("tutti-q4_k_m", Peer::Tutti, Weights::Gguf(GgufTypes::Q4KMedium)));
        }
        for &peer in &settings.peers {
            contenders.push(contender(peer.name(), peer, self.weights));
            if (peer, self.weights) == (Peer::LlamaCpp, Weights::Int4) {
                let of_types = |name, types| contender(name, peer, Weights::Gguf(types));
                contenders.push(of_types("llama-cpp-q4_k_m", GgufTypes::Q4KMedium));
                contenders.push(of_types("llama-cpp-q8_0", GgufTypes::Q8));
            }
        }
        contenders
    }
}

impl Contender {
    async fn start(&mut self) {
        let started = async {
            let running = self.peer.start(&self.purpose).await?;
            // A first request, before the samples, triggers all work that is done once.
            speed::prefill(&running.target, 256, 0).await?;
            Ok(running)
        };
        match started.await {
            Ok(running) => self.running = Some(running),
            Err(why) => self.failed(why),
        }
    }

    /// Takes one sample, unless the contender has failed before.
    async fn take(&mut self, group: &str, measurement: Measurement, seed: u64) {
        if self.failure.is_some() {
            return;
        }
        match self.sample(measurement, seed).await {
            Ok(figures) => {
                for (name, value) in figures {
                    eprintln!("{group}: {} {name} {value:.4}", self.name);
                    self.figures.entry(name).or_default().push(value);
                }
            }
            Err(why) => self.failed(why),
        }
    }

    fn failed(&mut self, why: String) {
        eprintln!("{}: {why}", self.name);
        self.failure = Some(why);
        self.running = None;
    }

    async fn sample(&self, measurement: Measurement, seed: u64) -> Result<Vec<(&'static str, f64)>, String> {
        let Some(running) = &self.running else {
            let running = self.peer.start(&self.purpose).await?;
            let first_token = running.first_token().await?;
            running.stop().await?;
            return Ok(vec![("start_to_first_token_s", first_token)]);
        };
        let target = &running.target;
        match measurement {
            Measurement::Prefill(tokens) => {
                let rate = speed::prefill(target, tokens, seed).await?;
                let name = if tokens == 512 { "prefill_512" } else { "prefill_4096" };
                Ok(vec![(name, rate)])
            }
            Measurement::Decode(batch) => {
                let decode = Decode { batch, prompt_tokens: 512, max_tokens: DECODED };
                let rate = decode.sample(target, seed).await?;
                let name = match batch {
                    1 => "decode_1",
                    4 => "decode_4",
                    _ => "decode_16",
                };
                Ok(vec![(name, rate)])
            }
            Measurement::Mixed | Measurement::Start => {
                let steps = if self.peer == Peer::Tutti { STEPS_OF_OURS } else { STEPS_OF_PEERS };
                let Mixed { ttft_ms, itl_ms_before, itl_ms_during, tokens_per_s_during } =
                    Mixed::measure(target, steps, seed).await?;
                Ok(vec![
                    ("ttft_ms", ttft_ms),
                    ("itl_ms_before_p50", itl_ms_before.p50),
                    ("itl_ms_during_p50", itl_ms_during.p50),
                    ("itl_ms_during_p99", itl_ms_during.p99),
                    ("tokens_per_s_during", tokens_per_s_during),
                ])
            }
        }
    }

    fn into_figures(self) -> ContenderFigures {
        let medians = self.figures.iter().map(|(name, samples)| (*name, median(samples.iter().copied())));
        ContenderFigures { medians: medians.collect(), samples: self.figures, could_not: self.failure }
    }
}
