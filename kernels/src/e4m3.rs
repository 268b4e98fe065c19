//! Floats of type e4m3 (`float8_e4m3fn`): a sign, four bits of exponent with bias 7, and three of mantissa. There are
//! no infinities (Micikevicius et al., arXiv:2209.05433).

/// Largest float.
const LARGEST: f32 = 448.0;
/// Code of a NaN.
const NAN: u32 = 0x7f;

/// Returns the value of a float.
pub fn value(bits: u8) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * 2f32.powi(-9),
        _ => sign * (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

/// Returns the float nearest to a number, ties to even. Numbers beyond the largest float become the largest, and a NaN
/// stays one. There are no branches, so that loops over this function become vector instructions.
#[inline(always)]
pub fn nearest(value: f32) -> u8 {
    /// The smallest number that is not subnormal.
    const LEAST_NORMAL: f32 = 1.0 / 64.0;
    /// A number whose last place is the unit of subnormal floats, 2^-9. A sum with it is rounded to this unit.
    const UNITS: f32 = 16384.0;
    let bits = value.to_bits();
    let magnitude = f32::from_bits(bits & 0x7fff_ffff);
    let clamped = if magnitude > LARGEST { LARGEST } else { magnitude };
    let subnormal = (clamped + UNITS).to_bits().wrapping_sub(UNITS.to_bits());
    let kept = clamped.to_bits();
    let normal = (kept.wrapping_add(0x7_ffff + (kept >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    let code = if clamped < LEAST_NORMAL { subnormal } else { normal };
    let code = if magnitude.is_nan() { NAN } else { code };
    (code | bits >> 24 & 0x80) as u8
}

#[cfg(test)]
mod tests;
