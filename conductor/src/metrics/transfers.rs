//! Metrics of transfers from a prefill or an encoder to another worker.

use std::sync::atomic::AtomicU64;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::metrics::{
    Metrics,
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabel {
    worker: u32,
    transport: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    worker: u32,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TimeLabel {
    worker: u32,
    time: &'static str,
}

/// Totals of transfers since each worker's process began.
#[derive(Clone, Debug, Default)]
pub(super) struct TransferMetrics {
    bytes: Family<TransportLabel, Gauge>,
    requests: Family<OutcomeLabel, Gauge>,
    seconds: Family<TimeLabel, Gauge<f64, AtomicU64>>,
}

impl TransferMetrics {
    pub fn register(&self, metrics: &Metrics) {
        metrics.register(|r| {
            let help = "Bytes of planes and embeddings sent to other workers since the worker's process began, by transport";
            r.register("worker_transfer_bytes", help, self.bytes.clone());
            let help = "Requests handed over to other workers or failed to be, since the worker's process began, by outcome";
            r.register("worker_transfers", help, self.requests.clone());
            let help = "Seconds of transfers: pushing (from the first page to the receipt), and exposed (the part of it \
                        after the prefill's end)";
            r.register("worker_transfer_seconds", help, self.seconds.clone());
        });
    }

    pub fn take(&self, worker: Rank, counts: &pb::TransferCounts) {
        let worker = worker.0;
        for (transport, bytes) in [("shared_memory", counts.shared_memory_bytes), ("tcp", counts.tcp_bytes)] {
            self.bytes.get_or_create(&TransportLabel { worker, transport }).set(bytes as i64);
        }
        for (outcome, requests) in [("handed_over", counts.handed_over), ("failed", counts.failed)] {
            self.requests.get_or_create(&OutcomeLabel { worker, outcome }).set(requests as i64);
        }
        for (time, us) in [("pushing", counts.pushing_us), ("exposed", counts.exposed_us)] {
            self.seconds.get_or_create(&TimeLabel { worker, time }).set(us as f64 / 1e6);
        }
    }

    pub fn gone(&self, worker: Rank) {
        let worker = worker.0;
        for transport in ["shared_memory", "tcp"] {
            self.bytes.remove(&TransportLabel { worker, transport });
        }
        for outcome in ["handed_over", "failed"] {
            self.requests.remove(&OutcomeLabel { worker, outcome });
        }
        for time in ["pushing", "exposed"] {
            self.seconds.remove(&TimeLabel { worker, time });
        }
    }
}
