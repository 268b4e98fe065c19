//! Conversion of activations to block floating point.

use super::{ACTIVATION_BITS, BFP_BLOCK, inverse, power, shared_exponent};
use crate::cpu::simd::{LANES, Simd};

/// A BFP block of activations: integers and the power of two that scales them.
pub(in crate::cpu) struct BfpBlock<S: Simd> {
    /// The integers in order, two per word.
    pub(in crate::cpu) pairs: [S::I; BFP_BLOCK / (2 * LANES)],
    /// The power of two; NaN if any input is not finite, so that NaN propagates.
    pub(in crate::cpu) power: f32,
}

impl<S: Simd> BfpBlock<S> {
    /// Converts [`BFP_BLOCK`] activations.
    #[inline(always)]
    pub(in crate::cpu) fn new(s: S, x: &[S::F; BFP_BLOCK / LANES]) -> Self {
        let zero = s.splat(0.0);
        let mut poison = zero;
        for &x in x {
            // x * 0 is 0 for every finite x, and NaN for an infinity or NaN.
            poison = s.add(s.mul(x, zero), poison);
        }
        let exponent = exponent_of(s, x);
        let to_numbers = s.splat(inverse(exponent));
        let mut pairs = [s.splat_i(0); BFP_BLOCK / (2 * LANES)];
        for (x, pairs) in x.as_chunks::<2>().0.iter().zip(&mut pairs) {
            *pairs = s.pairs_i16(s.mul(x[0], to_numbers), s.mul(x[1], to_numbers));
        }
        Self { pairs, power: power(exponent) + s.sum(poison) }
    }
}

/// Rounds [`BFP_BLOCK`] activations to the numbers that their BFP block stands for. If an activation is not finite, the
/// result is not finite either, and its value is unspecified.
#[inline(always)]
pub(in crate::cpu) fn round_activations<S: Simd>(
    s: S,
    x: [S::F; BFP_BLOCK / LANES],
) -> [S::F; BFP_BLOCK / LANES] {
    let exponent = exponent_of(s, &x);
    let (to_numbers, unit) = (s.splat(inverse(exponent)), s.splat(power(exponent)));
    let mut rounded = x;
    for x in &mut rounded {
        *x = s.mul(s.round(s.mul(*x, to_numbers)), unit);
    }
    rounded
}

/// Returns the shared exponent of [`BFP_BLOCK`] activations.
#[inline(always)]
fn exponent_of<S: Simd>(s: S, x: &[S::F; BFP_BLOCK / LANES]) -> u8 {
    let zero = s.splat(0.0);
    let mut largest = zero;
    for &x in x {
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
    }
    shared_exponent((s.largest(largest).to_bits() >> 23) as u8, ACTIVATION_BITS)
}
