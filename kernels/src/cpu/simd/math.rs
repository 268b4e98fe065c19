//! Conversions to and from bfloat16, and the exponential function.

use super::Simd;

/// Returns the nearest bfloat16, ties to even. A NaN becomes a quiet NaN.
#[inline(always)]
pub(in crate::cpu) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Converts bfloat16 to f32, exactly.
#[inline(always)]
pub(in crate::cpu) fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Returns `e` to the power of `x`. For x in -87 ..= 88 the error is at most two units in the last place. The result is
/// 0 below this range, infinity above it, and NaN for NaN.
///
/// The computation writes x as `n ln 2 + r`, with an integer n and |r| at most half of ln 2. n ln 2 is subtracted in
/// two parts, so that r is exact to the last bit. `e^r` is a Taylor polynomial of degree seven, whose first omitted
/// term is below 2⁻²⁷.
#[inline(always)]
pub(in crate::cpu) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    const LOWEST: f32 = -87.0;
    const HIGHEST: f32 = 88.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // `max` and `less` pass a NaN in `x` through.
    let clamped = s.max(s.splat(LOWEST), x);
    let clamped = s.less(s.splat(HIGHEST), clamped, s.splat(HIGHEST), clamped);
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut p = s.splat(1.0 / 5040.0);
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(factor));
    }
    // 2^127 is the largest finite power of two, and n is at most 127 for x up to 88.
    let y = s.mul(p, s.exp2_integer(n));
    let y = s.less(x, s.splat(LOWEST), s.splat(0.0), y);
    s.less(s.splat(HIGHEST), x, s.splat(f32::INFINITY), y)
}

#[cfg(test)]
mod tests;
