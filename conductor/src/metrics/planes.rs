//! Metrics of workers' slots, and of rows that ended requests have left in their steps.

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::metrics::Metrics;

use super::{PerWorker, WorkerLabel};

/// Gauges per worker.
#[derive(Clone, Debug, Default)]
pub(super) struct PlaneMetrics {
    slots_used: PerWorker,
    slots_total: PerWorker,
    snapshots: PerWorker,
    void_rows: PerWorker,
}

impl PlaneMetrics {
    pub fn register(&self, metrics: &Metrics) {
        metrics.register(|r| {
            r.register("slots_used", "Slots of state that requests hold", self.slots_used.clone());
            let help = "Slots of state that requests and snapshots can hold";
            r.register("slots_total", help, self.slots_total.clone());
            let help = "Snapshots of the prefix cache that no request reads";
            r.register("snapshots", help, self.snapshots.clone());
            let help = "Rows computed after the end of their requests, since the worker's process began";
            r.register("worker_void_rows", help, self.void_rows.clone());
        });
    }

    pub fn take(&self, worker: Rank, load: &pb::WorkerLoad) {
        let pb::WorkerLoad { slots_used, slots_total, snapshots, void_rows, .. } = *load;
        for (gauge, value) in [
            (&self.slots_used, i64::from(slots_used)),
            (&self.slots_total, i64::from(slots_total)),
            (&self.snapshots, i64::from(snapshots)),
            (&self.void_rows, void_rows as i64),
        ] {
            gauge.get_or_create(&WorkerLabel { worker: worker.0 }).set(value);
        }
    }

    pub fn gone(&self, worker: Rank) {
        for gauge in [&self.slots_used, &self.slots_total, &self.snapshots, &self.void_rows] {
            gauge.remove(&WorkerLabel { worker: worker.0 });
        }
    }
}
