//! The weighted sum of a block's values.
//!
//! Each element of a sum is first multiplied by the block's decay. Then the weighted values of the block's keys are
//! added in order.

use std::ops::Range;

use super::super::kernel::{Block, prefetch};
use super::super::sight::Visible;
use super::BLOCK;
use super::panel::half_step;
use crate::cpu::memory::format::{Format, STEP};
use crate::cpu::memory::kv::VALUE_PANEL;
use crate::cpu::simd::{LANES, Op, Simd};

/// Adds the values of the `visible` keys of a block to the sums of `R` queries, `P` times sixteen elements at a time.
pub(super) struct AddValues<'t, W: Format, const R: usize, const P: usize> {
    pub(super) block: &'t Block<W::Raw>,
    pub(super) visible: Visible,
    pub(super) head_dim: usize,
    /// `[R, BLOCK]`.
    pub(super) weights: &'t [f32],
    pub(super) decay: &'t [f32],
    /// `[R, head_dim]`.
    pub(super) sums: &'t mut [f32],
}

impl<W: Format, const R: usize, const P: usize> Op for AddValues<'_, W, R, P> {
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

impl<W: Format, const R: usize, const P: usize> AddValues<'_, W, R, P> {
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
        let mut first = visible.first;
        while first < visible.end {
            let end = visible.end.min((first / LANES + 1) * LANES);
            sums = self.keys(s, sums, first..end, column);
            first = end;
        }
        for (r, sums) in sums.iter().enumerate() {
            let to = &mut self.sums[r * head_dim + column..][..N * LANES];
            for (p, &sum) in sums.iter().enumerate() {
                s.store_some(&mut to[p * LANES..(p + 1) * LANES], sum);
            }
        }
    }

    /// Adds the weighted values of `keys`, which all belong to one panel.
    #[inline(always)]
    fn keys<S: Simd, const N: usize>(
        &self,
        s: S,
        mut sums: [[S::F; N]; R],
        keys: Range<usize>,
        column: usize,
    ) -> [[S::F; N]; R] {
        let panel = keys.start / LANES;
        let at = column / LANES * VALUE_PANEL + keys.start % LANES / 2 * STEP;
        let (mut panels, mut next) = ([self.block.values[panel]; N], [self.block.next_values[panel]; N]);
        for p in 0..N {
            panels[p] = panels[p].wrapping_add(at + p * VALUE_PANEL);
            next[p] = next[p].wrapping_add(at + p * VALUE_PANEL);
        }
        // SAFETY: `weights` holds `R` rows of `BLOCK` weights, by the assertion in `columns`. `Panels::of_head` has
        // checked that the visible panels are in bounds for all elements of a head.
        unsafe {
            let mut weights = self.weights.as_ptr().add(keys.start);
            let mut left = keys.len();
            if keys.start % 2 == 1 {
                sums = half_step::<S, W, true, R, N>(s, sums, weights, BLOCK, panels);
                weights = weights.add(1);
                panels = later(panels);
                left -= 1;
            }
            for _ in 0..left / 2 {
                for &next in &next {
                    prefetch(s, next);
                }
                sums = half_step::<S, W, false, R, N>(s, sums, weights, BLOCK, panels);
                sums = half_step::<S, W, true, R, N>(s, sums, weights.add(1), BLOCK, panels);
                weights = weights.add(2);
                (panels, next) = (later(panels), later(next));
            }
            if left % 2 == 1 {
                sums = half_step::<S, W, false, R, N>(s, sums, weights, BLOCK, panels);
            }
        }
        sums
    }
}

/// Returns the addresses of panels, advanced by one step.
#[inline(always)]
fn later<T, const N: usize>(mut panels: [*const T; N]) -> [*const T; N] {
    for panel in &mut panels {
        *panel = panel.wrapping_add(STEP);
    }
    panels
}
