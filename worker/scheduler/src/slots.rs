//! Slots: a fixed number of bytes of state per request, and copies between them.

/// A slot, by its index in the pool. Its state is on the device; the scheduler never reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

impl SlotId {
    /// The null slot: it holds the initial state, which is all zeros, and no request holds it.
    pub const NULL: Self = Self(0);
}

/// A copy of one slot's state to another slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// The slot to read. [`SlotId::NULL`] sets `to` to the initial state.
    pub from: SlotId,
    /// The slot to overwrite.
    pub to: SlotId,
}
