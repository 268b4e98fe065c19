//! The instructions `atom` and `red`, which are atomic operations.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::exec::{Access, Addresses, Row, Warp, each_lane};
use crate::program::{Instruction, NONE, Operation};
use crate::ptx::{Kind, Type};

use super::half::{Binary16, Brain, Half};
use super::rounding::canonical;

/// Kind of an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Atomic {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    /// Adds 1. At the bound, continues with 0.
    Increment,
    Decrement,
    MinSigned,
    MaxSigned,
    AddFloat,
    AddF16x2,
    AddBf16x2,
}

const ALL: [Atomic; 15] = [
    Atomic::Add,
    Atomic::Min,
    Atomic::Max,
    Atomic::And,
    Atomic::Or,
    Atomic::Xor,
    Atomic::Exchange,
    Atomic::CompareAndSwap,
    Atomic::Increment,
    Atomic::Decrement,
    Atomic::MinSigned,
    Atomic::MaxSigned,
    Atomic::AddFloat,
    Atomic::AddF16x2,
    Atomic::AddBf16x2,
];
/// Flag in `detail`, above the bits of the operation's code: the operation has release order.
pub(crate) const RELEASE: u32 = 16;

/// Returns the operation of an atomic instruction and its `detail`. The instruction's `from` holds the address, the
/// operand and, for a compare-and-swap, the new value.
pub(crate) fn atomic(name: &str, ty: Type) -> Option<(Operation, u32)> {
    let signed = ty.kind == Kind::Signed;
    let integer = matches!(ty.kind, Kind::Unsigned | Kind::Signed);
    let bits = ty.kind == Kind::Bits;
    let what = match name {
        "add" if integer => Atomic::Add,
        "add" if ty.packed && ty.kind == Kind::Brain => Atomic::AddBf16x2,
        "add" if ty.packed => Atomic::AddF16x2,
        "add" if ty.kind == Kind::Float && ty.bits >= 32 => Atomic::AddFloat,
        "min" if signed => Atomic::MinSigned,
        "max" if signed => Atomic::MaxSigned,
        "min" if integer => Atomic::Min,
        "max" if integer => Atomic::Max,
        "and" if bits => Atomic::And,
        "or" if bits => Atomic::Or,
        "xor" if bits => Atomic::Xor,
        "exch" if bits => Atomic::Exchange,
        "cas" if bits => Atomic::CompareAndSwap,
        "inc" if integer && !signed && ty.bits == 32 => Atomic::Increment,
        "dec" if integer && !signed && ty.bits == 32 => Atomic::Decrement,
        _ => return None,
    };
    let index = ALL.iter().position(|&a| a == what)? as u32;
    match ty.bits {
        32 => Some((words, index)),
        64 => Some((longs, index)),
        _ => None,
    }
}

fn pair<H: Half>(a: u32, b: u32) -> u32 {
    let add = |shift: u32| {
        let sum = H::widen((a >> shift) as u16) + H::widen((b >> shift) as u16);
        u32::from(H::narrow(sum)) << shift
    };
    add(0) | add(16)
}

macro_rules! integers {
    ($what:expr, $old:expr, $a:expr, $b:expr, $S:ty, $T:ty, $other:expr) => {
        match $what {
            Atomic::Add => $old.wrapping_add($a),
            Atomic::Min => $old.min($a),
            Atomic::Max => $old.max($a),
            Atomic::And => $old & $a,
            Atomic::Or => $old | $a,
            Atomic::Xor => $old ^ $a,
            Atomic::Exchange => $a,
            Atomic::CompareAndSwap => {
                if $old == $a {
                    $b
                } else {
                    $old
                }
            }
            Atomic::Increment => {
                if $old >= $a {
                    0
                } else {
                    $old + 1
                }
            }
            Atomic::Decrement => {
                if $old == 0 || $old > $a {
                    $a
                } else {
                    $old - 1
                }
            }
            Atomic::MinSigned => ($old as $S).min($a as $S) as $T,
            Atomic::MaxSigned => ($old as $S).max($a as $S) as $T,
            _ => $other,
        }
    };
}

fn word(what: Atomic, old: u32, a: u32, b: u32) -> u32 {
    let other = match what {
        Atomic::AddF16x2 => pair::<Binary16>(old, a),
        Atomic::AddBf16x2 => pair::<Brain>(old, a),
        _ => canonical(f32::from_bits(old) + f32::from_bits(a)).to_bits(),
    };
    integers!(what, old, a, b, i32, u32, other)
}

fn long(what: Atomic, old: u64, a: u64, b: u64) -> u64 {
    integers!(what, old, a, b, i64, u64, (f64::from_bits(old) + f64::from_bits(a)).to_bits())
}

macro_rules! atomics {
    ($name:ident, $T:ty, $Cell:ty, $apply:ident) => {
        unsafe fn $name(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
            let what = ALL[(instruction.detail & 15) as usize];
            let mut host = Row::<u64>::zero();
            // SAFETY: the lowering chose the rows, and `resolve` returns only aligned addresses that may be accessed.
            unsafe {
                let bytes = size_of::<$T>() as u32;
                if warp.resolve(Addresses::of(instruction), mask, bytes, Access::Atomic, &mut host).is_none()
                {
                    return;
                }
                if instruction.detail & RELEASE != 0 {
                    warp.run.orders.fence(warp.block_index);
                }
                warp.run.orders.meet(warp.block_index);
                let a = warp.get::<$T>(instruction.from[1]);
                let swap = instruction.from[2];
                let b = if swap == NONE { a } else { warp.get::<$T>(swap) };
                each_lane(mask, |lane| {
                    let cell = &*(host.0[lane] as *const $Cell);
                    let mut old = cell.load(Ordering::SeqCst);
                    loop {
                        let new = $apply(what, old, a.0[lane], b.0[lane]);
                        match cell.compare_exchange_weak(old, new, Ordering::SeqCst, Ordering::SeqCst) {
                            Ok(_) => break,
                            Err(now) => old = now,
                        }
                    }
                    if instruction.into[0] != NONE {
                        *warp.row::<$T>(instruction.into[0]).add(lane) = old;
                    }
                });
            }
        }
    };
}
atomics!(words, u32, AtomicU32, word);
atomics!(longs, u64, AtomicU64, long);
