//! The rows that a product multiplies, normalised on their way where that is asked for.
//!
//! A norm adds little to the packing of activations: the row is read anyway, and its result is never stored.

use crate::cpu::rowwise::rms_factor;
use crate::cpu::simd::{LANES, Simd};

/// Rows on their way into a product.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Input<'a> {
    /// `[rows, inputs]`.
    pub(in crate::cpu) values: &'a [f32],
    /// The weight, `[inputs]`, and the eps of an RMS norm.
    pub(in crate::cpu) norm: Option<(&'a [f32], f32)>,
}

/// One of them.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct InputRow<'a> {
    values: &'a [f32],
    /// The norm's weight, and what this row's elements are multiplied by before it.
    norm: Option<(&'a [f32], f32)>,
}

impl<'a> Input<'a> {
    /// `R` rows from `first` on.
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
    /// Asks for sixteen elements from `first` on, wherever that is.
    #[inline(always)]
    pub(in crate::cpu) fn prefetch<S: Simd>(&self, s: S, first: usize) {
        s.prefetch(self.values.as_ptr().wrapping_add(first).cast());
    }

    /// Sixteen elements from `first` on; zeros beyond the last.
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
