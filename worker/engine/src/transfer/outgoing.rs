//! Requests that are prefilled here and decoded elsewhere.

use std::{sync::Arc, time::Instant};

use tutti_scheduler::{OutputToken, PageId, SlotId};
use tutti_transfer::Extent;

/// A request that is prefilled here and decoded elsewhere.
pub(super) struct Outgoing {
    pub extent: Extent,
    pub table: Arc<[PageId]>,
    /// Number of tokens whose keys and values are in the pages of `table`.
    pub computed: usize,
    /// Number of leading pages that need no further copy, because they are copied for the connector or the receiver
    /// already has them.
    pub sent: usize,
    /// First sampled token and the time of its commit; `None` until the prefill is done.
    pub first: Option<(OutputToken, Instant)>,
    /// The request's slot, which holds its state once the prefill is done.
    pub slot: SlotId,
    /// True once the slot is copied for the connector.
    pub slot_sent: bool,
    /// True while the scheduler leaves the request out of steps, because the connector has no room for its pages.
    pub held_back: bool,
}

impl Outgoing {
    /// Creates the entry of a request that has not run in any step. The receiver already has the request's first `sent`
    /// pages.
    pub fn new(sent: usize, extent: Extent) -> Self {
        let (table, slot) = (Arc::from([]), SlotId::NULL);
        Self { extent, table, computed: 0, sent, first: None, slot, slot_sent: false, held_back: false }
    }

    /// Number of pages whose content is final.
    pub fn whole_pages(&self, page_tokens: usize) -> usize {
        match self.first {
            Some(_) => self.computed.div_ceil(page_tokens),
            None => self.computed / page_tokens,
        }
    }
}
