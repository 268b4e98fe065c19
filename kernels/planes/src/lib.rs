//! The units of a request's memory on a device: pages and slots.
//!
//! The scheduler assigns units to requests, the engine passes them to a model, and a device uses them as indices into
//! its planes. All three use these types, so that a block table goes from the scheduler to the device without a copy.

/// A page of every paged plane (such as keys and values), by its index in the pool. Its data is on the device; the
/// scheduler never reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// The null page. Only the block tables of rows that pad a step contain it, and devices store nothing in it.
    pub const NULL: Self = Self(0);
}

/// A slot, by its index in the pool: the fixed-size state of one request in every slot plane, and the request's index
/// on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

impl SlotId {
    /// The null slot. Rows that only pad a step have it, no request holds it, and as the source of a [`SlotCopy`] it
    /// stands for the initial state, which is all zeros.
    pub const NULL: Self = Self(0);
}

/// A copy of a slot's state in every slot plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCopy {
    /// Slot to read. The null slot sets `to` to the initial state.
    pub from: SlotId,
    /// Slot to overwrite, not the null slot.
    pub to: SlotId,
}
