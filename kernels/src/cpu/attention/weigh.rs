//! The weighted sum of a block's values.
//!
//! An element of a sum is multiplied with the decay of the block, then takes in the block's keys in their order.

use super::super::format::Format;
use super::super::simd::{LANES, Op, Simd};
use super::walk::Block;
use super::{BLOCK, Visible};

/// Sums of `R` queries that see the same keys of a block, `P` times sixteen elements at a time.
pub(super) struct Weigh<'t, W: Format, const R: usize, const P: usize> {
    pub(super) block: &'t Block<W>,
    pub(super) visible: Visible,
    pub(super) head_dim: usize,
    /// `[R, BLOCK]`.
    pub(super) weights: &'t [f32],
    pub(super) decay: &'t [f32],
    /// `[R, head_dim]`.
    pub(super) sums: &'t mut [f32],
}

impl<W: Format, const R: usize, const P: usize> Op for Weigh<'_, W, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut column = 0;
        while column + P * LANES <= self.head_dim {
            self.columns::<S, P>(s, column);
            column += P * LANES;
        }
        while column < self.head_dim {
            self.columns::<S, 1>(s, column);
            column += LANES;
        }
    }
}

impl<W: Format, const R: usize, const P: usize> Weigh<'_, W, R, P> {
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, s: S, column: usize) {
        let (head_dim, visible) = (self.head_dim, self.visible);
        assert!(visible.end <= BLOCK && self.weights.len() == R * BLOCK);
        assert!(column + N * LANES <= head_dim && self.sums.len() == R * head_dim);
        let mut sums = [[s.splat(0.0); N]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            let decay = s.splat(self.decay[r]);
            let from = &self.sums[r * head_dim + column..][..N * LANES];
            for (p, sum) in sums.iter_mut().enumerate() {
                *sum = s.mul(s.load_some(&from[p * LANES..], 0.0), decay);
            }
        }
        let mut key = visible.first;
        while key < visible.end {
            let (panel, end) = (key / LANES, visible.end.min((key / LANES + 1) * LANES));
            let offset = key % LANES * head_dim + column;
            // Of a panel that is seen, so that all its values are there.
            let mut values = self.block.values[panel].wrapping_add(offset);
            let mut next = self.block.next_values[panel].wrapping_add(offset);
            let mut weights = self.weights[key..].as_ptr();
            for _ in key..end {
                s.prefetch(next.cast());
                for p in 0..N {
                    // SAFETY: sixteen values of a key that is seen, within its `head_dim`.
                    let value = unsafe { W::load_row(s, values.add(p * LANES)) };
                    for (r, sums) in sums.iter_mut().enumerate() {
                        // SAFETY: by the assertions above, `R` rows of `BLOCK` weights.
                        let weight = s.splat(unsafe { *weights.wrapping_add(r * BLOCK) });
                        sums[p] = s.fma(weight, value, sums[p]);
                    }
                }
                values = values.wrapping_add(head_dim);
                next = next.wrapping_add(head_dim);
                weights = weights.wrapping_add(1);
            }
            key = end;
        }
        for (r, sums) in sums.iter().enumerate() {
            let to = &mut self.sums[r * head_dim + column..][..N * LANES];
            for (p, &sum) in sums.iter().enumerate() {
                s.store_some(&mut to[p * LANES..(p + 1) * LANES], sum);
            }
        }
    }
}
