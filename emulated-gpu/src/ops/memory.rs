//! The instructions `ld` and `st`, which load and store.

use crate::exec::{Access, Addresses, Row, Warp, each_lane};
use crate::program::{Instruction, NONE, Operation, Width};
use crate::ptx::{Kind, Type};

/// Flag in `detail`: the access is strong (volatile, or with a memory order).
pub(crate) const STRONG: u32 = 1;

/// Loads values of type `M` from memory to registers of type `R`: one value to the target, or a vector to the listed
/// targets.
#[inline(always)]
unsafe fn load_as<M: Copy, R: Copy + Default>(
    warp: &mut Warp<'_>,
    instruction: &Instruction,
    mask: u32,
    widen: impl Fn(M) -> R,
) {
    let count = usize::from(instruction.list_into).max(1);
    let bytes = (size_of::<M>() * count) as u32;
    let access = if instruction.detail & STRONG != 0 { Access::StrongRead } else { Access::Read };
    let mut host = Row::<u64>::zero();
    // SAFETY: the lowering chose the rows, and `resolve` has checked `bytes` bytes per lane.
    unsafe {
        let Some(contiguous) = warp.resolve(Addresses::of(instruction), mask, bytes, access, &mut host)
        else {
            return;
        };
        if access == Access::StrongRead {
            warp.run.orders.meet(warp.block_index);
        }
        if count == 1 && contiguous {
            let source = host.0[0] as *const M;
            let mut result = Row::<R>::zero();
            let target = result.0.as_mut_ptr();
            for lane in 0..warp.lanes() {
                *target.add(lane) = widen(*source.add(lane));
            }
            warp.put(instruction.into[0], mask, &result);
            return;
        }
        let program = warp.program;
        for part in 0..count {
            let row = if count == 1 { instruction.into[0] } else { instruction.list_into(program)[part] };
            if row == NONE {
                continue;
            }
            let target = warp.row::<R>(row);
            let one = |lane: usize| *target.add(lane) = widen(*(host.0[lane] as *const M).add(part));
            if mask == u32::MAX {
                (0..32).for_each(one);
            } else {
                each_lane(mask, one);
            }
        }
    }
}

#[inline(always)]
unsafe fn store_as<M: Copy, R: Copy>(
    warp: &mut Warp<'_>,
    instruction: &Instruction,
    mask: u32,
    narrow: impl Fn(R) -> M,
) {
    let count = usize::from(instruction.list_from).max(1);
    let bytes = (size_of::<M>() * count) as u32;
    let access = if instruction.detail & STRONG != 0 { Access::StrongWrite } else { Access::Write };
    let mut host = Row::<u64>::zero();
    // SAFETY: the lowering chose the rows, and `resolve` has checked `bytes` bytes per lane.
    unsafe {
        let Some(contiguous) = warp.resolve(Addresses::of(instruction), mask, bytes, access, &mut host)
        else {
            return;
        };
        if access == Access::StrongWrite {
            warp.run.orders.meet(warp.block_index);
        }
        if count == 1 && contiguous {
            let source = warp.row::<R>(instruction.from[1]);
            let target = host.0[0] as *mut M;
            for lane in 0..warp.lanes() {
                *target.add(lane) = narrow(*source.add(lane));
            }
            return;
        }
        let program = warp.program;
        for part in 0..count {
            let row = if count == 1 { instruction.from[1] } else { instruction.list_from(program)[part] };
            let source = warp.row::<R>(row);
            each_lane(mask, |lane| *(host.0[lane] as *mut M).add(part) = narrow(*source.add(lane)));
        }
    }
}

macro_rules! transfer {
    ($move:ident, $M:ty, $R:ty, $to:ty) => {{
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,bmi1,bmi2"))]
        unsafe fn run(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
            // SAFETY: the lowering chose the operation for these widths.
            unsafe { $move::<$M, $R>(warp, instruction, mask, |value| value as $to) }
        }
        run as Operation
    }};
}

/// Returns the operation that loads values of a type to registers of the same or a larger width. Narrow integers are
/// extended.
pub(crate) fn load(ty: Type, width: Width) -> Option<Operation> {
    Some(match (ty.kind == Kind::Signed, ty.bits, width) {
        (false, 8, Width::W16) => transfer!(load_as, u8, u16, u16),
        (false, 8, Width::W32) => transfer!(load_as, u8, u32, u32),
        (false, 8, Width::W64) => transfer!(load_as, u8, u64, u64),
        (true, 8, Width::W16) => transfer!(load_as, i8, i16, i16),
        (true, 8, Width::W32) => transfer!(load_as, i8, i32, i32),
        (true, 8, Width::W64) => transfer!(load_as, i8, i64, i64),
        (_, 16, Width::W16) => transfer!(load_as, u16, u16, u16),
        (false, 16, Width::W32) => transfer!(load_as, u16, u32, u32),
        (false, 16, Width::W64) => transfer!(load_as, u16, u64, u64),
        (true, 16, Width::W32) => transfer!(load_as, i16, i32, i32),
        (true, 16, Width::W64) => transfer!(load_as, i16, i64, i64),
        (_, 32, Width::W32) => transfer!(load_as, u32, u32, u32),
        (false, 32, Width::W64) => transfer!(load_as, u32, u64, u64),
        (true, 32, Width::W64) => transfer!(load_as, i32, i64, i64),
        (_, 64, Width::W64) => transfer!(load_as, u64, u64, u64),
        _ => return None,
    })
}

/// Returns the operation that stores values of a type. The registers have the same or a larger width, and the low bits
/// are stored.
pub(crate) fn store(ty: Type, width: Width) -> Option<Operation> {
    Some(match (ty.bits, width) {
        (8, Width::W16) => transfer!(store_as, u8, u16, u8),
        (8, Width::W32) => transfer!(store_as, u8, u32, u8),
        (8, Width::W64) => transfer!(store_as, u8, u64, u8),
        (16, Width::W16) => transfer!(store_as, u16, u16, u16),
        (16, Width::W32) => transfer!(store_as, u16, u32, u16),
        (16, Width::W64) => transfer!(store_as, u16, u64, u16),
        (32, Width::W32) => transfer!(store_as, u32, u32, u32),
        (32, Width::W64) => transfer!(store_as, u32, u64, u32),
        (64, Width::W64) => transfer!(store_as, u64, u64, u64),
        _ => return None,
    })
}
