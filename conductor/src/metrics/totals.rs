//! Totals over all workers, computed at each scrape from the workers' last reports. A load balancer such as the
//! endpoint picker of the Gateway API inference extension reads one series per process, and autoscalers need no
//! aggregation.

use std::{
    collections::BTreeMap,
    fmt::{Debug, Error},
    sync::Arc,
    time::Instant,
};

use parking_lot::Mutex;
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    command_line::processes::CONDUCTOR,
    metrics::{
        Collector, Registry,
        encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric},
        metrics::gauge::ConstGauge,
    },
};

/// Parts of a worker's last report that totals need.
#[derive(Clone, Copy, Debug)]
struct Load {
    running: u32,
    waiting: u32,
    kv_pages_used: u32,
    kv_pages_total: u32,
    age: QueueAge,
}

/// Age of the oldest request in a worker's queue, by the worker's last report.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueAge {
    load: pb::WorkerLoad,
    reported: Instant,
}

impl QueueAge {
    /// The age in a report that has just arrived.
    pub fn of(load: &pb::WorkerLoad) -> Self {
        Self { load: *load, reported: Instant::now() }
    }

    /// The age at a later time, in seconds.
    pub fn seconds(self, now: Instant) -> f64 {
        let load = self.load.aged(now.saturating_duration_since(self.reported));
        f64::from(load.oldest_waiting_ms) / 1e3
    }
}

/// Totals over the present workers. All clones share the same totals.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals(Arc<Mutex<BTreeMap<Rank, Load>>>);

impl Totals {
    pub fn register(registry: &mut Registry) -> Self {
        let own = Self::default();
        registry.sub_registry_with_prefix(CONDUCTOR.name).register_collector(Box::new(own.clone()));
        own
    }

    pub fn take(&self, worker: Rank, load: &pb::WorkerLoad) {
        let pb::WorkerLoad { running, waiting, kv_pages_used, kv_pages_total, .. } = *load;
        let load = Load { running, waiting, kv_pages_used, kv_pages_total, age: QueueAge::of(load) };
        self.0.lock().insert(worker, load);
    }

    pub fn gone(&self, worker: Rank) {
        self.0.lock().remove(&worker);
    }
}

impl Collector for Totals {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), Error> {
        let loads: Vec<Load> = self.0.lock().values().copied().collect();
        let sum = |part: fn(&Load) -> u32| loads.iter().map(|load| i64::from(part(load))).sum::<i64>();
        gauge(
            &mut encoder,
            "requests_running",
            "Requests in the steps of all workers",
            sum(|load| load.running),
        )?;
        gauge(
            &mut encoder,
            "requests_waiting",
            "Requests in the queues of all workers",
            sum(|load| load.waiting),
        )?;
        let (used, total) = (sum(|load| load.kv_pages_used), sum(|load| load.kv_pages_total));
        let help = "Share of all workers' KV pages that requests hold, from 0 to 1";
        gauge(&mut encoder, "kv_utilization", help, used as f64 / total.max(1) as f64)?;
        let now = Instant::now();
        let oldest = loads.iter().map(|load| load.age.seconds(now)).fold(0.0, f64::max);
        let help = "Age in seconds of the oldest request of all workers that has not been part of a step";
        gauge(&mut encoder, "queue_age_seconds", help, oldest)
    }
}

fn gauge(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    value: impl EncodeGaugeValue,
) -> Result<(), Error> {
    let gauge = ConstGauge::new(value);
    gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
}

#[cfg(test)]
mod tests;
