//! Metrics of the resources that each worker's process and its device have, from its last heartbeat.

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
        device_used: PerWorker, "worker_device_memory_used_bytes",
            "Bytes in use of the memory of the worker's device: of a GPU, by any process; of a host, by the worker's process";
        device_total: PerWorker, "worker_device_memory_total_bytes",
            "Bytes of the memory of the worker's device: of a GPU; of a host, under the closest limit of a control group";
    }
}

impl UsageMetrics {
    pub fn gone(&self, worker: Rank) {
        let label = worker.into();
        for gauge in [&self.resident, &self.open, &self.most, &self.device_used, &self.device_total] {
            gauge.remove(&label);
        }
        self.cpu.remove(&label);
        self.started.remove(&label);
    }
}

impl ConductorMetrics {
    /// Sets the memory of a worker's device.
    pub(crate) fn device_memory(&self, worker: Rank, memory: &pb::DeviceMemory) {
        let (own, label) = (&self.usage, WorkerLabel::from(worker));
        let gauges = [(&own.device_used, memory.used_bytes), (&own.device_total, memory.total_bytes)];
        for (gauge, bytes) in gauges {
            gauge.get_or_create(&label).set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

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
