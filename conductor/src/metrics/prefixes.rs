//! Metrics of placement by cached prefix.

use tutti_runtime::metrics::{
    Metrics,
    metrics::{counter::Counter, gauge::Gauge},
};

use crate::cluster::IndexSize;

/// Size of the prefix index, and its hits.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefixMetrics {
    entries: Gauge,
    bytes: Gauge,
    blocks: Counter,
    hits: Counter,
}

impl PrefixMetrics {
    pub fn register(&self, metrics: &Metrics) {
        metrics.register(|r| {
            let help = "Entries in the index of prompts by worker";
            r.register("prefix_index_entries", help, self.entries.clone());
            r.register("prefix_index_bytes", "Bytes of the index of prompts by worker", self.bytes.clone());
            let help = "Prompt blocks of requests for which several workers were eligible";
            r.register("placed_blocks", help, self.blocks.clone());
            let help = "Prompt blocks sent to a worker that had received them before";
            r.register("placed_hit_blocks", help, self.hits.clone());
        });
    }

    pub fn placed(&self, blocks: usize, hits: u64, size: IndexSize) {
        self.blocks.inc_by(blocks as u64);
        self.hits.inc_by(hits);
        self.entries.set(size.entries as i64);
        self.bytes.set(size.bytes as i64);
    }
}
