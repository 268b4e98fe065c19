//! `mov`, also between one register and several, and `cvta`.

use crate::exec::{Row, Warp};
use crate::program::{Instruction, NONE, Operation, Width};

use super::lanes::{binary, unary};
use super::selection;

/// Returns the operation that copies a register.
pub(crate) fn copy(width: Width) -> Operation {
    match width {
        Width::Predicate => selection::predicate(),
        Width::W16 => unary!(u16 => u16, |a| a).run,
        Width::W32 => unary!(u32 => u32, |a| a).run,
        Width::W64 => unary!(u64 => u64, |a| a).run,
    }
}

/// Returns the operation of a `mov` from several registers to one of `whole` bits. The first source becomes the lowest
/// part. Returns none if PTX has no such `mov`.
pub(crate) fn join(parts: usize, whole: u32) -> Option<Operation> {
    Some(match (parts, whole) {
        (2, 32) => binary!(u16, u16 => u32, |a, b| u32::from(b) << 16 | u32::from(a)).run,
        (2, 64) => binary!(u32, u32 => u64, |a, b| u64::from(b) << 32 | u64::from(a)).run,
        (4, 64) => join_four,
        _ => return None,
    })
}

unsafe fn join_four(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    let mut result = Row::<u64>::zero();
    // SAFETY: the lowering chose four sources of 16 bits and a target of 64 bits.
    unsafe {
        for (part, &source) in instruction.from.iter().enumerate() {
            let source = warp.get::<u16>(source);
            for lane in 0..32 {
                result.0[lane] |= u64::from(source.0[lane]) << (16 * part);
            }
        }
        warp.put(instruction.into[0], mask, &result);
    }
}

/// Returns the operation of a `mov` from one register of `whole` bits to several, which the instruction lists. Returns
/// none if PTX has no such `mov`.
pub(crate) fn split(parts: usize, whole: u32) -> Option<Operation> {
    Some(match (parts, whole) {
        (2, 32) => split_words,
        (2, 64) => split_long,
        (4, 64) => split_quarters,
        _ => return None,
    })
}

macro_rules! splitting {
    ($name:ident, $T:ty, $P:ty) => {
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,bmi1,bmi2"))]
        unsafe fn $name(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
            // SAFETY: the lowering chose a source as wide as `T` and targets as wide as `P`. The source is copied
            // before a target changes.
            unsafe {
                let source = warp.get::<$T>(instruction.from[0]);
                let program = warp.program;
                for (part, &target) in instruction.list_into(program).iter().enumerate() {
                    if target == NONE {
                        continue;
                    }
                    let mut result = Row::<$P>::zero();
                    let values = result.0.as_mut_ptr();
                    for lane in 0..warp.lanes() {
                        *values.add(lane) =
                            (*source.0.as_ptr().add(lane) >> (<$P>::BITS * part as u32)) as $P;
                    }
                    warp.put(target, mask, &result);
                }
            }
        }
    };
}
splitting!(split_words, u32, u16);
splitting!(split_long, u64, u32);
splitting!(split_quarters, u64, u16);

/// Returns the operation of `cvta`, which adds the start of the window, in `offset`, to addresses.
pub(crate) fn generic_address() -> Operation {
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,bmi1,bmi2"))]
    unsafe fn run(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
        let mut result = Row::<u64>::zero();
        let target = result.0.as_mut_ptr();
        // SAFETY: the lowering chose a source and a target of 64 bits.
        unsafe {
            let source = warp.row::<u64>(instruction.from[0]);
            for lane in 0..warp.lanes() {
                *target.add(lane) = (*source.add(lane)).wrapping_add(instruction.offset as u64);
            }
            warp.put(instruction.into[0], mask, &result);
        }
    }
    run
}
