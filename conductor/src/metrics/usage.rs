//! Metrics of the resources that each worker's process has, from its last heartbeat.

use std::sync::atomic::AtomicU64;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    declare_metrics,
    metrics::metrics::{family::Family, gauge::Gauge},
};

use super::{ConductorMetrics, PerWorker, WorkerLabel};

type Seconds = Family<WorkerLabel, Gauge<f64, AtomicU64>>;

declare_metrics! {
    #[derive(Debug)]
    pub(super) struct UsageMetrics {
        resident: PerWorker, "worker_resident_memory_bytes", "Bytes of memory that a worker's process has";
        cpu: Seconds, "worker_cpu_seconds", "Seconds of processors, of all threads since the worker's process began";
        open: PerWorker, "worker_open_fds", "Open descriptors of a worker's process";
        most: PerWorker, "worker_max_fds", "Descriptors that a worker's process may have open";
        started: Seconds, "worker_start_time_seconds", "Unix time at which the worker's process began";
    }
}

impl UsageMetrics {
    pub fn gone(&self, worker: Rank) {
        let label = worker.into();
        for gauge in [&self.resident, &self.open, &self.most] {
            gauge.remove(&label);
        }
        self.cpu.remove(&label);
        self.started.remove(&label);
    }
}

impl ConductorMetrics {
    /// Sets the metrics of a worker's process.
    pub(crate) fn usage(&self, worker: Rank, usage: &pb::ProcessUsage) {
        let (own, label) = (&self.usage, WorkerLabel::from(worker));
        let set = |gauge: &PerWorker, value: Option<u64>| {
            if let Some(value) = value {
                gauge.get_or_create(&label).set(i64::try_from(value).unwrap_or(i64::MAX));
            }
        };
        set(&own.resident, usage.resident_bytes);
        set(&own.open, usage.open_descriptors);
        set(&own.most, usage.max_descriptors);
        for (gauge, us) in [(&own.cpu, usage.cpu_us), (&own.started, usage.started_us)] {
            if let Some(us) = us {
                gauge.get_or_create(&label).set(us as f64 / 1e6);
            }
        }
    }
}
