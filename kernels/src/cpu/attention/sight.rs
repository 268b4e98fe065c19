//! The keys that a query sees.

/// The visibility rule: the range of keys that a query sees.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    pub(super) window: Option<usize>,
}

/// The keys `first .. end` of a block that a query sees, counted from the block's start. If `end <= first`, the query
/// sees no key of the block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Visible {
    pub(super) first: usize,
    pub(super) end: usize,
}

/// The keys of a block that a set of queries sees.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    /// Keys that at least one query sees.
    pub(super) any: Visible,
    /// Keys that all queries see.
    pub(super) common: Visible,
}

impl Sight {
    /// The first key that a query at `position` sees.
    #[inline(always)]
    pub(super) fn first(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Returns which keys of a block a query at `position` sees, counted from the block's start. The block holds `keys`
    /// keys; its first key is at position `start`.
    #[inline(always)]
    pub(super) fn of_block(self, keys: usize, position: usize, start: usize) -> Visible {
        let first = self.first(position).saturating_sub(start).min(keys);
        let end = (position + 1).saturating_sub(start).min(keys);
        Visible { first, end }
    }
}
