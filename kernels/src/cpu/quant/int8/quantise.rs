//! Quantisation of a group of numbers to eight bits and a scale.

use super::format::GROUP;
use crate::cpu::simd::{LANES, Simd};

/// The largest magnitude of a quantised number. The range is symmetric, so that `x` and `-x` have the same magnitude.
const MOST: f32 = 127.0;
/// A group whose magnitudes are all below this value is quantised to zeros, because the reciprocal of a tiny scale can
/// overflow.
const TINY: f32 = 1e-30;

/// Quantises up to [`GROUP`] numbers, and fills the rest of `out` with zeros. Returns the scale. The scale is NaN if
/// any input is not finite, so that NaN propagates.
#[inline(always)]
pub(in crate::cpu::quant) fn quantise<S: Simd>(s: S, x: &[f32], out: &mut [i8; GROUP]) -> f32 {
    let zero = s.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for block in x.chunks(LANES) {
        let x = s.load_some(block, 0.0);
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
        // x * 0 is 0 for every finite x, and NaN for an infinity or NaN.
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

/// A group of activations after rounding.
pub(in crate::cpu::quant) struct Rounded<S: Simd, const N: usize> {
    /// The scale, equal to the result of [`quantise`].
    pub(in crate::cpu::quant) scale: f32,
    /// The quantised numbers, which are integers.
    pub(in crate::cpu::quant) numbers: [S::F; N],
}

/// A quantised group of activations.
pub(super) struct Quantised<S: Simd> {
    /// The scale, equal to the result of [`quantise`].
    pub(super) scale: f32,
    /// Sum of the quantised numbers.
    pub(super) sum: i32,
    /// Vectors of words. A word packs [`Simd::DOT_INPUTS`] numbers. With four numbers per word, only the first half of
    /// this array is used.
    pub(super) words: [S::I; GROUP / (2 * LANES)],
}

/// Rounds a group that is in registers. [`quantise`] gives the same result.
#[inline(always)]
pub(in crate::cpu::quant) fn round_lanes<S: Simd, const N: usize>(s: S, x: [S::F; N]) -> Rounded<S, N> {
    let zero = s.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for x in x {
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
        poison = s.add(s.mul(x, zero), poison);
    }
    let (largest, poison) = (s.largest(largest), s.sum(poison));
    if largest < TINY {
        return Rounded { scale: poison, numbers: [zero; N] };
    }
    let inverse = s.splat(MOST / largest);
    let mut numbers = x;
    for number in &mut numbers {
        *number = s.round(s.mul(*number, inverse));
    }
    Rounded { scale: largest / MOST + poison, numbers }
}

/// Quantises a group that is in registers. [`quantise`] gives the same result.
#[inline(always)]
pub(super) fn quantise_lanes<S: Simd>(s: S, x: [S::F; GROUP / LANES]) -> Quantised<S> {
    let Rounded { scale, numbers } = round_lanes(s, x);
    let mut words = [s.splat_i(0); GROUP / (2 * LANES)];
    let mut sum = s.splat(0.0);
    for number in numbers {
        // The sum is exact: all partial sums are integers far below 2^24.
        sum = s.add(sum, number);
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
    Quantised { scale, sum: s.sum(sum) as i32, words }
}

#[cfg(test)]
mod tests;
