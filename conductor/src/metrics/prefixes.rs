//! What the conductor counts of prompts that it sends where their beginnings are.

use tutti_runtime::metrics::{
    Metrics,
    metrics::{counter::Counter, gauge::Gauge},
};

/// See the module.
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
            let help = "Pieces in the index of which prompts went to which workers";
            r.register("prefix_index_entries", help, self.entries.clone());
            r.register("prefix_index_bytes", "What that index takes", self.bytes.clone());
            let help = "Prompt blocks of requests, or parts of them, that were sent to one of several groups";
            r.register("placed_blocks", help, self.blocks.clone());
            let help = "Of these, blocks that were sent to the same worker before";
            r.register("placed_hit_blocks", help, self.hits.clone());
        });
    }

    pub fn placed(&self, blocks: usize, hits: u64, (entries, bytes): (usize, usize)) {
        self.blocks.inc_by(blocks as u64);
        self.hits.inc_by(hits);
        self.entries.set(entries as i64);
        self.bytes.set(bytes as i64);
    }
}
