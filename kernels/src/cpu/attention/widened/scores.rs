//! Scores of queries with panels of sixteen keys.
//!
//! A score is one chain of fused multiply-adds over the head's elements. The order depends on the format of the keys:
//! in bfloat16, the odd element of each pair comes before the even one.

use super::super::kernel::{Block, prefetch};
use super::BLOCK;
use super::panel::half_step;
use crate::cpu::memory::format::{Format, STEP};
use crate::cpu::simd::{LANES, Op, Simd};

/// The operands for the scores of `R` queries with the keys of a block, computed `P` panels at a time.
pub(super) struct Scores<'t, W: Format, const R: usize, const P: usize> {
    /// `[R, head_dim]`.
    pub(super) q: &'t [f32],
    pub(super) block: &'t Block<W::Raw>,
    /// Panels `panels.0 .. panels.1` are computed. At least one of the queries sees a key in each of these panels.
    pub(super) panels: (usize, usize),
    /// `[R, BLOCK]`.
    pub(super) scores: &'t mut [f32],
}

impl<W: Format, const R: usize, const P: usize> Op for Scores<'_, W, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (mut panel, end) = self.panels;
        while panel + P <= end {
            self.panels::<S, P>(s, panel);
            panel += P;
        }
        while const { P > 2 } && panel + 2 <= end {
            self.panels::<S, 2>(s, panel);
            panel += 2;
        }
        while panel < end {
            self.panels::<S, 1>(s, panel);
            panel += 1;
        }
    }
}

impl<W: Format, const R: usize, const P: usize> Scores<'_, W, R, P> {
    #[inline(always)]
    fn panels<S: Simd, const N: usize>(&mut self, s: S, panel: usize) {
        let head_dim = self.q.len() / R;
        assert!(panel + N <= BLOCK / LANES && head_dim * R == self.q.len() && head_dim.is_multiple_of(2));
        let (mut keys, mut next) = ([self.block.keys[panel]; N], [self.block.next_keys[panel]; N]);
        for p in 0..N {
            (keys[p], next[p]) = (self.block.keys[panel + p], self.block.next_keys[panel + p]);
        }
        let mut sums = [[s.splat(0.0); N]; R];
        let mut q = self.q.as_ptr();
        for step in 0..head_dim / 2 {
            for next in next {
                prefetch(s, next.wrapping_add(step * STEP));
            }
            // SAFETY: `Panels::of_head` has checked that the visible panels are in bounds for all elements of a head.
            // `q` holds `R * head_dim` elements, by the assertion.
            unsafe {
                if W::ODD_FIRST {
                    sums = half_step::<S, W, true, R, N>(s, sums, q.add(1), head_dim, keys);
                    sums = half_step::<S, W, false, R, N>(s, sums, q, head_dim, keys);
                } else {
                    sums = half_step::<S, W, false, R, N>(s, sums, q, head_dim, keys);
                    sums = half_step::<S, W, true, R, N>(s, sums, q.add(1), head_dim, keys);
                }
                q = q.add(2);
            }
            for keys in &mut keys {
                *keys = keys.wrapping_add(STEP);
            }
        }
        for (sums, scores) in sums.iter().zip(self.scores.chunks_exact_mut(BLOCK)) {
            for (p, &sum) in sums.iter().enumerate() {
                s.store_some(&mut scores[(panel + p) * LANES..(panel + p + 1) * LANES], sum);
            }
        }
    }
}
