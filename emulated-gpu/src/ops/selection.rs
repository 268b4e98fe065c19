//! Comparisons, predicates and selections.

use crate::exec::{Row, Warp};
use crate::lower::Mnemonic;
use crate::program::{Instruction, NONE, Operation, Width};
use crate::ptx::{Kind, Type};

use super::half::{Binary16, Brain, Half};
use super::lanes::Compute;
use super::rounding::flush;

/// Bits 0-1 of `detail`: the operation that combines a comparison's result with a third predicate. Bit 2 negates the
/// third predicate.
pub(crate) mod combine {
    pub const ALONE: u32 = 0;
    pub const AND: u32 = 1;
    pub const OR: u32 = 2;
    pub const XOR: u32 = 3;
    pub const NEGATED: u32 = 4;
}

/// Writes a comparison's result to the first target, and the complement to the second target.
///
/// # Safety
///
/// The targets and `from[2]` are predicates.
#[inline(always)]
unsafe fn finish(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32, result: u32) {
    let detail = instruction.detail;
    // SAFETY: the caller promises that the targets and `from[2]` are predicates.
    unsafe {
        let mut third = if detail & 3 == combine::ALONE { 0 } else { warp.predicate(instruction.from[2]) };
        if detail & combine::NEGATED != 0 {
            third = !third;
        }
        let combined = |bits: u32| match detail & 3 {
            combine::ALONE => bits,
            combine::AND => bits & third,
            combine::OR => bits | third,
            _ => bits ^ third,
        };
        warp.put_predicate(instruction.into[0], mask, combined(result));
        warp.put_predicate(instruction.into[1], mask, combined(!result));
    }
}

macro_rules! comparison {
    ($T:ty, |$a:ident, $b:ident| $e:expr) => {{
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,bmi1,bmi2,fma"))]
        unsafe fn run(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
            // SAFETY: the lowering gave both sources this width.
            unsafe {
                let (a, b) = (warp.row::<$T>(instruction.from[0]), warp.row::<$T>(instruction.from[1]));
                let mut result = 0;
                for lane in 0..warp.lanes() {
                    let ($a, $b) = (*a.add(lane), *b.add(lane));
                    result |= u32::from($e) << (lane as u32);
                }
                finish(warp, instruction, mask, result);
            }
        }
        run as Operation
    }};
}

macro_rules! ordered {
    ($name:expr, $T:ty) => {
        Some(match $name {
            "eq" => comparison!($T, |a, b| a == b),
            "ne" => comparison!($T, |a, b| a != b),
            "lt" => comparison!($T, |a, b| a < b),
            "le" => comparison!($T, |a, b| a <= b),
            "gt" => comparison!($T, |a, b| a > b),
            "ge" => comparison!($T, |a, b| a >= b),
            _ => return None,
        })
    };
}

/// Comparisons of floats. A comparison whose name ends in `u` (unordered) is true if an operand is NaN.
macro_rules! floats {
    ($name:expr, $T:ty, $read:expr) => {{
        Some(match $name {
            "eq" => comparison!($T, |a, b| $read(a) == $read(b)),
            "ne" => comparison!($T, |a, b| $read(a) < $read(b) || $read(a) > $read(b)),
            "lt" => comparison!($T, |a, b| $read(a) < $read(b)),
            "le" => comparison!($T, |a, b| $read(a) <= $read(b)),
            "gt" => comparison!($T, |a, b| $read(a) > $read(b)),
            "ge" => comparison!($T, |a, b| $read(a) >= $read(b)),
            "equ" => comparison!($T, |a, b| !($read(a) < $read(b) || $read(a) > $read(b))),
            "neu" => comparison!($T, |a, b| $read(a) != $read(b)),
            "ltu" => comparison!($T, |a, b| !($read(a) >= $read(b))),
            "leu" => comparison!($T, |a, b| !($read(a) > $read(b))),
            "gtu" => comparison!($T, |a, b| !($read(a) <= $read(b))),
            "geu" => comparison!($T, |a, b| !($read(a) < $read(b))),
            "num" => comparison!($T, |a, b| !$read(a).is_nan() && !$read(b).is_nan()),
            "nan" => comparison!($T, |a, b| $read(a).is_nan() || $read(b).is_nan()),
            _ => return None,
        })
    }};
}

#[inline(always)]
fn same<T>(x: T) -> T {
    x
}

