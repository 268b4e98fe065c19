//! Scores: queries by panels of sixteen keys.
//!
//! A score is one chain of fused multiply-adds over the head's elements, in the order in which the format of the keys
//! gives them out: an odd one before its even neighbour in bfloat16.

use super::super::format::{Format, STEP};
use super::super::simd::{LANES, Op, Simd};
use super::walk::Block;
use super::{BLOCK, BLOCK_PANELS};

/// Element `at` of the order in which chains run.
#[inline(always)]
pub(super) fn in_chain<W: Format>(at: usize) -> usize {
    if W::ODD_FIRST { at ^ 1 } else { at }
}

/// Scores of `R` queries, `P` panels at a time.
pub(super) struct Scores<'t, W: Format, const R: usize, const P: usize> {
    /// `[head_dim, R]`, elements in the order of [`in_chain`].
    pub(super) q: &'t [f32],
    pub(super) block: &'t Block<W>,
    /// First and end of the panels that some of the queries see.
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
        while panel < end {
            self.panels::<S, 1>(s, panel);
            panel += 1;
        }
    }
}

impl<W: Format, const R: usize, const P: usize> Scores<'_, W, R, P> {
    #[inline(always)]
    fn panels<S: Simd, const N: usize>(&mut self, s: S, panel: usize) {
        let Block { keys, next_keys, .. } = self.block;
        assert!(panel + N <= BLOCK_PANELS && self.q.len().is_multiple_of(2 * R));
        let mut sums = [[s.splat(0.0); N]; R];
        let mut x = self.q.as_ptr();
        for step in 0..self.q.len() / (2 * R) {
            // SAFETY: panels that are seen have been found to be there, for all steps of a head, and so has q by the
            // assertion above.
            unsafe {
                let mut keys_ = [self.block.keys[panel]; N];
                for p in 0..N {
                    prefetch::<S, W>(s, next_keys[panel + p].wrapping_add(step * STEP));
                    keys_[p] = keys[panel + p].add(step * STEP);
                }
                if W::ODD_FIRST {
                    element::<S, W, true, R, N>(s, &mut sums, x, keys_);
                    element::<S, W, false, R, N>(s, &mut sums, x.add(R), keys_);
                } else {
                    element::<S, W, false, R, N>(s, &mut sums, x, keys_);
                    element::<S, W, true, R, N>(s, &mut sums, x.add(R), keys_);
                }
                x = x.add(2 * R);
            }
        }
        for (sums, scores) in sums.iter().zip(self.scores.chunks_exact_mut(BLOCK)) {
            for (p, &sum) in sums.iter().enumerate() {
                s.store_some(&mut scores[(panel + p) * LANES..(panel + p + 1) * LANES], sum);
            }
        }
    }
}

/// One element's share of the scores; `ODD` names which of a step.
///
/// # Safety
///
/// `x` is readable for `R` floats, and each of the keys for a step.
#[inline(always)]
unsafe fn element<S: Simd, W: Format, const ODD: bool, const R: usize, const N: usize>(
    s: S,
    sums: &mut [[S::F; N]; R],
    x: *const f32,
    keys: [*const W::Raw; N],
) {
    for (p, &key) in keys.iter().enumerate() {
        // SAFETY: the caller's contract.
        let key = unsafe { W::load_step::<S, ODD>(s, key) };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's contract.
            let x = s.splat(unsafe { *x.add(r) });
            sums[p] = s.fma(x, key, sums[p]);
        }
    }
}

/// Asks for a step of a panel; only a hint, so any address will do.
#[inline(always)]
fn prefetch<S: Simd, W: Format>(s: S, step: *const W::Raw) {
    const LINE: usize = 64;
    for line in 0..(STEP * size_of::<W::Raw>()).div_ceil(LINE) {
        s.prefetch(step.cast::<u8>().wrapping_add(line * LINE));
    }
}
