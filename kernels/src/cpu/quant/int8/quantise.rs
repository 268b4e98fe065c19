//! A group of numbers in eight bits and a scale.

use super::GROUP;
use crate::cpu::simd::{LANES, Simd};

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
mod tests;
