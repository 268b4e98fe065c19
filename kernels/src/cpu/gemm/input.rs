//! The input rows of a matrix product, with an optional RMS norm that is applied as the rows are read.
//!
//! Applying the norm while packing reads the rows costs little. The normalised row is never stored.

use crate::cpu::rowwise::rms_factor;
use crate::cpu::simd::{LANES, Simd};

/// The input of a matrix product.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Input<'a> {
    /// `[rows, inputs]`.
    pub(in crate::cpu) values: &'a [f32],
    /// The RMS norm's weight, `[inputs]`, and its eps.
    pub(in crate::cpu) norm: Option<(&'a [f32], f32)>,
}

#[derive(Clone, Copy)]
pub(in crate::cpu) struct InputRow<'a> {
    values: &'a [f32],
    /// The norm's weight, and the row's normalisation factor. The factor is applied first.
    norm: Option<(&'a [f32], f32)>,
}

impl<'a> Input<'a> {
    /// Returns `R` rows from `first` on, with their normalisation factors.
    #[inline(always)]
    pub(in crate::cpu) fn rows<S: Simd, const R: usize>(
        &self,
        s: S,
        first: usize,
        inputs: usize,
    ) -> [InputRow<'a>; R] {
        let mut rows = [InputRow { values: &[], norm: None }; R];
        for (index, row) in rows.iter_mut().enumerate() {
            row.values = &self.values[(first + index) * inputs..][..inputs];
            if let Some((weight, eps)) = self.norm {
                row.norm = Some((&weight[..inputs], rms_factor(s, row.values, eps)));
            }
        }
        rows
    }
}

impl InputRow<'_> {
    /// Prefetches sixteen elements from `first` on. `first` may be out of range.
    #[inline(always)]
    pub(in crate::cpu) fn prefetch<S: Simd>(&self, s: S, first: usize) {
        s.prefetch(self.values.as_ptr().wrapping_add(first).cast());
    }

    /// Loads sixteen elements from `first` on, normalised. Elements beyond the last are zero.
    #[inline(always)]
    pub(in crate::cpu) fn load<S: Simd>(&self, s: S, first: usize) -> S::F {
        let end = self.values.len().min(first + LANES);
        let first = first.min(end);
        let x = s.load_some(&self.values[first..end], 0.0);
        match self.norm {
            Some((weight, factor)) => s.mul(s.mul(x, s.splat(factor)), s.load_some(&weight[first..end], 0.0)),
            None => x,
        }
    }
}
