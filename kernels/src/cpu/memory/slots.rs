//! Slot planes: the state of fixed size of each request.

use std::ops::Range;

use crate::cpu::memory::{Buffer, Element, Shared};
use crate::cpu::threads::ThreadPool;
use crate::{DeviceError, SlotCopy, SlotId};

/// The state of each slot begins at a multiple of this number of bytes: a cache line, so that no two requests share
/// one.
const ALIGNMENT: usize = 64;
/// Number of bytes that one task copies.
const COPIED_AT_ONCE: usize = 1 << 20;
/// The name of a plane in errors.
const SLOT_PLANE: &str = "a slot plane";

/// One slot plane, slot by slot.
struct Plane {
    /// Bytes of a slot's state.
    bytes: usize,
    /// Distance in bytes between the starts of successive slots.
    stride: usize,
    data: Buffer<u8>,
}

impl Plane {
    fn range(&self, slot: SlotId) -> Range<usize> {
        let start = slot.0 as usize * self.stride;
        start..start + self.bytes
    }

    /// Copies between two slots that differ, or fills a slot with zeros if `from` is the null slot.
    fn copy(&mut self, copy: SlotCopy, pool: &mut ThreadPool) -> Result<(), DeviceError> {
        let (from, to, bytes) = (self.range(copy.from), self.range(copy.to), self.bytes);
        let (source, target) = if from.start < to.start {
            let (head, tail) = self.data.split_at_mut(to.start);
            (&head[from.clone()], &mut tail[..bytes])
        } else {
            let (head, tail) = self.data.split_at_mut(from.start);
            (&tail[..bytes], &mut head[to])
        };
        let target = Shared::new(target);
        pool.run(bytes.div_ceil(COPIED_AT_ONCE), |task, _| {
            let first = task * COPIED_AT_ONCE;
            let len = COPIED_AT_ONCE.min(bytes - first);
            // SAFETY: each task accesses only its own range.
            let target = unsafe { target.slice_mut(first, len) };
            match copy.from {
                SlotId::NULL => target.fill(0),
                _ => target.copy_from_slice(&source[first..first + len]),
            }
        })
    }
}

/// A range of the state of every slot in one plane. Each task writes the state of different slots, or a different part
/// of a state.
pub(in crate::cpu) struct SlotStates<'a, T = f32> {
    data: Shared<'a, T>,
    /// Distance in elements between the starts of successive slots.
    stride: usize,
    start: usize,
    len: usize,
}

/// A range of the state of every slot in one plane, to read.
pub(in crate::cpu) struct SlotView<'a, T> {
    data: &'a [T],
    /// Distance in elements between the starts of successive slots.
    stride: usize,
    start: usize,
    len: usize,
}

impl<'a, T> SlotView<'a, T> {
    /// The range of a slot's state. The step has checked the slot.
    pub(in crate::cpu) fn of(&self, slot: SlotId) -> &'a [T] {
        &self.data[slot.0 as usize * self.stride + self.start..][..self.len]
    }
}

impl<T: Element> SlotStates<'_, T> {
    /// Elements `first .. first + len` of a slot's state. The step has checked the slot.
    ///
    /// # Safety
    ///
    /// No two slices that exist at the same time overlap.
    #[allow(clippy::mut_from_ref)] // The safety contract excludes slices that overlap.
    pub(in crate::cpu) unsafe fn part(&self, slot: SlotId, first: usize, len: usize) -> &mut [T] {
        // SAFETY: by the caller's contract, no other slice overlaps this one.
        unsafe { self.data.slice_mut(self.index(slot, first, len), len) }
    }

    /// Elements `first .. first + len` of a slot's state, to read.
    ///
    /// # Safety
    ///
    /// No slice of [`part`](Self::part) that exists at the same time overlaps this one.
    pub(in crate::cpu) unsafe fn read(&self, slot: SlotId, first: usize, len: usize) -> &[T] {
        // SAFETY: by the caller's contract, no slice that allows writes overlaps this one.
        unsafe { self.data.slice(self.index(slot, first, len), len) }
    }

    /// Address of the elements that [`part`](Self::part) returns.
    pub(in crate::cpu) fn pointer(&self, slot: SlotId, first: usize, len: usize) -> *mut T {
        let index = self.index(slot, first, len);
        assert!(index + len <= self.data.len(), "part of a state out of bounds");
        self.data.as_ptr().wrapping_add(index)
    }

    fn index(&self, slot: SlotId, first: usize, len: usize) -> usize {
        assert!(first <= self.len && len <= self.len - first, "part of a state out of bounds");
        slot.0 as usize * self.stride + self.start + first
    }
}

