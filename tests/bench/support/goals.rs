//! Goals for the comparison with other servers, and the ratios that were reached.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{peers::KV_POOL_BYTES, scenario::Found, shape::Shape};

/// Bytes of all weights of Qwen3-0.6B in bf16. Decoding one token reads all of them.
const WEIGHT_BYTES: f64 = 1_192_099_840.0;
/// Seconds from start to first token that meet the goal even if a peer is faster.
const START_S: f64 = 1.2;

/// One goal. Fields are `None` if a figure was not measured.
#[derive(Debug, Serialize)]
pub struct Goal {
    what: String,
    ours: Option<f64>,
    /// The figure that `ours` is compared with: a peer's, Tutti's own with other weights, or a limit.
    against: Option<Against>,
    /// The factor by which `ours` is better than `against`.
    ratio: Option<f64>,
    at_least: f64,
    met: Option<bool>,
}

#[derive(Debug, Serialize)]
pub struct Against {
    name: String,
    value: f64,
}

/// The direction in which a figure gets better.
#[derive(Clone, Copy, PartialEq)]
enum Better {
    Lower,
    Higher,
}

/// Figures of each group, by name of the group.
type Groups = BTreeMap<&'static str, Found>;

/// Minimum ratios to the best peer. They depend on the CPU, because peers are not equally good on all CPUs.
struct OverPeers {
    prefill_512: f64,
    prefill_4096: f64,
    prefill_int8: f64,
    /// Ratios with 1, 4 and 16 streams.
    decode: [f64; 3],
}

impl OverPeers {
    const AVX2: Self =
        Self { prefill_512: 1.1, prefill_4096: 1.2, prefill_int8: 1.2, decode: [1.2, 1.4, 2.0] };
    const VNNI: Self =
        Self { prefill_512: 1.6, prefill_4096: 1.4, prefill_int8: 1.5, decode: [1.2, 1.4, 1.6] };
    const BF16: Self =
        Self { prefill_512: 1.1, prefill_4096: 1.1, prefill_int8: 1.3, decode: [1.2, 1.4, 1.6] };

    /// Minimum ratios for a model of this shape on this machine's CPU. Only Qwen3's ratios depend on the CPU. For other
    /// shapes, the ratios of AVX2 apply to all CPUs, because peers gain nothing there on better CPUs.
    fn here(shape: Shape) -> Self {
        if shape != Shape::Qwen3 {
            return Self::AVX2;
        }
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512bf16") {
                return Self::BF16;
            }
            if is_x86_feature_detected!("avx512vnni") {
                return Self::VNNI;
            }
        }
        Self::AVX2
    }
}

pub fn compared(groups: &Groups, shape: Shape) -> Vec<Goal> {
    let OverPeers { prefill_512, prefill_4096, prefill_int8, decode } = OverPeers::here(shape);
    let over_peers = |group, figure, better, at_least| {
        let against = best_peer(groups, group, figure, better);
        let what = format!("{figure}, {group}, over the best peer");
        Goal::new(what, ours(groups, group, figure), against, better, at_least)
    };
    let higher = |group, figure, at_least| over_peers(group, figure, Better::Higher, at_least);
    let mut goals = vec![
        higher("prefill_bf16", "prefill_512", prefill_512),
        higher("prefill_bf16", "prefill_4096", prefill_4096),
        higher("prefill_int8", "prefill_512", prefill_int8),
        higher("decode_bf16", "decode_1", decode[0]),
        higher("decode_bf16", "decode_4", decode[1]),
        higher("decode_bf16", "decode_16", decode[2]),
        over_peers("mixed_bf16", "ttft_ms", Better::Lower, 1.0),
        longest_gap(groups),
        start(groups),
        over_own(groups, "decode_int8", "tutti-bf16", 1.6),
        higher("prefill_int4", "prefill_512", 1.1),
        higher("prefill_int4", "prefill_4096", 1.1),
        higher("decode_int4", "decode_1", 1.2),
        higher("decode_int4", "decode_4", 1.4),
        higher("decode_int4", "decode_16", 1.6),
        over_own(groups, "decode_int4", "tutti-bf16", 2.2),
        over_own(groups, "decode_int4", "tutti-int8", 1.4),
    ];
    if shape == Shape::Qwen3 {
        goals.extend([of_the_memory(groups), memory(groups)]);
    }
    goals
}

