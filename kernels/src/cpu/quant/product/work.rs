//! Shared state of the tasks of one group's matrix product.

use super::GroupedProduct;
use crate::cpu::gemm::Epilogue;
use crate::cpu::gemm::input::Input;
use crate::cpu::gemm::tile::Tiling;
use crate::cpu::memory::Shared;
use crate::cpu::sampling::mask::{Masked, RowMasks};
use crate::cpu::simd::{LANES, Simd};

/// State that all tasks of one group's matrix product share.
///
/// Packed activations are stored by tile, and within a tile by chunk.
#[derive(Clone, Copy)]
pub(in crate::cpu::quant) struct Work<'a, K> {
    pub(super) x: Input<'a>,
    pub(super) tiling: Tiling,
    pub(super) activations: &'a Shared<'a, u32>,
    pub(super) kernel: K,
    pub(super) epilogue: Epilogue<'a>,
    /// Memory of the sums between blocks: `out`, or [`Scratch::sums`](super::scratch::Scratch::sums) for a paired
    /// matrix.
    pub(super) sums: &'a Shared<'a, f32>,
    /// Width of a row of `sums`.
    pub(super) width: usize,
    pub(super) out: &'a Shared<'a, f32>,
    /// Index of the thread that runs the task.
    pub(super) thread: usize,
}

impl<K: GroupedProduct> Work<'_, K> {
    /// The sums of one row and one panel.
    ///
    /// # Safety
    ///
    /// (row, panel) belongs to the calling task, and the task holds no other slice of the same row and panel.
    #[allow(clippy::mut_from_ref)] // The caller holds disjoint slices: see `Shared::slice_mut`.
    #[inline(always)]
    pub(super) unsafe fn sums(&self, row: usize, panel: usize) -> &mut [f32] {
        let column = panel * LANES;
        // SAFETY: by the caller's contract, no other slice of this row and panel exists.
        unsafe { self.sums.slice_mut(row * self.width + column, LANES.min(self.width - column)) }
    }

    /// Stores the largest of the sums of one row and one panel. Outputs that pad the panel, and those that
    /// the row's mask forbids, are left out.
    #[inline(always)]
    pub(super) fn store_maximum<S: Simd>(
        &self,
        s: S,
        (maxima, masks): (&Shared<'_, f32>, RowMasks<'_>),
        row: usize,
        panel: usize,
        sum: S::F,
    ) {
        let shape = self.kernel.shape();
        let outputs = LANES.min(shape.outputs - panel * LANES);
        let sum = if outputs < LANES || masks.of(row).is_some() {
            let mut lanes = [0.0; LANES];
            s.store_some(&mut lanes, sum);
            match masks.masked(row, panel * LANES, &lanes[..outputs]) {
                Masked::All => s.load_some(&lanes[..outputs], f32::NEG_INFINITY),
                Masked::Nothing => s.splat(f32::NEG_INFINITY),
                Masked::Some(ref lanes) => s.load_some(lanes, f32::NEG_INFINITY),
            }
        } else {
            sum
        };
        // SAFETY: each (row, panel) belongs to one task, so no other task accesses this maximum.
        unsafe { maxima.slice_mut(row * shape.panels() + panel, 1)[0] = s.largest(sum) };
    }
}