/// All slot planes of a model, with the same number of slots each.
pub(in crate::cpu) struct Slots {
    planes: Vec<Plane>,
    /// Number of slots, including the null slot.
    count: usize,
}

impl Slots {
    /// Allocates `count` slots of `bytes[i]` bytes in plane `i`.
    pub(in crate::cpu) fn zeroed(bytes: &[usize], count: usize) -> Result<Self, DeviceError> {
        let plane = |&bytes: &usize| {
            let stride = bytes.checked_next_multiple_of(ALIGNMENT);
            let data = Buffer::zeroed(stride.and_then(|stride| stride.checked_mul(count)), SLOT_PLANE)?;
            Ok(Plane { bytes, stride: stride.unwrap_or(0), data })
        };
        Ok(Self { planes: bytes.iter().map(plane).collect::<Result<_, DeviceError>>()?, count })
    }

    /// Takes all memory of the slots from the operating system at once.
    pub(in crate::cpu) fn make_resident(&mut self, pool: &mut ThreadPool) -> Result<(), DeviceError> {
        self.planes.iter_mut().try_for_each(|plane| plane.data.make_resident(pool, SLOT_PLANE))
    }

    /// True in a model without slot planes.
    pub(in crate::cpu) fn is_empty(&self) -> bool {
        self.planes.is_empty()
    }

