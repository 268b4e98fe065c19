//! A group of numbers in eight bits and a scale.

use super::super::simd::{LANES, Simd};
use super::GROUP;

/// The largest magnitude of a quantised number: symmetric, so that a number and its negative have the same.
const MOST: f32 = 127.0;
/// Groups whose numbers are all smaller are zero: the reciprocal of the scale would overflow.
const TINY: f32 = 1e-30;

/// Quantises up to [`GROUP`] numbers; the rest of `out` becomes zero. Gives back the scale: not a number where any of
/// them is not finite, so that what is computed with it is not either.
#[inline(always)]
pub(super) fn quantise<S: Simd>(s: S, x: &[f32], out: &mut [i8; GROUP]) -> f32 {
    let zero = s.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for block in x.chunks(LANES) {
        let x = s.load_some(block, 0.0);
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
        // Zero times anything is zero, but for infinities and what is not a number.
        poison = s.add(s.mul(x, zero), poison);
    }
    let (largest, poison) = (s.largest(largest), s.sum(poison));
    out.fill(0);
    if largest < TINY {
        return poison;
    }
    let inverse = s.splat(MOST / largest);
    for (block, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
        out.copy_from_slice(&s.to_i8(s.mul(s.load_some(block, 0.0), inverse)));
    }
    largest / MOST + poison
}

/// A group of activations, quantised.
pub(super) struct Quantised<S: Simd> {
    /// The scale that [`quantise`] gives.
    pub(super) scale: f32,
    /// Sum of the quantised numbers.
    pub(super) sum: i32,
    /// Words of [`Simd::DOT_INPUTS`] numbers: as many of the sixteens as that makes.
    pub(super) words: [S::I; GROUP / (2 * LANES)],
}

/// Quantises a group that is in registers, to the same numbers as [`quantise`].
#[inline(always)]
pub(super) fn quantise_lanes<S: Simd>(s: S, x: [S::F; GROUP / LANES]) -> Quantised<S> {
    let zero = s.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for x in x {
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
        poison = s.add(s.mul(x, zero), poison);
    }
    let (largest, poison) = (s.largest(largest), s.sum(poison));
    let mut words = [s.splat_i(0); GROUP / (2 * LANES)];
    if largest < TINY {
        return Quantised { scale: poison, sum: 0, words };
    }
    let inverse = s.splat(MOST / largest);
    let (mut numbers, mut sum) = (x, zero);
    for number in &mut numbers {
        *number = s.round(s.mul(*number, inverse));
        // Exact: integers far below 2^24.
        sum = s.add(sum, *number);
    }
    if const { S::DOT_INPUTS == 2 } {
        for (words, x) in words.iter_mut().zip(numbers.as_chunks::<2>().0) {
            *words = s.pairs_i16(x[0], x[1]);
        }
    } else {
        for (words, x) in words.iter_mut().zip(numbers.as_chunks::<4>().0) {
            *words = s.quads_i8(*x);
        }
    }
    Quantised { scale: largest / MOST + poison, sum: s.sum(sum) as i32, words }
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::{Path, testable};
    use super::super::super::simd::Op;
    use super::super::super::testing::Random;
    use super::*;

    struct Quantise<'a>(&'a [f32]);
    impl Op for Quantise<'_> {
        type Output = (f32, [i8; GROUP]);
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> (f32, [i8; GROUP]) {
            let mut out = [55; GROUP];
            (quantise(s, self.0, &mut out), out)
        }
    }

    #[test]
    fn every_path_quantises_to_the_nearest_step() {
        let mut random = Random::new(5);
        for isa in testable("quantise") {
            let path = Path::new(isa).unwrap();
            for len in [1, 3, 16, 33, 127, GROUP] {
                for deviation in [1e-25, 1e-3, 1.0, 1e30] {
                    let x = random.normals(len, deviation);
                    let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    let (scale, q) = path.run_int8(Quantise(&x));
                    assert_eq!(scale, largest / 127.0, "{isa}");
                    for (i, x) in x.iter().enumerate() {
                        let want = (x * (127.0 / largest)).round_ties_even();
                        assert_eq!(f32::from(q[i]), want, "{isa}: {x} of at most {largest}");
                    }
                    assert!(q[len..].iter().all(|q| *q == 0), "{isa}: padding");
                    assert!(q.iter().any(|q| q.unsigned_abs() == 127), "{isa}: the range is used");
                }
            }
        }
    }

    struct InRegisters<'a>(&'a [f32]);
    impl Op for InRegisters<'_> {
        type Output = (f32, i32, Vec<u32>);
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let mut lanes = [s.splat(0.0); GROUP / LANES];
            for (lanes, x) in lanes.iter_mut().zip(self.0.chunks(LANES)) {
                *lanes = s.load_some(x, 0.0);
            }
            let Quantised { scale, sum, words } = quantise_lanes(s, lanes);
            let mut stored = vec![0; GROUP / S::DOT_INPUTS];
            for (words, to) in words.iter().zip(stored.chunks_exact_mut(LANES)) {
                // SAFETY: room for sixteen.
                unsafe { s.store_i(to.as_mut_ptr(), *words) };
            }
            (scale, sum, stored)
        }
    }

    struct Words<'a>(&'a [i8; GROUP]);
    impl Op for Words<'_> {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> Vec<u32> {
            self.0.chunks_exact(S::DOT_INPUTS).map(S::dot_word).collect()
        }
    }

    #[test]
    fn a_group_in_registers_comes_to_the_same_numbers() {
        let mut random = Random::new(6);
        for isa in testable("quantise in registers") {
            let path = Path::new(isa).unwrap();
            for len in [1, 20, 64, 100, GROUP] {
                for deviation in [0.0, 1e-35, 1e-3, 1.0, 1e30] {
                    let x = random.normals(len, deviation);
                    let (want_scale, q) = path.run_int8(Quantise(&x));
                    let (scale, sum, words) = path.run_int8(InRegisters(&x));
                    assert_eq!(scale, want_scale, "{isa} {len} {deviation}");
                    assert_eq!(sum, q.iter().map(|&q| i32::from(q)).sum::<i32>(), "{isa} {len} {deviation}");
                    assert_eq!(words, path.run_int8(Words(&q)), "{isa} {len} {deviation}");
                }
            }
            let bad = path.run_int8(InRegisters(&[1.0, f32::NAN, 2.0]));
            assert!(bad.0.is_nan(), "{isa}");
        }
    }

    #[test]
    fn nothing_is_zero_and_what_is_not_finite_poisons_the_scale() {
        for isa in testable("quantise") {
            let path = Path::new(isa).unwrap();
            for tiny in [0.0, -0.0, 1e-40, -9e-31] {
                assert_eq!(path.run_int8(Quantise(&[tiny; 20])), (0.0, [0; GROUP]), "{isa}: {tiny}");
            }
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for rest in [0.0, 3.0] {
                    let mut x = [rest; 40];
                    x[37] = bad;
                    assert!(path.run_int8(Quantise(&x)).0.is_nan(), "{isa}: {bad} among {rest}");
                }
            }
        }
    }
}
