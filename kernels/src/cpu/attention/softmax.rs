//! The online softmax of a block. Scores are scaled by log2(e), so that exponentials are powers of two.

use std::marker::PhantomData;

use super::kernel::Kernel;
use super::sight::Visible;
use crate::cpu::simd::{LANES, Op, Simd};

/// The softmax of up to sixteen queries over a block. It turns each query's visible scores into `2^(score - largest)`,
/// where `largest` is the query's largest score in this block and the blocks before it.
pub(super) struct Softmax<'t, K: Kernel> {
    /// `[queries, BLOCK]`.
    pub(super) scores: &'t mut [f32],
    /// The keys that each query sees.
    pub(super) visible: &'t [Visible; LANES],
    /// The keys that at least one query sees.
    pub(super) any: Visible,
    /// The largest score of each query. Elements beyond the last query belong to other tiles and keep their values.
    pub(super) largest: &'t mut [f32; LANES],
    /// The sum of exponentials of each query.
    pub(super) total: &'t mut [f32],
    /// Per query, the factor by which the sums of earlier blocks are multiplied: 1 if the query sees no key of this
    /// block. Elements beyond the last query are 1.
    pub(super) decay: &'t mut [f32; LANES],
    pub(super) kernel: PhantomData<K>,
}

impl<K: Kernel> Op for Softmax<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for (query, scores) in self.scores.chunks_exact_mut(K::BLOCK).enumerate() {
            lanes[query] = s.largest(largest::<S, K>(s, scores, self.visible[query]));
        }
        let before = s.load_some(self.largest, 0.0);
        let after = s.max(s.load_some(&lanes, 0.0), before);
        // In the block of a query's first key, `decay` is 2^-infinity = 0. For a query that has seen no key, `decay` is
        // 1, so that -infinity is not subtracted from itself.
        let decay = s.less(before, after, exp2(s, s.sub(before, after)), s.splat(1.0));
        s.store_some(self.largest, after);
        s.store_some(self.decay, decay);
        for (query, (scores, total)) in self.scores.chunks_exact_mut(K::BLOCK).zip(self.total).enumerate() {
            let sum = K::weights(s, scores, self.visible[query], self.any, self.largest[query]);
            *total = *total * self.decay[query] + s.sum(sum);
        }
    }
}

/// Returns the largest visible score in each lane, and sets scores that are not visible to -infinity.
#[inline(always)]
fn largest<S: Simd, K: Kernel>(s: S, scores: &mut [f32], visible: Visible) -> S::F {
    let mut block = s.splat(f32::NEG_INFINITY);
    if (visible.first, visible.end) == (0, K::BLOCK) {
        for panel in 0..K::BLOCK / LANES {
            block = s.max(s.load_some(&scores[panel * LANES..(panel + 1) * LANES], 0.0), block);
        }
        return block;
    }
    for panel in visible.first / LANES..visible.end.div_ceil(LANES) {
        let lanes = &mut scores[panel * LANES..(panel + 1) * LANES];
        let masked = mask(s, s.load_some(lanes, 0.0), panel, visible);
        s.store_some(lanes, masked);
        block = s.max(masked, block);
    }
    block
}

/// Returns the weights of the first sixteen scores: `2^(score - largest)`.
#[inline(always)]
pub(super) fn weights_of_panel<S: Simd>(s: S, scores: &[f32], largest: S::F) -> S::F {
    exp2(s, s.sub(s.load_some(&scores[..LANES], 0.0), largest))
}

/// Replaces scores that are not visible with -infinity.
#[inline(always)]
fn mask<S: Simd>(s: S, scores: S::F, panel: usize, visible: Visible) -> S::F {
    const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    let (lane, lowest) = (s.load_some(&LANE, 0.0), s.splat(f32::NEG_INFINITY));
    let first = visible.first as f32 - (panel * LANES) as f32;
    let end = visible.end as f32 - (panel * LANES) as f32;
    s.less(lane, s.splat(first), lowest, s.less(lane, s.splat(end), scores, lowest))
}

/// Returns 2 to the power of `x`, for `x` of at most 0. The error is at most three units in the last place. The result
/// is 0 if `x` is below -126, exactly 1 for 0, and NaN for NaN.
///
/// With `x = n + r`, where `n` is an integer and |r| is at most a half, the result is `2^n * 2^r`. `2^r` is
/// approximated by the minimax polynomial of degree five with the constant term 1, found by Lawson's iteration. The
/// polynomial's relative error is at most 9.1e-8.
#[inline(always)]
pub(super) fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    #[allow(clippy::approx_constant)] // A coefficient of the minimax polynomial, close to ln 2 but not equal.
    const NEARLY_LN_2: f32 = 0.693_147;
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(1.326_472_4e-3);
    for factor in [9.671_513e-3, 5.550_734e-2, 0.240_222_42, NEARLY_LN_2, 1.0] {
        p = s.fma(p, r, s.splat(factor));
    }
    s.scale_by_exp2(p, n, x)
}

#[cfg(test)]
mod tests;
