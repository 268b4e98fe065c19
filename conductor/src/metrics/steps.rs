//! Metrics of workers' steps.

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    declare_metrics,
    metrics::{
        encoding::EncodeLabelSet,
        metrics::{
            counter::Counter,
            family::{Family, MetricConstructor},
            histogram::Histogram,
        },
    },
};

use super::{ConductorMetrics, WorkerLabel};

/// Buckets of a family of histograms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// Buckets in seconds per step. They range from a step of a small model to a long prefill on a CPU.
const STEP_SECONDS: Buckets =
    Buckets(&[1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0]);
/// Buckets of the used share of a step's token budget. Only a prefill that cannot be split and runs alone in its step
/// exceeds 1.
const BUDGET_FILL: Buckets = Buckets(&[0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WalkLabel {
    worker: u32,
    walk: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RowLabel {
    worker: u32,
    kind: &'static str,
}

declare_metrics! {
    #[derive(Debug)]
    pub(super) struct StepMetrics {
        seconds: Family<WalkLabel, Histogram, Buckets> = Family::new_with_constructor(STEP_SECONDS), "step_seconds",
            "Seconds per step, planning and committing included, by the walk that the engine ran";
        budget_fill: Family<WorkerLabel, Histogram, Buckets> = Family::new_with_constructor(BUDGET_FILL),
            "step_budget_fill", "Share of the step's token budget that its rows used";
        rows: Family<RowLabel, Counter>, "step_rows",
            "Rows of steps: decode, prefill (more of the prompt follows), last_prefill (samples a token)";
        padding: Family<WorkerLabel, Counter>, "step_padding_tokens",
            "Tokens of padding that steps computed to reach a fixed shape (--chunk-shapes)";
    }
}

impl ConductorMetrics {
    /// Counts one step of a worker. `walk` is the name of the walk that the step ran.
    pub(crate) fn step(&self, rank: Rank, walk: &str, work: &pb::StepWork) {
        let (worker, steps) = (rank.0, &self.steps);
        let us = u64::from(work.plan_us) + u64::from(work.run_us) + u64::from(work.commit_us);
        let label = WalkLabel { worker, walk: walk.to_owned() };
        steps.seconds.get_or_create(&label).observe(us as f64 / 1e6);
        let fill = f64::from(work.tokens) / f64::from(work.budget_tokens.max(1));
        steps.budget_fill.get_or_create(&rank.into()).observe(fill);
        let rows = [
            ("decode", work.decode_rows),
            ("prefill", work.prefill_rows),
            ("last_prefill", work.last_prefill_rows),
        ];
        for (kind, count) in rows {
            steps.rows.get_or_create(&RowLabel { worker, kind }).inc_by(count.into());
        }
        if work.padding_tokens > 0 {
            steps.padding.get_or_create(&rank.into()).inc_by(work.padding_tokens.into());
        }
    }
}
