//! What the conductor counts. Names get the prefix `tutti_`; a worker's label is its rank, which outlives its process.

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    ErrorKind,
    metrics::{
        Metrics,
        encoding::EncodeLabelSet,
        metrics::{counter::Counter, family::Family, gauge::Gauge},
    },
};

use crate::request::{Dropped, EndingKind};

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

type PerWorker = Family<WorkerLabel, Gauge>;

/// The conductor's metrics; all are made at once and shared by reference.
#[derive(Debug, Default)]
pub struct ConductorMetrics {
    requests: Family<OutcomeLabel, Counter>,
    requests_in_flight: Gauge,
    prompt_tokens: Counter,
    generated_tokens: Counter,
    completions_dropped: Family<ReasonLabel, Counter>,
    tokens_dropped: Counter,
    kv_pages_used: PerWorker,
    kv_pages_total: PerWorker,
    requests_running: PerWorker,
    requests_waiting: PerWorker,
    steps: PerWorker,
    workers_ready: Gauge,
    restarts: Family<WorkerLabel, Counter>,
}

impl ConductorMetrics {
    /// Makes the metrics and adds them to the process's.
    pub fn new(metrics: &Metrics) -> Self {
        let new = Self::default();
        metrics.register(|r| {
            r.register("requests", "Requests that have ended, by outcome", new.requests.clone());
            let help = "Requests accepted and not yet let go of by every worker";
            r.register("requests_in_flight", help, new.requests_in_flight.clone());
            r.register("prompt_tokens", "Prompt tokens of accepted requests", new.prompt_tokens.clone());
            r.register("generated_tokens", "Tokens generated for requests", new.generated_tokens.clone());
            let help = "Completions that matched nothing pending, by reason";
            r.register("completions_dropped", help, new.completions_dropped.clone());
            let help = "Tokens of earlier tries, seen before, or late after an ending";
            r.register("tokens_dropped", help, new.tokens_dropped.clone());
            r.register("kv_pages_used", "KV pages that requests hold", new.kv_pages_used.clone());
            r.register("kv_pages_total", "KV pages of the pool", new.kv_pages_total.clone());
            r.register("requests_running", "Requests in a worker's steps", new.requests_running.clone());
            r.register("requests_waiting", "Requests in a worker's queue", new.requests_waiting.clone());
            r.register("worker_steps", "Steps of a worker's current process", new.steps.clone());
            r.register("workers_ready", "Workers that take requests", new.workers_ready.clone());
            r.register("worker_restarts", "Worker processes started again", new.restarts.clone());
        });
        new
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

    pub(crate) fn ended(&self, kind: EndingKind) {
        let outcome = match kind {
            EndingKind::Finished => "finished",
            EndingKind::Cancelled => "cancelled",
            EndingKind::Failed(ErrorKind::DeadlineExceeded) => "deadline_exceeded",
            EndingKind::Failed(ErrorKind::Unavailable) => "worker_lost",
            EndingKind::Failed(_) => "failed",
        };
        self.requests.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    pub(crate) fn refused(&self) {
        self.requests.get_or_create(&OutcomeLabel { outcome: "refused" }).inc();
    }

    pub(crate) fn dropped(&self, why: Dropped) {
        let reason = match why {
            Dropped::Stale => "stale",
            Dropped::Duplicate => "duplicate",
            Dropped::Unknown => "unknown",
        };
        self.completions_dropped.get_or_create(&ReasonLabel { reason }).inc();
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
    }

    pub(crate) fn gone(&self, worker: Rank) {
        let label = WorkerLabel { worker: worker.0 };
        for gauge in [
            &self.kv_pages_used,
            &self.kv_pages_total,
            &self.requests_running,
            &self.requests_waiting,
            &self.steps,
        ] {
            gauge.remove(&label);
        }
    }

    pub(crate) fn ready(&self, workers: usize) {
        self.workers_ready.set(workers as i64);
    }

    pub(crate) fn restarted(&self, worker: Rank) {
        self.restarts.get_or_create(&WorkerLabel { worker: worker.0 }).inc();
    }
}
