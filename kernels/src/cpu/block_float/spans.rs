//! Activations of a span.

use super::super::simd::{LANES, Simd};
use super::{ACTIVATION_BITS, SPAN, inverse, power, shared_exponent};

/// The numbers of a span, in pairs, and the power of two that they are multiples of: not a number where any is not finite,
/// so that what is computed with it is not either.
#[inline(always)]
pub(in super::super) fn span<S: Simd>(s: S, x: &[S::F; SPAN / LANES]) -> ([u32; SPAN / 2], f32) {
    let zero = s.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for &x in x {
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
        // Zero times anything is zero, but for infinities and what is not a number.
        poison = s.add(s.mul(x, zero), poison);
    }
    let exponent = shared_exponent((s.largest(largest).to_bits() >> 23) as u8, ACTIVATION_BITS);
    let to_numbers = s.splat(inverse(exponent));
    let mut pairs = [0; SPAN / 2];
    for (&x, pairs) in x.iter().zip(pairs.as_chunks_mut().0) {
        *pairs = s.to_pairs(s.mul(x, to_numbers));
    }
    (pairs, power(exponent) + s.sum(poison))
}
