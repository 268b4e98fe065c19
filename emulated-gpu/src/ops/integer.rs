//! Arithmetic of integers.

use crate::lower::Mnemonic;
use crate::ptx::{Kind, Type};

use super::lanes::{Compute, binary, ternary, unary};

/// Operations that exist for all integer types. As on GPUs, a division by zero returns all ones, and its remainder is
/// the dividend.
macro_rules! common {
    ($name:expr, $T:ty, $wide:ty) => {
        match $name {
            "add" => binary!($T, $T => $T, |a, b| a.wrapping_add(b)),
            "sub" => binary!($T, $T => $T, |a, b| a.wrapping_sub(b)),
            "mul.lo" => binary!($T, $T => $T, |a, b| a.wrapping_mul(b)),
            "mul.hi" => {
                binary!($T, $T => $T, |a, b| ((<$wide>::from(a) * <$wide>::from(b)) >> <$T>::BITS) as $T)
            }
            "mad.lo" => ternary!($T, $T, $T => $T, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            "mad.hi" => ternary!($T, $T, $T => $T, |a, b, c| {
                (((<$wide>::from(a) * <$wide>::from(b)) >> <$T>::BITS) as $T).wrapping_add(c)
            }),
            "div" => binary!($T, $T => $T, |a, b| if b == 0 { !0 } else { a.wrapping_div(b) }),
            "rem" => binary!($T, $T => $T, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
            "min" => binary!($T, $T => $T, |a, b| if a < b { a } else { b }),
            "max" => binary!($T, $T => $T, |a, b| if a > b { a } else { b }),
            "sad" => ternary!($T, $T, $T => $T, |a, b, c| {
                (if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) }).wrapping_add(c)
            }),
            _ => return None,
        }
    };
}

/// Operations of signed types only.
macro_rules! signed {
    ($name:expr, $T:ty, $wide:ty) => {
        match $name {
            "abs" => unary!($T => $T, |a| a.wrapping_abs()),
            "neg" => unary!($T => $T, |a| a.wrapping_neg()),
            name => common!(name, $T, $wide),
        }
    };
}

/// Multiplications whose product has twice the width of the factors.
macro_rules! wide {
    ($name:expr, $T:ty, $W:ty) => {
        match $name {
            "mul.wide" => return Some(binary!($T, $T => $W, |a, b| <$W>::from(a) * <$W>::from(b))),
            "mad.wide" => {
                return Some(
                    ternary!($T, $T, $W => $W, |a, b, c| (<$W>::from(a) * <$W>::from(b)).wrapping_add(c)),
                );
            }
            _ => {}
        }
    };
}

pub(super) fn operation(mnemonic: &mut Mnemonic<'_>, ty: Type) -> Option<Compute> {
    let joined = mnemonic.rest();
    let name = joined.as_str();
    let found = match (ty.kind, ty.bits) {
        (Kind::Unsigned, 16) => {
            wide!(name, u16, u32);
            common!(name, u16, u32)
        }
        (Kind::Unsigned, 32) => {
            wide!(name, u32, u64);
            common!(name, u32, u64)
        }
        (Kind::Unsigned, 64) => common!(name, u64, u128),
        (Kind::Signed, 16) => {
            wide!(name, i16, i32);
            signed!(name, i16, i32)
        }
        (Kind::Signed, 32) => {
            wide!(name, i32, i64);
            match name {
                "add.sat" => binary!(i32, i32 => i32, |a, b| a.saturating_add(b)),
                "sub.sat" => binary!(i32, i32 => i32, |a, b| a.saturating_sub(b)),
                name => signed!(name, i32, i64),
            }
        }
        (Kind::Signed, 64) => signed!(name, i64, i128),
        _ => return None,
    };
    Some(found)
}
