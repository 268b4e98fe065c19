//! Operations on bits. A shift by the width or more leaves zeros or, if signed, copies of the sign.

use crate::exec::{Row, Warp};
use crate::lower::Mnemonic;
use crate::program::{Instruction, Width};
use crate::ptx::{Kind, Type};

use super::lanes::{Compute, binary, compute, ternary, unary};

macro_rules! shifts {
    ($name:expr, $T:ty) => {
        match $name {
            "shl" => Some(binary!($T, u32 => $T, |a, b| if b < <$T>::BITS { a << (b & (<$T>::BITS - 1)) } else { 0 })),
            "shr" => Some(binary!($T, u32 => $T, |a, b| a >> (if b < <$T>::BITS { b } else { <$T>::BITS - 1 })
                & (if b < <$T>::BITS || <$T>::MIN != 0 { !0 } else { 0 }))),
            // Returns the index of the highest bit that differs from the sign.
            "bfind" => Some(unary!($T => u32, |a| {
                let differing = if <$T>::MIN != 0 && a >> (<$T>::BITS - 1) & 1 != 0 { !a } else { a };
                if differing == 0 { u32::MAX } else { <$T>::BITS - 1 - differing.leading_zeros() }
            })),
            // Finds the highest bit that differs from the sign. Returns the left shift that moves it to the top.
            "bfind.shiftamt" => Some(unary!($T => u32, |a| {
                let differing = if <$T>::MIN != 0 && a >> (<$T>::BITS - 1) & 1 != 0 { !a } else { a };
                if differing == 0 { u32::MAX } else { differing.leading_zeros() }
            })),
            "bfe" => Some(ternary!($T, u32, u32 => $T, |a, b, c| {
                let (start, length, n) = (b & 255, c & 255, <$T>::BITS);
                // Bits past the end of the source are copies of the source's sign or, for unsigned types, zeros.
                let shifted = a >> start.min(n - 1) & if start < n || <$T>::MIN != 0 { !0 } else { 0 };
                let kept = length.min(n - start.min(n - 1));
                if length == 0 { 0 } else { shifted << (n - kept) >> (n - kept) }
            })),
            _ => None,
        }
    };
}

macro_rules! fields {
    ($name:expr, $T:ty) => {
        match $name {
            "and" => Some(binary!($T, $T => $T, |a, b| a & b)),
            "or" => Some(binary!($T, $T => $T, |a, b| a | b)),
            "xor" => Some(binary!($T, $T => $T, |a, b| a ^ b)),
            "not" => Some(unary!($T => $T, |a| !a)),
            "cnot" => Some(unary!($T => $T, |a| <$T>::from(a == 0))),
            "popc" => Some(unary!($T => u32, |a| a.count_ones())),
            "clz" => Some(unary!($T => u32, |a| a.leading_zeros())),
            "brev" => Some(unary!($T => $T, |a| a.reverse_bits())),
            "bfi" => Some(compute!($T; a: $T = 0, b: $T = 1, c: u32 = 2, d: u32 = 3; |_detail| {
                let (start, length) = (c & 255, d & 255);
                let field = if length >= <$T>::BITS { !0 } else { !(<$T>::MAX << (length & (<$T>::BITS - 1))) };
                let (field, value) = if start < <$T>::BITS { (field << start, a << start) } else { (0, 0) };
                b & !field | value & field
            })),
            name => shifts!(name, $T),
        }
    };
}

