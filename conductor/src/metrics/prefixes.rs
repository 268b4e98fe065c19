//! Metrics of placement by cached prefix.

use tutti_runtime::{
    declare_metrics,
    metrics::metrics::{counter::Counter, gauge::Gauge},
    prefix_index::IndexSize,
};

use super::ConductorMetrics;

declare_metrics! {
    /// Size of the prefix index, and its hits.
    #[derive(Debug)]
    pub(super) struct PrefixMetrics {
        entries: Gauge, "prefix_index_entries", "Entries in the index of prompts by worker";
        bytes: Gauge, "prefix_index_bytes", "Bytes of the index of prompts by worker";
        blocks: Counter, "placed_blocks", "Prompt blocks of requests for which several workers were eligible";
        hits: Counter, "placed_hit_blocks", "Prompt blocks sent to a worker that had received them before";
    }
}

impl ConductorMetrics {
    /// Counts a placement of a prompt. The prompt has `blocks` indexable blocks, of which the worker had received
    /// `hits` before.
    pub(crate) fn placed(&self, blocks: usize, hits: u64, size: IndexSize) {
        self.prefixes.blocks.inc_by(blocks as u64);
        self.prefixes.hits.inc_by(hits);
        self.prefixes.entries.set(size.entries as i64);
        self.prefixes.bytes.set(size.bytes as i64);
    }
}