impl Goal {
    fn new(what: String, ours: Option<f64>, against: Option<Against>, better: Better, at_least: f64) -> Self {
        let ratio = ours.zip(against.as_ref()).map(|(ours, against)| match better {
            Better::Higher => ours / against.value,
            Better::Lower => against.value / ours,
        });
        Self { what, ours, against, ratio, at_least, met: ratio.map(|ratio| ratio >= at_least) }
    }
}

fn ours(groups: &Groups, group: &str, figure: &str) -> Option<f64> {
    of(groups, group, "tutti", figure)
}

fn of(groups: &Groups, group: &str, contender: &str, figure: &str) -> Option<f64> {
    groups.get(group)?.contenders.get(contender)?.medians.get(figure).copied()
}

fn best_peer(groups: &Groups, group: &str, figure: &str, better: Better) -> Option<Against> {
    let peers = groups.get(group)?.contenders.iter().filter(|(name, _)| !name.starts_with("tutti"));
    let values = peers.filter_map(|(name, gave)| Some((name, *gave.medians.get(figure)?)));
    let best = values.max_by(|a, b| match better {
        Better::Higher => a.1.total_cmp(&b.1),
        Better::Lower => b.1.total_cmp(&a.1),
    });
    best.map(|(name, value)| Against { name: name.clone(), value })
}

/// Goal for the rate at which one stream reads weights, relative to the memory bandwidth measured in the run.
fn of_the_memory(groups: &Groups) -> Goal {
    let rate = ours(groups, "decode_bf16", "decode_1").map(|tokens| tokens * WEIGHT_BYTES / 1e9);
    let limits = groups.get("decode_bf16").filter(|found| !found.limits.is_empty());
    let limit = limits.map(|found| {
        let rounds = found.limits.iter().map(|limits| limits.memory_read_gb_per_s);
        // The best round counts: other work on the machine can only lower a measured limit.
        rounds.fold(0.0, f64::max)
    });
    let limit = limit.map(|value| Against { name: "memory read".into(), value });
    Goal::new("GB/s of weights at decode_1, of what can be read".into(), rate, limit, Better::Higher, 0.85)
}

/// Goal for the gaps between tokens of the decoding streams (99th percentile), compared with those of the peer that has
/// the best TTFT of the long prompt.
fn longest_gap(groups: &Groups) -> Goal {
    let (group, figure) = ("mixed_bf16", "itl_ms_during_p99");
    let first = best_peer(groups, group, "ttft_ms", Better::Lower);
    let against = first.and_then(|first| {
        let value = of(groups, group, &first.name, figure)?;
        Some(Against { name: first.name, value })
    });
    let what = "itl_ms_during_p99, mixed_bf16, over the peer with the best TTFT".into();
    Goal::new(what, ours(groups, group, figure), against, Better::Lower, 4.0)
}

fn start(groups: &Groups) -> Goal {
    let (group, figure) = ("start_bf16", "start_to_first_token_s");
    let best = best_peer(groups, group, figure, Better::Lower).filter(|best| best.value > START_S);
    let against = best.unwrap_or(Against { name: "enough".into(), value: START_S });
    let what = format!("{figure}, the best peer's or {START_S}");
    Goal::new(what, ours(groups, group, figure), Some(against), Better::Lower, 1.0)
}

/// Goal for the peak memory of all processes after 16 streams, compared with weights and KV pool.
fn memory(groups: &Groups) -> Goal {
    let held = WEIGHT_BYTES + KV_POOL_BYTES as f64;
    let against = Against { name: "weights and KV pool".into(), value: held };
    let peak = ours(groups, "decode_bf16", "peak_memory_bytes");
    Goal::new("peak_memory_bytes".into(), peak, Some(against), Better::Lower, 1.0 / 1.15)
}

/// Goal for the decode of one stream, compared with Tutti's own with other weights.
fn over_own(groups: &Groups, group: &str, own: &str, at_least: f64) -> Goal {
    let figure = "decode_1";
    let value = of(groups, group, own, figure);
    let against = value.map(|value| Against { name: own.to_owned(), value });
    let what = format!("{figure}, {group}, over {own}");
    Goal::new(what, ours(groups, group, figure), against, Better::Higher, at_least)
}
