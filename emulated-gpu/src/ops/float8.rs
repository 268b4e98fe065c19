//! Conversions from and to pairs of e4m3: floats of eight bits with a sign, four bits of exponent with bias 7, three of
//! mantissa, and no infinities (PTX ISA, "Alternate Floating-Point Data Formats").

use super::half::{Binary16, Half, NAN};
use super::lanes::{Compute, binary, unary};

/// The NaN that conversions to e4m3 return.
const NAN_CODE: u8 = 0x7f;
/// The code of the largest finite number, 448.
const LARGEST: u8 = 0x7e;
/// The exponent of the smallest normal number. Subnormal numbers have its unit.
const LEAST_EXPONENT: i32 = -6;

/// Returns the f16 of a code. Each e4m3 is an f16.
fn widen(code: u8) -> u16 {
    let (sign, exponent, mantissa) = (code & 0x80, i32::from(code >> 3 & 15), i32::from(code & 7));
    if code & 0x7f == NAN_CODE {
        return NAN;
    }
    let units = if exponent == 0 { mantissa } else { 8 + mantissa };
    let magnitude = units as f32 * 2f32.powi(exponent.max(1) - 7 - 3);
    u16::from(sign) << 8 | Binary16::narrow(magnitude)
}

/// Rounds to nearest, ties to even. Numbers beyond the largest become the largest (`.satfinite`).
fn narrow(x: f32) -> u8 {
    if x.is_nan() {
        return NAN_CODE;
    }
    let magnitude = f64::from(x.abs().min(1024.0));
    // An f64 holds the exponent of each f32 that is not zero, and zero has the least exponent, too.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(LEAST_EXPONENT);
    let units = (magnitude * 2f64.powi(3 - exponent)).round_ties_even() as i32;
    // Sixteen units are eight units of the next exponent, whose code is the same sum.
    let code = (exponent - LEAST_EXPONENT) * 8 + units;
    (code.min(i32::from(LARGEST)) as u8) | if x.is_sign_negative() { 0x80 } else { 0 }
}

fn pair(high: f32, low: f32) -> u16 {
    u16::from(narrow(high)) << 8 | u16::from(narrow(low))
}

/// `cvt.rn.f16x2.e4m3x2`.
pub(crate) fn to_halves() -> Compute {
    unary!(u16 => u32, |a| u32::from(widen((a >> 8) as u8)) << 16 | u32::from(widen(a as u8)))
}

/// `cvt.rn.satfinite.e4m3x2.f32`. The first source becomes the upper number.
pub(crate) fn of_floats() -> Compute {
    binary!(f32, f32 => u16, |a, b| pair(a, b))
}

/// `cvt.rn.satfinite.e4m3x2.f16x2`.
pub(crate) fn of_halves() -> Compute {
    unary!(u32 => u16, |a| pair(Binary16::widen((a >> 16) as u16), Binary16::widen(a as u16)))
}