    /// Returns an error for a slot that does not exist. A model without slot planes accepts any slot, because it uses
    /// none.
    pub(in crate::cpu) fn check(&self, slot: SlotId) -> Result<(), DeviceError> {
        if self.is_empty() || (slot.0 as usize) < self.count {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("slot {} of {}", slot.0, self.count)))
    }

    /// Returns an error for copies in a model without slot planes, for slots that do not exist, and for the null slot
    /// as target.
    pub(in crate::cpu) fn check_copies(&self, copies: &[SlotCopy]) -> Result<(), DeviceError> {
        for copy in copies {
            if self.is_empty() || copy.to == SlotId::NULL {
                let planes = self.planes.len();
                return Err(DeviceError::Misuse(format!("{copy:?} in {planes} slot planes")));
            }
            self.check(copy.from)?;
            self.check(copy.to)?;
        }
        Ok(())
    }

    /// Performs copies in order, each on all threads. [`check_copies`](Self::check_copies) has accepted them.
    pub(in crate::cpu) fn copy(
        &mut self,
        copies: &[SlotCopy],
        pool: &mut ThreadPool,
    ) -> Result<(), DeviceError> {
        for copy in copies.iter().filter(|copy| copy.from != copy.to) {
            for plane in &mut self.planes {
                plane.copy(*copy, pool)?;
            }
        }
        Ok(())
    }

    /// The bytes `start..start + len` of a slot's state in one plane.
    pub(in crate::cpu) fn state(
        &mut self,
        plane: usize,
        slot: SlotId,
        start: usize,
        len: usize,
    ) -> Result<&mut [u8], DeviceError> {
        self.check_state(slot)?;
        let count = self.planes.len();
        let state = self.planes.get_mut(plane).and_then(|plane| {
            let range = plane.range(slot);
            plane.data[range].get_mut(start..start.checked_add(len)?)
        });
        let what = || format!("{len} bytes at {start} of slot plane {plane} of {count}");
        state.ok_or_else(|| DeviceError::Misuse(what()))
    }

    /// Returns the f32 states of one layer in several planes, for all slots. Each element of `of` is (plane, layer,
    /// bytes of a layer's state). No plane may occur twice.
    pub(in crate::cpu) fn states<const N: usize>(
        &mut self,
        of: [(usize, usize, usize); N],
    ) -> Result<[SlotStates<'_>; N], DeviceError> {
        self.states_of(of)
    }

    /// Does the same as [`states`](Self::states) for elements of any type.
    pub(in crate::cpu) fn states_of<T: Element, const N: usize>(
        &mut self,
        of: [(usize, usize, usize); N],
    ) -> Result<[SlotStates<'_, T>; N], DeviceError> {
        of.iter().try_for_each(|&(plane, layer, bytes)| self.check_layer::<T>(plane, layer, bytes))?;
        let planes = self.planes.get_disjoint_mut(of.map(|(plane, ..)| plane));
        let planes = planes.map_err(|error| DeviceError::Misuse(format!("slot planes: {error}")))?;
        let mut of = of.into_iter();
        Ok(planes.map(|plane| {
            let (_, layer, bytes) = of.next().unwrap_or_default();
            let (stride, len) = (plane.stride / size_of::<T>(), bytes / size_of::<T>());
            // SAFETY: every bit pattern is an element. The buffer begins at a page and slots at multiples of ALIGNMENT,
            // so no bytes are left over at either end.
            let (_, data, _) = unsafe { plane.data.align_to_mut::<T>() };
            SlotStates { data: Shared::new(data), stride, start: layer * len, len }
        }))
    }

    /// Returns the states of one layer in a plane, for all slots, to read. `bytes` are those of a layer's state.
    pub(in crate::cpu) fn view<T: Element>(
        &self,
        plane: usize,
        layer: usize,
        bytes: usize,
    ) -> Result<SlotView<'_, T>, DeviceError> {
        self.check_layer::<T>(plane, layer, bytes)?;
        let plane =
            self.planes.get(plane).ok_or_else(|| DeviceError::Misuse(format!("slot plane {plane}")))?;
        let (stride, len) = (plane.stride / size_of::<T>(), bytes / size_of::<T>());
        // SAFETY: every bit pattern is an element. The buffer begins at a page and slots at multiples of ALIGNMENT, so
        // no bytes are left over at either end.
        let (_, data, _) = unsafe { plane.data.align_to::<T>() };
        Ok(SlotView { data, stride, start: layer * len, len })
    }

    /// Returns an error unless the slots of a plane hold a layer with this index and `bytes` bytes per layer, which are
    /// whole elements.
    fn check_layer<T: Element>(&self, plane: usize, layer: usize, bytes: usize) -> Result<(), DeviceError> {
        let end = layer.checked_add(1).and_then(|layers| layers.checked_mul(bytes));
        let own = self.planes.get(plane).map_or(0, |plane| plane.bytes);
        if self.planes.len() > plane
            && end.is_some_and(|end| end <= own)
            && bytes.is_multiple_of(size_of::<T>())
        {
            return Ok(());
        }
        let what = format!("layer {layer} of {bytes} bytes in slot plane {plane} of {own} bytes");
        Err(DeviceError::Misuse(what))
    }

    /// Appends a slot's state to `out`, plane by plane.
    pub(in crate::cpu) fn read(&self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.check_state(slot)?;
        for plane in &self.planes {
            out.extend_from_slice(&plane.data[plane.range(slot)]);
        }
        Ok(())
    }

    /// Overwrites a slot's state with bytes that [`read`](Self::read) has read.
    pub(in crate::cpu) fn write(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.check_state(slot)?;
        let (wanted, got) = (self.planes.iter().map(|plane| plane.bytes).sum::<usize>(), data.len());
        if got != wanted {
            return Err(DeviceError::Misuse(format!("{got} bytes for a slot of {wanted}")));
        }
        let mut data = data;
        for plane in &mut self.planes {
            let (own, rest) = data.split_at(plane.bytes);
            let range = plane.range(slot);
            plane.data[range].copy_from_slice(own);
            data = rest;
        }
        Ok(())
    }

    /// Returns an error for the null slot, which has no state, and for a slot that does not exist.
    fn check_state(&self, slot: SlotId) -> Result<(), DeviceError> {
        if slot == SlotId::NULL {
            return Err(DeviceError::Misuse("the state of the null slot".to_owned()));
        }
        self.check(slot)
    }
}

#[cfg(test)]
mod tests;
