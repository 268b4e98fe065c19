//! Metrics of the presence of workers, and of the memory that they use.

use std::sync::atomic::AtomicU64;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    declare_metrics,
    metrics::{
        Registry,
        encoding::EncodeLabelSet,
        metrics::{counter::Counter, family::Family, gauge::Gauge},
    },
};

use super::{ConductorMetrics, PerWorker, ReasonLabel, WorkerLabel};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabel {
    role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemoryLabel {
    worker: u32,
    kind: &'static str,
}

declare_metrics! {
    #[derive(Debug)]
    pub(super) struct WorkerMetrics {
        ready: Gauge, "workers_ready", "Workers that take requests";
        expected: Gauge, "workers_expected",
            "Workers that the conductor starts and keeps, without those that an operator has drained";
        groups_ready: Family<RoleLabel, Gauge>, "groups_ready",
            "Groups that take requests, by role: whole, prefill, decode, encode";
        restarts: Family<WorkerLabel, Counter>, "worker_restarts", "Worker processes started again";
        fenced: Family<ReasonLabel, Counter>, "workers_fenced",
            "Workers taken for dead while their streams were open, by reason: stopped, hangs";
        slow: PerWorker, "worker_slow",
            "1 while the worker gets no new requests because its steps take far longer than its peers'";
        slowed: Family<WorkerLabel, Counter>, "workers_slowed", "Times that a worker was set aside because it was slow";
        step_ratio: Family<WorkerLabel, Gauge<f64, AtomicU64>>, "worker_step_ratio",
            "Time of the worker's steps divided by that of its peers' steps of like size, a factor of its cost in \
             placement; 1 if it is below 2 or not known";
        memory: Family<MemoryLabel, Gauge>, "worker_memory_bytes",
            "Most bytes that a worker uses, estimated at its start, by kind: weights, kv, step (the largest step)";
    }
}

impl WorkerMetrics {
    /// Registers the metrics. A counter that an alert watches begins at 0, because Prometheus does not see the first
    /// sample of a new series as an increase.
    pub fn begin(registry: &mut Registry) -> Self {
        let own = Self::register(registry);
        for reason in ["stopped", "hangs"] {
            own.fenced.get_or_create(&ReasonLabel { reason }).inc_by(0);
        }
        own
    }

    pub fn gone(&self, worker: Rank) {
        self.slow.remove(&worker.into());
        self.step_ratio.remove(&worker.into());
        for (kind, _) in memory_of(&Default::default()) {
            self.memory.remove(&MemoryLabel { worker: worker.0, kind });
        }
    }
}

impl ConductorMetrics {
    /// Sets a worker's estimate of the memory that it uses. Also creates the worker's restart counter.
    pub(crate) fn memory(&self, worker: Rank, ready: &pb::Ready) {
        self.workers.restarts.get_or_create(&worker.into()).inc_by(0);
        self.slow(worker, false);
        for (kind, bytes) in memory_of(ready) {
            self.workers.memory.get_or_create(&MemoryLabel { worker: worker.0, kind }).set(bytes as i64);
        }
    }

    /// Sets the number of ready workers, and the number of workers that the conductor keeps running.
    pub(crate) fn ready(&self, workers: usize, expected: usize) {
        self.workers.ready.set(workers as i64);
        self.workers.expected.set(expected as i64);
    }

    /// Sets the number of ready replicas of a role.
    pub(crate) fn groups_ready(&self, role: &'static str, groups: usize) {
        self.workers.groups_ready.get_or_create(&RoleLabel { role }).set(groups as i64);
    }

    /// Sets whether a worker is set aside as slow.
    pub(crate) fn slow(&self, worker: Rank, is_slow: bool) {
        self.workers.slow.get_or_create(&worker.into()).set(is_slow.into());
        self.workers.slowed.get_or_create(&worker.into()).inc_by(is_slow.into());
    }

    /// Sets a worker's pace beside its peers'.
    pub(crate) fn pace(&self, worker: Rank, ratio: f64) {
        self.workers.step_ratio.get_or_create(&worker.into()).set(ratio);
    }

    pub(crate) fn fenced(&self, reason: &'static str) {
        self.workers.fenced.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Number of times that a rank's process was started again.
    pub(crate) fn restarts(&self, worker: Rank) -> u64 {
        self.workers.restarts.get(&worker.into()).map_or(0, |restarts| restarts.get())
    }

    pub(crate) fn restarted(&self, worker: Rank) {
        self.workers.restarts.get_or_create(&worker.into()).inc();
    }
}

/// The worker's estimate of its memory in bytes, by kind of memory.
fn memory_of(ready: &pb::Ready) -> [(&'static str, u64); 3] {
    [("weights", ready.weight_bytes), ("kv", ready.kv_bytes), ("step", ready.step_bytes)]
}
