//! Instructions without a result (fences and traps), and the clock.

use crate::exec::{Row, Warp};
use crate::fault::FaultKind;
use crate::program::{Instruction, Operation, Width};

/// Does nothing. Branches, barriers and prefetches have this function.
pub(crate) unsafe fn nothing(_: &mut Warp<'_>, _: &Instruction, _: u32) {}

/// `membar` and `fence`. The emulator's memory is strongly ordered, so a fence is only recorded for the race checks.
pub(crate) unsafe fn fence(warp: &mut Warp<'_>, _: &Instruction, _: u32) {
    warp.run.orders.fence(warp.block_index);
}

/// `trap`: sets a fault.
pub(crate) unsafe fn trap(warp: &mut Warp<'_>, _: &Instruction, mask: u32) {
    warp.fail(FaultKind::Trap, mask.trailing_zeros(), None, "a trap".to_owned());
}

/// `call` of `__assertfail`: sets a fault.
pub(crate) unsafe fn call_outside(warp: &mut Warp<'_>, _: &Instruction, mask: u32) {
    warp.fail(FaultKind::Trap, mask.trailing_zeros(), None, "an assertion failed".to_owned());
}

/// Returns the operation that reads `%clock`: the number of instructions that the warp has run.
pub(crate) fn clock(width: Width) -> Operation {
    unsafe fn short(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
        let now = Row([warp.steps as u32; 32]);
        // SAFETY: the lowering chose a target of 32 bits.
        unsafe { warp.put(instruction.into[0], mask, &now) };
    }
    unsafe fn long(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
        let now = Row([warp.steps; 32]);
        // SAFETY: the lowering chose a target of 64 bits.
        unsafe { warp.put(instruction.into[0], mask, &now) };
    }
    if width == Width::W64 { long } else { short }
}
