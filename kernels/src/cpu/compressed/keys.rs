//! Keys of the window and entries, widened to f32.

use crate::cpu::memory::entries::EntryLayout;
use crate::cpu::memory::format::{Bf16, F16, F32, Format, Stored, with_format};
use crate::cpu::memory::slots::{SlotView, Slots};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::step::Row;
use crate::{DeviceError, PageId, WeightType, WindowShape};

/// The rings of all slots in one layer.
pub(in crate::cpu) enum Ring<'a> {
    F32(SlotView<'a, f32>),
    F16(SlotView<'a, u16>),
    Bf16(SlotView<'a, u16>),
}

impl<'a> Ring<'a> {
    pub(in crate::cpu) fn new(
        slots: &'a Slots,
        shape: &WindowShape,
        plane: usize,
        layer: usize,
    ) -> Result<Self, DeviceError> {
        let bytes = shape.ring_bytes();
        Ok(match shape.dtype {
            WeightType::F32 => Self::F32(slots.view(plane, layer, bytes)?),
            WeightType::F16 => Self::F16(slots.view(plane, layer, bytes)?),
            WeightType::Bf16 => Self::Bf16(slots.view(plane, layer, bytes)?),
        })
    }
}

/// The keys of the window of a layer.
pub(in crate::cpu) struct WindowKeys<'a> {
    pub(in crate::cpu) ring: Ring<'a>,
    /// Keys of the step's tokens, `[tokens, head_dim]`.
    pub(in crate::cpu) kv: &'a [f32],
    pub(in crate::cpu) head_dim: usize,
    /// Number of keys of a ring.
    pub(in crate::cpu) window: usize,
}

impl WindowKeys<'_> {
    /// Reads the key of the token at `position` of a row's request. Keys of the row's own tokens are not in the ring
    /// yet, and are rounded as the ring rounds them.
    #[inline(always)]
    pub(super) fn read<S: Simd>(&self, s: S, row: &Row, position: usize, to: &mut [f32]) {
        let head_dim = self.head_dim;
        if position >= row.start {
            let token = row.first_token + position - row.start;
            let from = &self.kv[token * head_dim..][..head_dim];
            match &self.ring {
                Ring::F32(_) => to.copy_from_slice(from),
                Ring::F16(_) => round::<F16>(from, to),
                Ring::Bf16(_) => round::<Bf16>(from, to),
            }
            return;
        }
        let index = position % self.window * head_dim;
        let elements = index..index + head_dim;
        match &self.ring {
            Ring::F32(ring) => widen::<S, F32>(s, &ring.of(row.slot)[elements], to),
            Ring::F16(ring) => widen::<S, F16>(s, &ring.of(row.slot)[elements], to),
            Ring::Bf16(ring) => widen::<S, Bf16>(s, &ring.of(row.slot)[elements], to),
        }
    }
}

/// The entries of one request in one layer.
#[derive(Clone, Copy)]
pub(super) struct Entries<'a> {
    pub(super) data: &'a Stored,
    pub(super) layout: EntryLayout,
    pub(super) table: &'a [PageId],
}

impl Entries<'_> {
    /// Reads an entry.
    #[inline(always)]
    pub(super) fn read<S: Simd>(&self, s: S, entry: usize, to: &mut [f32]) {
        let elements = self.layout.entry(self.table, entry);
        with_format!(self.data, Fmt, data => widen::<S, Fmt>(s, &data[elements], to));
    }
}

/// Rounds numbers to a format.
#[inline(always)]
fn round<W: Format>(from: &[f32], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, &x)| *to = W::widen(W::narrow(x)));
}

/// Converts elements to f32.
#[inline(always)]
fn widen<S: Simd, W: Format>(s: S, from: &[W::Raw], to: &mut [f32]) {
    let (blocks, rest) = from.as_chunks::<LANES>();
    let (to_blocks, to_rest) = to.as_chunks_mut::<LANES>();
    for (to, from) in to_blocks.iter_mut().zip(blocks) {
        // SAFETY: a block holds sixteen elements.
        s.store_some(to, unsafe { W::load_row(s, from.as_ptr()) });
    }
    to_rest.iter_mut().zip(rest).for_each(|(to, &x)| *to = W::widen(x));
}
