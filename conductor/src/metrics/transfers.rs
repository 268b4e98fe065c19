//! Metrics of transfers from a prefill or an encoder to another worker.

use std::sync::atomic::AtomicU64;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    declare_metrics,
    metrics::{
        encoding::EncodeLabelSet,
        metrics::{family::Family, gauge::Gauge},
    },
};

use super::PerWorker;

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

declare_metrics! {
    /// Totals of transfers since each worker's process began.
    #[derive(Debug)]
    pub(super) struct TransferMetrics {
        bytes: Family<TransportLabel, Gauge>, "worker_transfer_bytes",
            "Bytes of planes and embeddings sent to other workers since the worker's process began, by transport";
        requests: Family<OutcomeLabel, Gauge>, "worker_transfers",
            "Requests handed over to other workers or failed to be, since the worker's process began, by outcome";
        seconds: Family<TimeLabel, Gauge<f64, AtomicU64>>, "worker_transfer_seconds",
            "Seconds of transfers: pushing (from the first page to the receipt), and exposed (the part of it after the \
             prefill's end)";
        corrupt: PerWorker, "worker_transfer_corrupt",
            "Runs of planes and embeddings, and messages about them, that the worker received with a wrong checksum \
             since its process began";
    }
}

/// The counts of a worker's transfers, each with the value of its label.
struct Labelled {
    bytes: [(&'static str, u64); 2],
    requests: [(&'static str, u64); 2],
    us: [(&'static str, u64); 2],
}

impl Labelled {
    fn of(counts: &pb::TransferCounts) -> Self {
        Self {
            bytes: [("shared_memory", counts.shared_memory_bytes), ("tcp", counts.tcp_bytes)],
            requests: [("handed_over", counts.handed_over), ("failed", counts.failed)],
            us: [("pushing", counts.pushing_us), ("exposed", counts.exposed_us)],
        }
    }
}

impl TransferMetrics {
    pub fn take(&self, worker: Rank, counts: &pb::TransferCounts) {
        self.corrupt.get_or_create(&worker.into()).set(counts.corrupt as i64);
        let (worker, Labelled { bytes, requests, us }) = (worker.0, Labelled::of(counts));
        for (transport, bytes) in bytes {
            self.bytes.get_or_create(&TransportLabel { worker, transport }).set(bytes as i64);
        }
        for (outcome, requests) in requests {
            self.requests.get_or_create(&OutcomeLabel { worker, outcome }).set(requests as i64);
        }
        for (time, us) in us {
            self.seconds.get_or_create(&TimeLabel { worker, time }).set(us as f64 / 1e6);
        }
    }

    pub fn gone(&self, worker: Rank) {
        self.corrupt.remove(&worker.into());
        let (worker, Labelled { bytes, requests, us }) = (worker.0, Labelled::of(&Default::default()));
        for (transport, _) in bytes {
            self.bytes.remove(&TransportLabel { worker, transport });
        }
        for (outcome, _) in requests {
            self.requests.remove(&OutcomeLabel { worker, outcome });
        }
        for (time, _) in us {
            self.seconds.remove(&TimeLabel { worker, time });
        }
    }
}
