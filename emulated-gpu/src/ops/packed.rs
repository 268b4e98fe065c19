//! Arithmetic of bf16 and f16, with one or two values per register. A result is computed in f64, rounded to odd (see
//! `rounding`), and then rounded to the type.

use crate::lower::Mnemonic;
use crate::ptx::{Kind, Type};

use super::half::{Binary16, Brain, Half, NAN};
use super::lanes::{Compute, compute};
use super::rounding::{self, Rounding};

/// The operation on each value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sum {
    Add,
    Sub,
    Mul,
    Fma,
    Max,
    Min,
    MaxNan,
    MinNan,
    Abs,
    Neg,
}

const SUMS: [Sum; 10] = [
    Sum::Add,
    Sum::Sub,
    Sum::Mul,
    Sum::Fma,
    Sum::Max,
    Sum::Min,
    Sum::MaxNan,
    Sum::MinNan,
    Sum::Abs,
    Sum::Neg,
];
/// Flags in `detail`, above the bits of the index in [`SUMS`].
const RELU: u32 = 16;
const FLUSH: u32 = 32;
const SATURATE: u32 = 64;

fn one<H: Half>(detail: u32, a: u16, b: u16, c: u16) -> u16 {
    let sum = SUMS[(detail & 15) as usize];
    match sum {
        Sum::Abs => return a & 0x7fff,
        Sum::Neg => return a ^ 0x8000,
        _ => {}
    }
    let wide = |bits: u16| {
        let value = H::widen(bits);
        // f16 magnitudes below 2^-14 are subnormal.
        let subnormal = bits & 0x7fff < 0x400;
        f64::from(if detail & FLUSH != 0 && subnormal { 0f32.copysign(value) } else { value })
    };
    let nan = |bits: u16| H::widen(bits).is_nan();
    let (x, y, z) = (wide(a), wide(b), wide(c));
    let nearest = Rounding::Nearest;
    let result = match sum {
        Sum::MaxNan | Sum::MinNan if nan(a) || nan(b) => return NAN,
        Sum::Max | Sum::Min if nan(a) && nan(b) => return NAN,
        Sum::Max | Sum::MaxNan | Sum::Min | Sum::MinNan => {
            let larger = matches!(sum, Sum::Max | Sum::MaxNan);
            let first = nan(b) || !nan(a) && if larger { x > y } else { x < y };
            let negative = x.is_sign_negative() || !larger && y.is_sign_negative();
            let negative = if larger { negative && y.is_sign_negative() } else { negative };
            if x == 0.0 && y == 0.0 {
                if negative { -0.0 } else { 0.0 }
            } else if first {
                x
            } else {
                y
            }
        }
        Sum::Add => rounding::sum(x, y, nearest),
        Sum::Sub => rounding::sum(x, -y, nearest),
        Sum::Mul => x * y,
        _ => rounding::sum(x * y, z, nearest),
    };
    let mut bits = H::narrow(rounding::to_odd_f32(result));
    if detail & FLUSH != 0 && bits & 0x7fff < 0x400 {
        bits &= 0x8000;
    }
    if detail & SATURATE != 0 {
        bits = H::narrow(rounding::saturate(H::widen(bits)));
    }
    if detail & RELU != 0 && bits & 0x8000 != 0 { 0 } else { bits }
}

macro_rules! forms {
    ($H:ty, $packed:expr, $operands:expr) => {
        match ($packed, $operands) {
            (false, 1) => compute!(u16; a: u16 = 0; |detail| one::<$H>(detail, a, 0, 0)),
            (false, 2) => compute!(u16; a: u16 = 0, b: u16 = 1; |detail| one::<$H>(detail, a, b, 0)),
            (false, _) => compute!(u16; a: u16 = 0, b: u16 = 1, c: u16 = 2; |detail| one::<$H>(detail, a, b, c)),
            (true, 1) => compute!(u32; a: u32 = 0; |detail| two::<$H>(detail, a, 0, 0)),
            (true, 2) => compute!(u32; a: u32 = 0, b: u32 = 1; |detail| two::<$H>(detail, a, b, 0)),
            (true, _) => compute!(u32; a: u32 = 0, b: u32 = 1, c: u32 = 2; |detail| two::<$H>(detail, a, b, c)),
        }
    };
}

fn two<H: Half>(detail: u32, a: u32, b: u32, c: u32) -> u32 {
    let high = one::<H>(detail, (a >> 16) as u16, (b >> 16) as u16, (c >> 16) as u16);
    u32::from(high) << 16 | u32::from(one::<H>(detail, a as u16, b as u16, c as u16))
}

pub(super) fn operation(mnemonic: &mut Mnemonic<'_>, ty: Type) -> Option<Compute> {
    let rounded = mnemonic.take("rn");
    // PTX has no `.ftz` for bf16.
    let flush = ty.kind == Kind::Float && mnemonic.take("ftz");
    let saturate = ty.kind == Kind::Float && mnemonic.take("sat");
    let nan = mnemonic.take("NaN");
    let (sum, operands) = match (mnemonic.name, nan) {
        ("add", false) => (Sum::Add, 2),
        ("sub", false) => (Sum::Sub, 2),
        ("mul", false) => (Sum::Mul, 2),
        ("fma", false) if rounded => (Sum::Fma, 3),
        ("max", false) => (Sum::Max, 2),
        ("min", false) => (Sum::Min, 2),
        ("max", true) => (Sum::MaxNan, 2),
        ("min", true) => (Sum::MinNan, 2),
        ("abs", false) => (Sum::Abs, 1),
        ("neg", false) => (Sum::Neg, 1),
        _ => return None,
    };
    let relu = sum == Sum::Fma && mnemonic.take("relu");
    let mut found = if ty.kind == Kind::Brain {
        forms!(Brain, ty.packed, operands)
    } else {
        forms!(Binary16, ty.packed, operands)
    };
    let index = SUMS.iter().position(|&s| s == sum)? as u32;
    let bit = |set: bool, bit: u32| if set { bit } else { 0 };
    found.detail = index | bit(relu, RELU) | bit(flush, FLUSH) | bit(saturate, SATURATE);
    Some(found)
}