/// Returns the operation of a `setp` with the named comparison.
#[allow(clippy::neg_cmp_op_on_partial_ord)]
pub(crate) fn compare(name: &str, ty: Type, ftz: bool) -> Option<Operation> {
    if ftz && (ty.kind != Kind::Float || ty.bits != 32) {
        return None;
    }
    let equality = matches!(name, "eq" | "ne");
    // Unsigned comparisons also have a second name.
    let unsigned = match name {
        "lo" => "lt",
        "ls" => "le",
        "hi" => "gt",
        "hs" => "ge",
        name => name,
    };
    match (ty.kind, ty.bits) {
        (Kind::Bits, 16) if equality => ordered!(name, u16),
        (Kind::Bits, 32) if equality => ordered!(name, u32),
        (Kind::Bits, 64) if equality => ordered!(name, u64),
        (Kind::Unsigned, 16) => ordered!(unsigned, u16),
        (Kind::Unsigned, 32) => ordered!(unsigned, u32),
        (Kind::Unsigned, 64) => ordered!(unsigned, u64),
        (Kind::Signed, 16) => ordered!(name, i16),
        (Kind::Signed, 32) => ordered!(name, i32),
        (Kind::Signed, 64) => ordered!(name, i64),
        (Kind::Float, 32) if !ty.packed && ftz => floats!(name, f32, flush),
        (Kind::Float, 32) if !ty.packed => floats!(name, f32, same::<f32>),
        (Kind::Float, 64) => floats!(name, f64, same::<f64>),
        (Kind::Float, 16) => floats!(name, u16, Binary16::widen),
        (Kind::Brain, 16) => floats!(name, u16, Brain::widen),
        _ => None,
    }
}

macro_rules! logic {
    (|$a:ident, $b:ident| $e:expr) => {{
        unsafe fn run(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
            // SAFETY: the operands are predicates. If there is no second operand, the first is read twice.
            unsafe {
                let $a = warp.predicate(instruction.from[0]);
                let second = instruction.from[1];
                let $b = warp.predicate(if second == NONE { instruction.from[0] } else { second });
                let _ = $b;
                warp.put_predicate(instruction.into[0], mask, $e);
            }
        }
        run as Operation
    }};
}

/// Returns the operation that copies a predicate.
pub(crate) fn predicate() -> Operation {
    logic!(|a, b| a)
}

/// Returns the operation of a logic instruction on predicates.
pub(super) fn logic(mnemonic: &mut Mnemonic<'_>) -> Option<Compute> {
    const TWO: &[Width] = &[Width::Predicate; 2];
    let (run, from) = match mnemonic.rest().as_str() {
        "and" => (logic!(|a, b| a & b), TWO),
        "or" => (logic!(|a, b| a | b), TWO),
        "xor" => (logic!(|a, b| a ^ b), TWO),
        "not" => (logic!(|a, b| !a), &TWO[..1]),
        _ => return None,
    };
    Some(Compute { run, into: Width::Predicate, from, detail: 0 })
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,bmi1,bmi2"))]
unsafe fn select_lanes<T: Copy + Default>(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    let mut result = Row::<T>::zero();
    let target = result.0.as_mut_ptr();
    // SAFETY: the lowering chose two sources and a target with lanes of the size of `T`, and a predicate.
    unsafe {
        let (a, b) = (warp.row::<T>(instruction.from[0]), warp.row::<T>(instruction.from[1]));
        let chosen = warp.predicate(instruction.from[2]);
        for lane in 0..warp.lanes() {
            let (a, b) = (*a.add(lane), *b.add(lane));
            *target.add(lane) = if chosen >> (lane as u32) & 1 != 0 { a } else { b };
        }
        warp.put(instruction.into[0], mask, &result);
    }
}

/// Returns the operation of `selp`.
pub(super) fn select(bits: u32) -> Option<Compute> {
    const W16: &[Width] = &[Width::W16, Width::W16, Width::Predicate];
    const W32: &[Width] = &[Width::W32, Width::W32, Width::Predicate];
    const W64: &[Width] = &[Width::W64, Width::W64, Width::Predicate];
    let (run, from): (Operation, _) = match bits {
        16 => (select_lanes::<u16>, W16),
        32 => (select_lanes::<u32>, W32),
        64 => (select_lanes::<u64>, W64),
        _ => return None,
    };
    Some(Compute { run, into: from[0], from, detail: 0 })
}