pub(super) fn operation(mnemonic: &mut Mnemonic<'_>, ty: Type) -> Option<Compute> {
    let joined = mnemonic.rest();
    let name = joined.as_str();
    match (ty.kind, ty.bits) {
        (Kind::Bits, 16) => match name {
            "and" => Some(binary!(u16, u16 => u16, |a, b| a & b)),
            "or" => Some(binary!(u16, u16 => u16, |a, b| a | b)),
            "xor" => Some(binary!(u16, u16 => u16, |a, b| a ^ b)),
            "not" => Some(unary!(u16 => u16, |a| !a)),
            "cnot" => Some(unary!(u16 => u16, |a| u16::from(a == 0))),
            name => shifts!(name, u16),
        },
        (Kind::Bits, 32) => words(name, mnemonic).or_else(|| fields!(name, u32)),
        (Kind::Bits, 64) => fields!(name, u64),
        (Kind::Unsigned, 16) => shifts!(name, u16),
        (Kind::Unsigned, 32) => shifts!(name, u32),
        (Kind::Unsigned, 64) => shifts!(name, u64),
        (Kind::Signed, 16) => shifts!(name, i16),
        (Kind::Signed, 32) => shifts!(name, i32),
        (Kind::Signed, 64) => shifts!(name, i64),
        _ => None,
    }
}

/// Returns the byte that a selector of `prmt` chooses. The lower three bits of the selector are the byte's index. If
/// the fourth bit is set, each bit of the byte is replaced by the byte's sign.
#[inline(always)]
fn chosen_byte(bytes: u64, selector: u32) -> u32 {
    let byte = (bytes >> ((selector & 7) * 8)) as u8;
    u32::from(if selector & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte })
}

fn words(name: &str, mnemonic: &Mnemonic<'_>) -> Option<Compute> {
    Some(match name {
        "shf.l.wrap" => {
            ternary!(u32, u32, u32 => u32, |a, b, c| (((u64::from(b) << 32 | u64::from(a)) << (c & 31)) >> 32) as u32)
        }
        "shf.r.wrap" => {
            ternary!(u32, u32, u32 => u32, |a, b, c| ((u64::from(b) << 32 | u64::from(a)) >> (c & 31)) as u32)
        }
        "shf.l.clamp" => ternary!(u32, u32, u32 => u32, |a, b, c| {
            (((u64::from(b) << 32 | u64::from(a)) << (if c < 32 { c } else { 32 })) >> 32) as u32
        }),
        "shf.r.clamp" => ternary!(u32, u32, u32 => u32, |a, b, c| {
            ((u64::from(b) << 32 | u64::from(a)) >> (if c < 32 { c } else { 32 })) as u32
        }),
        "prmt" => ternary!(u32, u32, u32 => u32, |a, b, c| {
            let bytes = u64::from(b) << 32 | u64::from(a);
            chosen_byte(bytes, c)
                | chosen_byte(bytes, c >> 4) << 8
                | chosen_byte(bytes, c >> 8) << 16
                | chosen_byte(bytes, c >> 12) << 24
        }),
        "bmsk.clamp" => binary!(u32, u32 => u32, |a, b| {
            let ones = if b < 32 { (1 << (b & 31)) - 1 } else { u32::MAX };
            if a < 32 { ones << (a & 31) } else { 0 }
        }),
        "bmsk.wrap" => binary!(u32, u32 => u32, |a, b| ((1 << (b & 31)) - 1) << (a & 31)),
        "lop3" => {
            let _ = mnemonic;
            Compute { run: lop3, into: Width::W32, from: &[Width::W32; 3], detail: 0 }
        }
        _ => return None,
    })
}

/// `lop3`: any function of three bits `a`, `b` and `c`. Bit `4a + 2b + c` of `detail` is the function's value.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,bmi1,bmi2"))]
unsafe fn lop3(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    let mut result = Row::<u32>::zero();
    let target = result.0.as_mut_ptr();
    // SAFETY: the lowering chose three sources and a target of 32 bits.
    unsafe {
        let [a, b, c] = [0, 1, 2].map(|i| warp.row::<u32>(instruction.from[i]));
        for term in (0..8).filter(|term| instruction.detail >> term & 1 != 0) {
            let flip = |bit: u32| if term >> bit & 1 != 0 { 0 } else { u32::MAX };
            let (fa, fb, fc) = (flip(2), flip(1), flip(0));
            for lane in 0..warp.lanes() {
                *target.add(lane) |= (*a.add(lane) ^ fa) & (*b.add(lane) ^ fb) & (*c.add(lane) ^ fc);
            }
        }
        warp.put(instruction.into[0], mask, &result);
    }
}
