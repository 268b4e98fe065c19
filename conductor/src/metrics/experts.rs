//! Metrics of the balance among a model's experts.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::metrics::{
    Metrics,
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};

/// Layers of a worker that have a metric. A report may name more, which are left out.
const MAX_LAYERS: u32 = 4096;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LayerLabel {
    worker: u32,
    layer: u32,
}

/// Gauges per worker and layer.
#[derive(Clone, Debug, Default)]
pub(super) struct ExpertMetrics {
    imbalance: Family<LayerLabel, Gauge<f64, AtomicU64>>,
    /// Number of layers up to the last one that any worker has reported.
    layers: Arc<AtomicU32>,
}

impl ExpertMetrics {
    pub fn register(&self, metrics: &Metrics) {
        metrics.register(|r| {
            let help = "Tokens of a layer's most chosen expert, divided by the mean of the layer's experts, since the \
                        worker's process began: 1 is balance";
            r.register("worker_expert_imbalance", help, self.imbalance.clone());
        });
    }

    pub fn take(&self, worker: Rank, loads: &[pb::ExpertLoad]) {
        for load in loads.iter().filter(|load| load.tokens > 0 && load.layer < MAX_LAYERS) {
            let label = LayerLabel { worker: worker.0, layer: load.layer };
            let mean = load.tokens as f64 / f64::from(load.experts);
            self.imbalance.get_or_create(&label).set(load.most as f64 / mean);
            self.layers.fetch_max(load.layer + 1, Ordering::Relaxed);
        }
    }

    pub fn gone(&self, worker: Rank) {
        for layer in 0..self.layers.load(Ordering::Relaxed) {
            self.imbalance.remove(&LayerLabel { worker: worker.0, layer });
        }
    }
}
