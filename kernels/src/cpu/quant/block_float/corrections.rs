//! The exact values of the weights that block floating point rounds, for look-ups in a table of embeddings that is also
//! the LM head.
//!
//! A look-up returns the checkpoint's weights on every instruction path. The panels of such a table are in block
//! floating point for its products, so the small weights of a BFP block lack low bits in the panels. A second copy of
//! the table in bfloat16 would take two bytes per weight. [`Corrections`] take one bit per weight, which marks rounded
//! weights, and two bytes per rounded weight. About 6 % of normally distributed weights are rounded.

use std::fs::File;

use super::{BFP_BLOCK, round_weights};
use crate::DeviceError;
use crate::cpu::memory::fused_matrices::{FusedMatrices, Shape};
use crate::cpu::memory::{Buffer, Shared};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd, from_bf16};
use crate::cpu::threads::pool::ThreadPool;

/// The name of the memory in errors.
const WHAT: &str = "the corrections of a table of embeddings";

/// Exact values of those weights of an embedding table that its block floating point panels only approximate.
pub(in crate::cpu) struct Corrections {
    marks: Marks,
    /// The marked weights in bfloat16, row by row.
    values: Buffer<u16>,
}

/// The positions of the weights that were rounded.
///
/// Each row of the table has one word with the index of the row's first value in `Corrections::values`. One word per
/// BFP block follows, with one bit per weight.
pub(in crate::cpu) struct Marks {
    words: Buffer<u64>,
    /// Number of words per row.
    stride: usize,
}

impl Corrections {
    /// Finds the corrections of `source`, whose matrices are not paired.
    pub(in crate::cpu) fn pack(
        path: Path,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Self, DeviceError> {
        let marks = Marks::find(path, pool, source)?;
        let values = marks.values(pool, source)?;
        Ok(Self { marks, values })
    }

    /// Combines marks with their values.
    pub(in crate::cpu) fn new(marks: Marks, values: Buffer<u16>) -> Self {
        Self { marks, values }
    }

    /// Size in bytes.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        self.marks.bytes().len() + self.values.bytes().len()
    }

    /// Replaces the rounded weights in `out`, a row that was read from the panels, with their exact values.
    pub(in crate::cpu) fn apply(&self, output: usize, out: &mut [f32]) {
        let (first, masks) = self.marks.row(output);
        // A damaged file of packed weights can have any index.
        let mut values = self.values.get(first..).unwrap_or_default().iter();
        for (mask, block) in masks.iter().zip(out.chunks_mut(BFP_BLOCK)) {
            for (index, &value) in positions(*mask).zip(&mut values) {
                if let Some(weight) = block.get_mut(index) {
                    *weight = from_bf16(value);
                }
            }
        }
    }
}

impl Marks {
    /// Size in bytes of the marks of a table of this shape; `None` if it overflows.
    pub(in crate::cpu) fn len(shape: Shape) -> Option<usize> {
        Self::words(shape)?.checked_mul(size_of::<u64>())
    }

    fn words(shape: Shape) -> Option<usize> {
        shape.outputs.checked_mul(Self::stride(shape))
    }

    fn stride(shape: Shape) -> usize {
        1 + shape.inputs.div_ceil(BFP_BLOCK)
    }

    /// Marks the weights of `source` that block floating point changes.
    pub(in crate::cpu) fn find(
        path: Path,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Self, DeviceError> {
        let (shape, stride) = (source.shape, Self::stride(source.shape));
        let mut words = Buffer::zeroed(Self::words(shape), WHAT)?;
        let shared = Shared::new(&mut words);
        pool.run(shape.panels(), |panel, _| {
            for (lane, row) in source.rows(panel).into_iter().flatten().enumerate() {
                // SAFETY: each row belongs to one panel, and each panel to one task, so no other task accesses the
                // row's words.
                let words = unsafe { shared.slice_mut((panel * LANES + lane) * stride, stride) };
                path.run(MarkRow { row: row.as_chunks::<2>().0, masks: &mut words[1..] });
            }
        })?;
        let mut next = 0;
        for row in words.chunks_mut(stride) {
            row[0] = next;
            next += row[1..].iter().map(|mask| u64::from(mask.count_ones())).sum::<u64>();
        }
        Ok(Self { words, stride })
    }

    /// Maps the marks of a table: the [`Self::len`] bytes of `file` from `from` on.
    pub(in crate::cpu) fn mapped(file: &File, from: u64, shape: Shape) -> Result<Self, DeviceError> {
        let words = Buffer::mapped(file, from, Self::words(shape), WHAT)?;
        Ok(Self { words, stride: Self::stride(shape) })
    }

    /// The bytes of the marks.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        self.words.bytes()
    }

