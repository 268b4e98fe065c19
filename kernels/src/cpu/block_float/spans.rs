//! Activations of a span.

use super::super::simd::{LANES, Simd};
use super::{ACTIVATION_BITS, SPAN, inverse, power, shared_exponent};

/// The numbers of a span and the power of two that they are multiples of: not a number where any is not finite, so that
/// what is computed with it is not either.
#[inline(always)]
pub(in super::super) fn span<S: Simd>(s: S, x: [S::F; SPAN / LANES]) -> ([i16; SPAN], f32) {
    let zero = s.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for x in x {
        largest = s.max(s.max(x, s.sub(zero, x)), largest);
        // Zero times anything is zero, but for infinities and what is not a number.
        poison = s.add(s.mul(x, zero), poison);
    }
    let exponent = shared_exponent((s.largest(largest).to_bits() >> 23) as u8, ACTIVATION_BITS);
    let to_numbers = s.splat(inverse(exponent));
    let mut numbers = [0; SPAN];
    for (x, numbers) in x.into_iter().zip(numbers.chunks_exact_mut(LANES)) {
        numbers.copy_from_slice(&s.to_i16(s.mul(x, to_numbers)));
    }
    (numbers, power(exponent) + s.sum(poison))
}
