//! The conductor's metrics. The name of each metric gets the prefix `tutti_`. A worker's label is its rank, which stays
//! the same when the worker's process is restarted.

mod experts;
mod planes;
mod prefixes;
mod totals;
mod transfers;

use std::sync::atomic::AtomicU64;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    ErrorKind,
    metrics::{
        Metrics,
        encoding::EncodeLabelSet,
        metrics::{
            counter::Counter,
            family::{Family, MetricConstructor},
            gauge::Gauge,
            histogram::Histogram,
        },
    },
};

use self::{
    experts::ExpertMetrics, planes::PlaneMetrics, prefixes::PrefixMetrics, totals::Totals,
    transfers::TransferMetrics,
};
use crate::{
    cluster::IndexSize,
    request::{Dropped, EndingKind},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabel {
    worker: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabel {
    role: &'static str,
}

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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemoryLabel {
    worker: u32,
    kind: &'static str,
}

type PerWorker = Family<WorkerLabel, Gauge>;

/// Buckets of a family of histograms.
#[derive(Clone, Copy, Debug)]
struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// Outcomes of requests.
const OUTCOMES: [&str; 6] =
    ["finished", "cancelled", "deadline_exceeded", "worker_lost", "failed", "refused"];
/// Seconds per step: from a step of a small model to a long prefill on a CPU.
const STEP_SECONDS: Buckets =
    Buckets(&[1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0]);
/// Shares of the step's token budget that are used. Only a prefill that cannot be split and runs alone in its step
/// exceeds 1.
const BUDGET_FILL: Buckets = Buckets(&[0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]);

/// The conductor's metrics, registered all at once and shared by reference.
#[derive(Debug)]
pub struct ConductorMetrics {
    requests: Family<OutcomeLabel, Counter>,
    requests_in_flight: Gauge,
    prompt_tokens: Counter,
    generated_tokens: Counter,
    completions_dropped: Family<ReasonLabel, Counter>,
    tokens_dropped: Counter,
    replays: Counter,
    handovers: Counter,
    kv_pages_used: PerWorker,
    kv_pages_total: PerWorker,
    requests_running: PerWorker,
    requests_waiting: PerWorker,
    steps: PerWorker,
    workers_ready: Gauge,
    workers_expected: Gauge,
    groups_ready: Family<RoleLabel, Gauge>,
    restarts: Family<WorkerLabel, Counter>,
    fenced: Family<ReasonLabel, Counter>,
    refusals: Family<ReasonLabel, Counter>,
    oldest_waiting: Family<WorkerLabel, Gauge<f64, AtomicU64>>,
    trace_steps_lost: PerWorker,
    kv_pages_cached: PerWorker,
    preemptions: PerWorker,
    prefill_tokens: PerWorker,
    cached_tokens: PerWorker,
    step_seconds: Family<WalkLabel, Histogram, Buckets>,
    budget_fill: Family<WorkerLabel, Histogram, Buckets>,
    rows: Family<RowLabel, Counter>,
    padding: Family<WorkerLabel, Counter>,
    memory: Family<MemoryLabel, Gauge>,
    transfers: TransferMetrics,
    planes: PlaneMetrics,
    experts: ExpertMetrics,
    prefixes: PrefixMetrics,
    totals: Totals,
}

impl ConductorMetrics {
    /// Creates the metrics and registers them in `metrics`.
    pub fn new(metrics: &Metrics) -> Self {
        let new = Self {
            requests: Default::default(),
            requests_in_flight: Default::default(),
            prompt_tokens: Default::default(),
            generated_tokens: Default::default(),
            completions_dropped: Default::default(),
            tokens_dropped: Default::default(),
            replays: Default::default(),
            handovers: Default::default(),
            groups_ready: Default::default(),
            kv_pages_used: Default::default(),
            kv_pages_total: Default::default(),
            requests_running: Default::default(),
            requests_waiting: Default::default(),
            steps: Default::default(),
            workers_ready: Default::default(),
            workers_expected: Default::default(),
            restarts: Default::default(),
            fenced: Default::default(),
            refusals: Default::default(),
            oldest_waiting: Default::default(),
            trace_steps_lost: Default::default(),
            kv_pages_cached: Default::default(),
            preemptions: Default::default(),
            prefill_tokens: Default::default(),
            cached_tokens: Default::default(),
            step_seconds: Family::new_with_constructor(STEP_SECONDS),
            budget_fill: Family::new_with_constructor(BUDGET_FILL),
            rows: Default::default(),
            padding: Default::default(),
            memory: Default::default(),
            transfers: Default::default(),
            planes: Default::default(),
            experts: Default::default(),
            prefixes: Default::default(),
            totals: Default::default(),
        };
        new.totals.register(metrics);
        new.begin_counters();
        new.prefixes.register(metrics);
        new.transfers.register(metrics);
        new.planes.register(metrics);
        new.experts.register(metrics);
        metrics.register(|r| {
            r.register("requests", "Requests that have ended, by outcome", new.requests.clone());
            let help = "Requests accepted and not yet completed by every worker";
            r.register("requests_in_flight", help, new.requests_in_flight.clone());
            r.register("prompt_tokens", "Prompt tokens of accepted requests", new.prompt_tokens.clone());
            r.register("generated_tokens", "Tokens generated for requests", new.generated_tokens.clone());
            let help = "Completions that matched no pending worker graph, by reason";
            r.register("completions_dropped", help, new.completions_dropped.clone());
            let help = "Tokens dropped because they were of an earlier try, received before, or late after an ending";
            r.register("tokens_dropped", help, new.tokens_dropped.clone());
            let help = "Tries of requests that were lost with their worker and repeated";
            r.register("request_replays", help, new.replays.clone());
            let help = "Requests whose prefill was handed over to another worker for the decode";
            r.register("request_handovers", help, new.handovers.clone());
            r.register("kv_pages_used", "KV pages that requests hold", new.kv_pages_used.clone());
            r.register("kv_pages_total", "KV pages of the pool", new.kv_pages_total.clone());
            r.register("requests_running", "Requests in a worker's steps", new.requests_running.clone());
            r.register("requests_waiting", "Requests in a worker's queue", new.requests_waiting.clone());
            r.register("worker_steps", "Steps of a worker's current process", new.steps.clone());
            r.register("workers_ready", "Workers that take requests", new.workers_ready.clone());
            let help = "Workers that the conductor starts and keeps, without those that an operator has drained";
            r.register("workers_expected", help, new.workers_expected.clone());
            let help = "Groups that take requests, by role: whole, prefill, decode, encode";
            r.register("groups_ready", help, new.groups_ready.clone());
            r.register("worker_restarts", "Worker processes started again", new.restarts.clone());
            let help = "Workers taken for dead while their streams were open, by reason: stopped, hangs";
            r.register("workers_fenced", help, new.fenced.clone());
            let help = "Requests refused by the conductor's validation or a worker's admission, by reason";
            r.register("requests_refused", help, new.refusals.clone());
            let help = "Age in seconds of the oldest request that has not been part of a step";
            r.register("queue_age_seconds", help, new.oldest_waiting.clone());
            let help = "Steps missing from the step trace of a worker's current process";
            r.register("trace_steps_lost", help, new.trace_steps_lost.clone());
            let help = "KV pages that no request holds, kept for prompts with the same prefix";
            r.register("kv_pages_cached", help, new.kv_pages_cached.clone());
            let help = "Preemptions since the worker's process began";
            r.register("worker_preemptions", help, new.preemptions.clone());
            let help = "Prompt tokens of admitted requests, since the worker's process began";
            r.register("worker_prefill_tokens", help, new.prefill_tokens.clone());
            let help = "Prompt tokens found in the prefix cache, since the worker's process began";
            r.register("worker_cached_tokens", help, new.cached_tokens.clone());
            let help = "Seconds per step, planning and committing included, by the walk that the engine ran";
            r.register("step_seconds", help, new.step_seconds.clone());
            let help = "Share of the step's token budget that its rows used";
            r.register("step_budget_fill", help, new.budget_fill.clone());
            let help =
                "Rows of steps: decode, prefill (more of the prompt follows), last_prefill (samples a token)";
            r.register("step_rows", help, new.rows.clone());
            let help = "Tokens of padding that steps computed to reach a fixed shape (--chunk-shapes)";
            r.register("step_padding_tokens", help, new.padding.clone());
            let help = "Most bytes that a worker uses, estimated at its start, by kind: weights, kv, step (the largest step)";
            r.register("worker_memory_bytes", help, new.memory.clone());
        });
        new
    }

    /// Creates the counters that alerts watch, at 0. The first count of a series that did not exist before is no increase
    /// to Prometheus.
    fn begin_counters(&self) {
        for outcome in OUTCOMES {
            self.requests.get_or_create(&OutcomeLabel { outcome }).inc_by(0);
        }
        for reason in ["stopped", "hangs"] {
            self.fenced.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        for reason in [Dropped::Stale, Dropped::Duplicate, Dropped::Unknown].map(drop_reason) {
            self.completions_dropped.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        for reason in ErrorKind::labels() {
            self.refusals.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
    }

    pub(crate) fn accepted(&self, prompt_tokens: usize, in_flight: usize) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.requests_in_flight.set(in_flight as i64);
    }

    pub(crate) fn in_flight(&self, requests: usize) {
        self.requests_in_flight.set(requests as i64);
    }

    pub(crate) fn tokens(&self, taken: usize, dropped: usize) {
        self.generated_tokens.inc_by(taken as u64);
        self.tokens_dropped.inc_by(dropped as u64);
    }

    pub(crate) fn replayed(&self) {
        self.replays.inc();
    }

    pub(crate) fn handed_over(&self) {
        self.handovers.inc();
    }

    /// Counts a placement of a prompt. The prompt has `blocks` indexable blocks, of which the worker had received
    /// `hits` before.
    pub(crate) fn placed(&self, blocks: usize, hits: u64, size: IndexSize) {
        self.prefixes.placed(blocks, hits, size);
    }

    pub(crate) fn ended(&self, kind: EndingKind) {
        let outcome = match kind {
            EndingKind::Refused(why) => return self.refused(why),
            EndingKind::Finished => "finished",
            EndingKind::Cancelled => "cancelled",
            EndingKind::Failed(ErrorKind::DeadlineExceeded) => "deadline_exceeded",
            EndingKind::Failed(ErrorKind::Unavailable) => "worker_lost",
            EndingKind::Failed(_) => "failed",
        };
        self.requests.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    pub(crate) fn refused(&self, why: ErrorKind) {
        self.requests.get_or_create(&OutcomeLabel { outcome: "refused" }).inc();
        self.refusals.get_or_create(&ReasonLabel { reason: why.label() }).inc();
    }

    /// Counts one step of a worker. `walk` is the name of the walk that the step ran.
    pub(crate) fn step(&self, worker: Rank, walk: &str, work: &pb::StepWork) {
        let worker = worker.0;
        let us = u64::from(work.plan_us) + u64::from(work.run_us) + u64::from(work.commit_us);
        let label = WalkLabel { worker, walk: walk.to_owned() };
        self.step_seconds.get_or_create(&label).observe(us as f64 / 1e6);
        let fill = f64::from(work.tokens) / f64::from(work.budget_tokens.max(1));
        self.budget_fill.get_or_create(&WorkerLabel { worker }).observe(fill);
        let rows = [
            ("decode", work.decode_rows),
            ("prefill", work.prefill_rows),
            ("last_prefill", work.last_prefill_rows),
        ];
        for (kind, count) in rows {
            self.rows.get_or_create(&RowLabel { worker, kind }).inc_by(count.into());
        }
        if work.padding_tokens > 0 {
            self.padding.get_or_create(&WorkerLabel { worker }).inc_by(work.padding_tokens.into());
        }
    }

    pub(crate) fn dropped(&self, why: Dropped) {
        self.completions_dropped.get_or_create(&ReasonLabel { reason: drop_reason(why) }).inc();
    }

    pub(crate) fn load(&self, worker: Rank, load: &pb::WorkerLoad) {
        let set = |gauge: &PerWorker, value: i64| {
            gauge.get_or_create(&WorkerLabel { worker: worker.0 }).set(value);
        };
        set(&self.kv_pages_used, i64::from(load.kv_pages_used));
        set(&self.kv_pages_total, i64::from(load.kv_pages_total));
        set(&self.requests_running, i64::from(load.running));
        set(&self.requests_waiting, i64::from(load.waiting));
        set(&self.steps, load.steps as i64);
        set(&self.trace_steps_lost, load.trace_steps_lost as i64);
        set(&self.kv_pages_cached, i64::from(load.kv_pages_cached));
        set(&self.preemptions, load.preemptions as i64);
        set(&self.prefill_tokens, load.prefill_tokens as i64);
        set(&self.cached_tokens, load.cached_tokens as i64);
        self.planes.take(worker, load);
        self.totals.take(worker, load);
        if let Some(counts) = &load.transfers {
            self.transfers.take(worker, counts);
        }
        let oldest = f64::from(load.oldest_waiting_ms) / 1e3;
        self.oldest_waiting.get_or_create(&WorkerLabel { worker: worker.0 }).set(oldest);
    }

    /// Sets the balance among the experts of the layers that a worker reports.
    pub(crate) fn expert_loads(&self, worker: Rank, loads: &[pb::ExpertLoad]) {
        self.experts.take(worker, loads);
    }

    /// Sets a worker's estimate of the memory that it uses, in bytes per kind of memory. Called when the worker is ready,
    /// so its counter of restarts exists from then on.
    pub(crate) fn memory(&self, worker: Rank, kinds: [(&'static str, u64); 3]) {
        self.restarts.get_or_create(&WorkerLabel { worker: worker.0 }).inc_by(0);
        for (kind, bytes) in kinds {
            self.memory.get_or_create(&MemoryLabel { worker: worker.0, kind }).set(bytes as i64);
        }
    }

    pub(crate) fn gone(&self, worker: Rank) {
        let label = WorkerLabel { worker: worker.0 };
        for gauge in [
            &self.kv_pages_used,
            &self.kv_pages_total,
            &self.requests_running,
            &self.requests_waiting,
            &self.steps,
            &self.trace_steps_lost,
            &self.kv_pages_cached,
            &self.preemptions,
            &self.prefill_tokens,
            &self.cached_tokens,
        ] {
            gauge.remove(&label);
        }
        self.transfers.gone(worker);
        self.planes.gone(worker);
        self.totals.gone(worker);
        self.experts.gone(worker);
        self.oldest_waiting.remove(&label);
        for kind in ["weights", "kv", "step"] {
            self.memory.remove(&MemoryLabel { worker: worker.0, kind });
        }
    }

    /// Sets the number of ready workers, and of those that the conductor keeps running.
    pub(crate) fn ready(&self, workers: usize, expected: usize) {
        self.workers_ready.set(workers as i64);
        self.workers_expected.set(expected as i64);
    }

    /// Sets the number of ready replicas of a role.
    pub(crate) fn groups_ready(&self, role: &'static str, groups: usize) {
        self.groups_ready.get_or_create(&RoleLabel { role }).set(groups as i64);
    }

    pub(crate) fn fenced(&self, reason: &'static str) {
        self.fenced.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(crate) fn restarted(&self, worker: Rank) {
        self.restarts.get_or_create(&WorkerLabel { worker: worker.0 }).inc();
    }
}

fn drop_reason(why: Dropped) -> &'static str {
    match why {
        Dropped::Stale => "stale",
        Dropped::Duplicate => "duplicate",
        Dropped::Unknown => "unknown",
    }
}
