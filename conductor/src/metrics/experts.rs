//! Metrics of the balance among a model's experts.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{
    declare_metrics,
    metrics::{
        Registry,
        encoding::EncodeLabelSet,
        metrics::{family::Family, gauge::Gauge},
    },
};

/// Maximum number of layers per worker that have metrics. Further layers of a report are left out.
const MAX_LAYERS: u32 = 4096;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LayerLabel {
    worker: u32,
    layer: u32,
}

declare_metrics! {
    #[derive(Debug)]
    struct Gauges {
        imbalance: Family<LayerLabel, Gauge<f64, AtomicU64>>, "worker_expert_imbalance",
            "Tokens of a layer's most chosen expert, divided by the mean of the layer's experts, since the worker's \
             process began: 1 is balance";
    }
}

/// Gauges per worker and layer.
#[derive(Debug)]
pub(super) struct ExpertMetrics {
    gauges: Gauges,
    /// One more than the highest layer index that any worker has reported.
    layers: AtomicU32,
}

impl ExpertMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        Self { gauges: Gauges::register(registry), layers: AtomicU32::default() }
    }

    pub fn take(&self, worker: Rank, loads: &[pb::ExpertLoad]) {
        for load in loads.iter().filter(|load| load.tokens > 0 && load.layer < MAX_LAYERS) {
            let label = LayerLabel { worker: worker.0, layer: load.layer };
            let mean = load.tokens as f64 / f64::from(load.experts);
            self.gauges.imbalance.get_or_create(&label).set(load.most as f64 / mean);
            self.layers.fetch_max(load.layer + 1, Ordering::Relaxed);
        }
    }

    pub fn gone(&self, worker: Rank) {
        for layer in 0..self.layers.load(Ordering::Relaxed) {
            self.gauges.imbalance.remove(&LayerLabel { worker: worker.0, layer });
        }
    }
}