    /// Number of marked weights; `None` if it overflows, which only happens with a damaged file of packed weights.
    pub(in crate::cpu) fn count(&self) -> Option<usize> {
        let Some(last) = (self.words.len() / self.stride).checked_sub(1) else { return Some(0) };
        let (first, masks) = self.row(last);
        first.checked_add(masks.iter().map(|mask| mask.count_ones() as usize).sum())
    }

    /// Copies the marked weights of `source`, row by row.
    pub(in crate::cpu) fn values(
        &self,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Buffer<u16>, DeviceError> {
        let mut values = Buffer::zeroed(self.count(), WHAT)?;
        let shared = Shared::new(&mut values);
        pool.run(source.shape.panels(), |panel, _| {
            for (lane, row) in source.rows(panel).into_iter().flatten().enumerate() {
                let (first, masks) = self.row(panel * LANES + lane);
                let count = masks.iter().map(|mask| mask.count_ones() as usize).sum();
                // SAFETY: the values of each row follow those of the row before, each row belongs to one panel, and
                // each panel to one task.
                let mut values = unsafe { shared.slice_mut(first, count) }.iter_mut();
                for (mask, block) in masks.iter().zip(row.as_chunks::<2>().0.chunks(BFP_BLOCK)) {
                    for (index, value) in positions(*mask).zip(&mut values) {
                        *value = u16::from_le_bytes(block[index]);
                    }
                }
            }
        })?;
        Ok(values)
    }

    /// Maps the values that belong to the marks from `file`. They take two bytes each and start at offset `from`.
    pub(in crate::cpu) fn mapped_values(&self, file: &File, from: u64) -> Result<Buffer<u16>, DeviceError> {
        match self.count() {
            Some(0) => Buffer::zeroed(0, WHAT),
            count => Buffer::mapped(file, from, count, WHAT),
        }
    }

    /// Index of a row's first value, and the row's masks.
    fn row(&self, output: usize) -> (usize, &[u64]) {
        let words = &self.words[output * self.stride..][..self.stride];
        (words[0] as usize, &words[1..])
    }
}

/// Positions of the bits that are set, in ascending order.
fn positions(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let position = (mask != 0).then(|| mask.trailing_zeros() as usize);
        mask &= mask.wrapping_sub(1);
        position
    })
}

/// Marks the weights of one bfloat16 row that block floating point rounds.
struct MarkRow<'a> {
    row: &'a [[u8; 2]],
    masks: &'a mut [u64],
}

impl Op for MarkRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (mask, block) in self.masks.iter_mut().zip(self.row.chunks(BFP_BLOCK)) {
            let mut exact = [0.0; BFP_BLOCK];
            for (exact, raw) in exact.iter_mut().zip(block) {
                *exact = from_bf16(u16::from_le_bytes(*raw));
            }
            let mut held = exact;
            round_weights(&mut held);
            // Only weights of the row are marked. The zeros that pad the row's last block may differ, too, because NaN
            // and infinities change all numbers of their BFP block.
            for (index, (exact, held)) in exact.iter().zip(&held).enumerate().take(block.len()) {
                // The bits are compared, because zeros have signs. A NaN never stays the same.
                let differs = exact.to_bits() != held.to_bits() || exact.is_nan();
                *mask |= u64::from(differs) << index;
            }
        }
    }
}

#[cfg(test)]
mod tests;
