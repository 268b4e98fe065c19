//! The addresses of a block's panels, and the order in which the next block is prefetched.

use super::kernel::{Block, MOST_PANELS};
use super::sight::Visible;
use crate::PageId;
use crate::cpu::memory::kv::Layout;
use crate::cpu::simd::LANES;

/// Distances in a page, in elements.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    /// Distance from a panel of keys to the panels that hold the same tokens' values.
    values: usize,
    /// Distance from a head's panel to the same panel of the next head.
    head: usize,
    /// Length of a panel of keys. The panels that hold the same tokens' values have the same total length.
    panel: usize,
}

impl Strides {
    pub(super) fn new(page_tokens: usize, head_dim: usize) -> Self {
        Self { values: page_tokens * head_dim, head: 2 * page_tokens * head_dim, panel: LANES * head_dim }
    }

    /// Number of elements per panel of keys, and of the panels of values of the same tokens.
    pub(super) fn panel(self) -> usize {
        self.panel
    }
}

/// The panels of a block that a tile sees.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    /// Index in the pool of each panel of keys, for the first kv head. The entries of panels outside `seen` are not
    /// used.
    keys: [usize; MOST_PANELS],
    /// The panels that the tile sees: `seen.0 .. seen.1`.
    seen: (usize, usize),
}

impl Panels {
    /// The panels of the block at position `start` that hold the keys `seen` of the block.
    #[inline(always)]
    pub(super) fn new(
        layout: &Layout,
        table: &[PageId],
        kv_head: usize,
        start: usize,
        seen: Visible,
    ) -> Self {
        let seen = (seen.first / LANES, seen.end.div_ceil(LANES));
        let mut keys = [0; MOST_PANELS];
        for (panel, keys) in keys.iter_mut().enumerate().take(seen.1).skip(seen.0) {
            *keys = layout.key_panel(table, kv_head, start + panel * LANES);
        }
        Self { keys, seen }
    }

    /// The panels that the tile sees: `.0 .. .1`.
    pub(super) fn seen(&self) -> (usize, usize) {
        self.seen
    }

    /// Returns the addresses of one head's panels, and the addresses to prefetch while the head is computed. `head` is
    /// counted from the piece's first head.
    #[inline(always)]
    pub(super) fn of_head<T>(
        &self,
        data: &[T],
        strides: Strides,
        head: usize,
        prefetch: &mut Prefetch,
    ) -> Block<T> {
        let nothing = [data.as_ptr(); MOST_PANELS];
        let mut block = Block { keys: nothing, values: nothing, next_keys: nothing, next_values: nothing };
        for panel in self.seen.0..self.seen.1 {
            let keys = self.keys[panel] + head * strides.head;
            let values = keys + strides.values;
            block.keys[panel] = data[keys..keys + strides.panel].as_ptr();
            block.values[panel] = data[values..values + strides.panel].as_ptr();
        }
        let at = |index: usize| data.as_ptr().wrapping_add(index);
        if prefetch.heads == 1 {
            let next = &prefetch.panels;
            for panel in self.seen.0..self.seen.1 {
                let keys = if (next.seen.0..next.seen.1).contains(&panel) { next } else { self }.keys[panel];
                (block.next_keys[panel], block.next_values[panel]) = (at(keys), at(keys + strides.values));
            }
            return block;
        }
        for panel in self.seen.0..self.seen.1 {
            block.next_keys[panel] = prefetch.next(strides).map_or(block.keys[panel], at);
        }
        for panel in self.seen.0..self.seen.1 {
            block.next_values[panel] = prefetch.next(strides).map_or(block.values[panel], at);
        }
        block
    }
}

/// The part of the next block that is not yet prefetched. A piece of several heads prefetches in the order of memory:
/// page by page, head by head within a page, and keys before values.
pub(super) struct Prefetch {
    panels: Panels,
    /// Number of heads of the piece.
    heads: usize,
    panel: usize,
    head: usize,
    values: bool,
}

impl Prefetch {
    /// Returns the state in which nothing of the block is prefetched yet.
    #[inline(always)]
    pub(super) fn new(panels: Panels, heads: usize) -> Self {
        Self { panels, heads, panel: panels.seen.0, head: 0, values: false }
    }

    /// Returns the index of the next panel of keys or values; `None` after the last one.
    #[inline(always)]
    fn next(&mut self, strides: Strides) -> Option<usize> {
        if self.panel >= self.panels.seen.1 {
            return None;
        }
        let keys = self.panels.keys[self.panel] + self.head * strides.head;
        let index = if self.values { keys + strides.values } else { keys };
        if self.values {
            self.head += 1;
            if self.head == self.heads {
                (self.head, self.panel) = (0, self.panel + 1);
            }
        }
        self.values = !self.values;
        Some(index)
    }
}

#[cfg(test)]
mod tests;
