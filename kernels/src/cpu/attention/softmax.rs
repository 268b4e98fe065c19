//! Scores of a block become exponentials. Scores are in units of log 2, so that these are powers of two.

use super::super::simd::{LANES, Simd};
use super::{BLOCK, BLOCK_PANELS, Visible};

/// What [`softmax`] finds out about a query.
pub(super) struct Moved {
    pub(super) largest: f32,
    pub(super) total: f32,
    /// What sums of earlier blocks are to be multiplied with.
    pub(super) decay: f32,
}

/// Turns the visible ones of a query's scores into `2^(score - largest)`, where `largest` is the largest of them and of
/// those before, and moves the maximum and the total on.
#[inline(always)]
pub(super) fn softmax<S: Simd>(
    s: S,
    scores: &mut [f32; BLOCK],
    visible: Visible,
    before: f32,
    total: f32,
) -> Moved {
    let (panels, end) = (visible.first / LANES, visible.end.div_ceil(LANES));
    if (visible.first, visible.end) == (0, BLOCK) {
        // The same as below, in registers.
        let mut lanes = [s.splat(0.0); BLOCK_PANELS];
        let mut block = s.splat(f32::NEG_INFINITY);
        for (panel, lanes) in lanes.iter_mut().enumerate() {
            *lanes = s.load_some(&scores[panel * LANES..], 0.0);
            block = s.max(*lanes, block);
        }
        let largest = before.max(s.largest(block));
        let mut sum = s.splat(0.0);
        for (panel, &lanes) in lanes.iter().enumerate() {
            let weight = exp2(s, s.sub(lanes, s.splat(largest)));
            s.store_some(&mut scores[panel * LANES..(panel + 1) * LANES], weight);
            sum = s.add(sum, weight);
        }
        return moved(s, before, largest, total, sum);
    }
    let lowest = s.splat(f32::NEG_INFINITY);
    let mut block = lowest;
    for panel in panels..end {
        let lanes = &mut scores[panel * LANES..(panel + 1) * LANES];
        let masked = mask(s, s.load_some(lanes, 0.0), panel, visible);
        s.store_some(lanes, masked);
        block = s.max(masked, block);
    }
    let largest = before.max(s.largest(block));
    let mut sum = s.splat(0.0);
    for panel in panels..end {
        let lanes = &mut scores[panel * LANES..(panel + 1) * LANES];
        let weight = exp2(s, s.sub(s.load_some(lanes, 0.0), s.splat(largest)));
        s.store_some(lanes, weight);
        sum = s.add(sum, weight);
    }
    moved(s, before, largest, total, sum)
}

/// The scores, -infinity in place of those that are not seen.
#[inline(always)]
fn mask<S: Simd>(s: S, scores: S::F, panel: usize, visible: Visible) -> S::F {
    const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    let (lane, lowest) = (s.load_some(&LANE, 0.0), s.splat(f32::NEG_INFINITY));
    let first = visible.first as f32 - (panel * LANES) as f32;
    let end = visible.end as f32 - (panel * LANES) as f32;
    s.less(lane, s.splat(first), lowest, s.less(lane, s.splat(end), scores, lowest))
}

#[inline(always)]
fn moved<S: Simd>(s: S, before: f32, largest: f32, total: f32, sum: S::F) -> Moved {
    // Before the first key it is 2^-infinity = 0; never -infinity less itself.
    let decay = s.largest(exp2(s, s.splat(before - largest)));
    Moved { largest, total: total * decay + s.sum(sum), decay }
}

/// 2 to the power of `x`, at most 0: within three units in the last place, 0 below -126, 1 for 0; NaN stays.
///
/// `x = n + r` with |r| at most a half; then the polynomial of degree five with the constant term 1 whose largest
/// relative error, 9.1e-8, is the smallest (found by Lawson's iteration).
#[inline(always)]
pub(super) fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    const LOWEST: f32 = -126.0;
    let n = s.round(s.max(x, s.splat(LOWEST)));
    // Not of the clamped x: there a NaN is lost.
    let r = s.sub(x, n);
    let mut p = s.splat(1.326_472_4e-3);
    for factor in [9.671_513e-3, 5.550_733_8e-2, 0.240_222_42, 0.693_147, 1.0] {
        p = s.fma(p, r, s.splat(factor));
    }
    s.less(x, s.splat(LOWEST), s.splat(0.0), s.mul(p, s.exp2_integer(n)))
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::{Path, testable};
    use super::super::super::simd::Op;
    use super::*;

    struct Exp2<'a>(&'a [f32], &'a mut Vec<f32>);
    impl Op for Exp2<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for chunk in self.0.chunks(LANES) {
                let mut lanes = [0.0; LANES];
                s.store_some(&mut lanes, exp2(s, s.load_some(chunk, 0.0)));
                self.1.extend_from_slice(&lanes[..chunk.len()]);
            }
        }
    }

    #[test]
    fn exp2_is_near_the_true_one() {
        let inputs: Vec<f32> = (-126_000..=0).step_by(7).map(|i| i as f32 * 1e-3).collect();
        for isa in testable("exp2") {
            let mut got = Vec::new();
            Path::new(isa).unwrap().run(Exp2(&inputs, &mut got));
            for (x, y) in inputs.iter().zip(&got) {
                let want = f64::from(*x).exp2();
                let error = (f64::from(*y) - want).abs() / want;
                assert!(error < 2.5e-7, "{isa}: 2^{x} = {y}, wanted {want}");
            }
        }
    }

    #[test]
    fn exp2_of_the_edges() {
        for isa in testable("exp2 edges") {
            let mut got = Vec::new();
            let inputs = [0.0, -0.0, f32::NEG_INFINITY, -1e30, -126.5, f32::NAN];
            Path::new(isa).unwrap().run(Exp2(&inputs, &mut got));
            assert_eq!(&got[..5], &[1.0, 1.0, 0.0, 0.0, 0.0], "{isa}");
            assert!(got[5].is_nan(), "{isa}");
        }
    }
}
