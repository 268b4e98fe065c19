//! Activations of a span.

use super::super::simd::{LANES, Simd};
use super::{ACTIVATION_BITS, SPAN, inverse, power, shared_exponent};

/// The numbers of a span, in pairs, and the power of two that they are multiples of: NaN if any number is not finite, so
/// that NaN propagates.
#[inline(always)]
pub(in super::super) fn span<S: Simd>(s: S, x: &[S::F; SPAN / LANES]) -> ([S::I; SPAN / (2 * LANES)], f32) {
    let zero = s.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for &x in x {
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
        // Zero times anything is zero, but for infinities and what is not a number.
        poison = s.add(s.mul(x, zero), poison);
    }
    let exponent = shared_exponent((s.largest(largest).to_bits() >> 23) as u8, ACTIVATION_BITS);
    let to_numbers = s.splat(inverse(exponent));
    let mut pairs = [s.splat_i(0); SPAN / (2 * LANES)];
    for (x, pairs) in x.as_chunks::<2>().0.iter().zip(&mut pairs) {
        *pairs = s.pairs_i16(s.mul(x[0], to_numbers), s.mul(x[1], to_numbers));
    }
    (pairs, power(exponent) + s.sum(poison))
}
