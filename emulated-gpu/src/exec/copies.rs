//! `cp.async`: asynchronous copies from global to shared memory.

use crate::fault::FaultKind;
use crate::program::{Instruction, NONE, Space};

use super::Warp;
use super::address::{Access, Addresses};
use super::rows::{Row, each_lane};

/// A copy for which its lane has not waited yet.
#[derive(Clone, Copy)]
struct Copy {
    lane: u8,
    /// Size of the target in bytes, and the number of these bytes that come from the source. The others become zeros.
    bytes: u8,
    taken: u8,
    group: u32,
    target: u32,
    source: u64,
}

/// A warp's copies for which lanes have not waited yet.
#[derive(Default)]
pub(crate) struct Copies {
    pending: Vec<Copy>,
    /// Number of groups that each lane has committed.
    committed: [u32; 32],
}

impl Copies {
    pub fn clear(&mut self) {
        self.pending.clear();
        self.committed = [0; 32];
    }
}

/// Starts copies. `from[0]` holds the shared addresses and `from[1]` the global addresses. `target` is the offset of
/// the global addresses, as an i32. `from[2]` holds the source's size in bytes, and `detail` is the target's size in
/// bytes.
///
/// # Safety
///
/// As for each [`Operation`](crate::program::Operation).
pub(crate) unsafe fn start(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    let bytes = instruction.detail;
    // SAFETY: the rows hold addresses and a size.
    let (targets, sizes) = unsafe {
        let mut targets = Row::<u64>::zero();
        let addresses = Addresses { space: Space::Shared, ..Addresses::of(instruction) };
        for lane in 0..32 {
            targets.0[lane] = if addresses.wide {
                warp.get::<u64>(addresses.row).0[lane].wrapping_add(addresses.offset as u64)
            } else {
                u64::from(warp.get::<u32>(addresses.row).0[lane].wrapping_add(addresses.offset as u32))
            };
        }
        let sizes =
            if instruction.from[2] == NONE { Row([bytes; 32]) } else { warp.get::<u32>(instruction.from[2]) };
        (targets, sizes)
    };
    let source = Addresses {
        row: instruction.from[1],
        wide: true,
        offset: i64::from(instruction.target as i32),
        space: Space::Global,
    };
    let (mut full, mut sources) = (0, Row::<u64>::zero());
    each_lane(mask, |lane| full |= u32::from(sizes.0[lane] >= bytes) << lane);
    // SAFETY: the register row that `source` names holds an address for each lane.
    if full != 0 && unsafe { warp.resolve(source, full, bytes, Access::Read, &mut sources) }.is_none() {
        return;
    }
    let late = !warp.run.early_copies;
    let mut left = mask;
    while left != 0 && warp.fault.is_none() {
        let lane = left.trailing_zeros() as usize;
        left &= left - 1;
        let (target, taken) = (targets.0[lane], sizes.0[lane].min(bytes));
        if full >> lane & 1 == 0 && taken != 0 {
            let mut one = Row::<u64>::zero();
            // A partial copy may have any size, so the addresses of its bytes are converted one by one.
            for byte in 0..taken {
                let addresses = Addresses { offset: source.offset + i64::from(byte), ..source };
                // SAFETY: the row holds addresses.
                if unsafe { warp.resolve(addresses, 1 << lane, 1, Access::Read, &mut one) }.is_none() {
                    return;
                }
            }
            sources.0[lane] = one.0[lane] - u64::from(taken - 1);
        }
        if target % u64::from(bytes) != 0 {
            let what = format!("the target of a cp.async of {bytes} bytes is not aligned");
            return warp.fail(FaultKind::Misaligned, lane as u32, Some(target), what);
        }
        if target + u64::from(bytes) > u64::from(warp.shared_bytes) {
            let what = format!(
                "the target of a cp.async of {bytes} bytes lies outside of {} bytes of shared memory",
                warp.shared_bytes
            );
            return warp.fail(FaultKind::OutOfBounds, lane as u32, Some(target), what);
        }
        let target = target as u32;
        if warp.run.shadows && warp.shade_copy(lane, target, bytes).is_none() {
            return;
        }
        let group = warp.state.copies.committed[lane];
        let copy = Copy {
            lane: lane as u8,
            bytes: bytes as u8,
            taken: taken as u8,
            group,
            target,
            source: sources.0[lane],
        };
        if !late {
            // SAFETY: the addresses of source and target were converted without a fault.
            unsafe { arrive(warp, &copy) };
        }
        warp.state.copies.pending.push(copy);
    }
}

/// # Safety
///
/// The addresses of the copy's source and target were converted without a fault.
unsafe fn arrive(warp: &mut Warp<'_>, copy: &Copy) {
    let taken = usize::from(copy.taken);
    // SAFETY: the caller promises that source and target are valid addresses. Shared memory and device memory do not
    // overlap.
    unsafe {
        let target = warp.shared.add(copy.target as usize);
        target.copy_from_nonoverlapping(copy.source as *const u8, taken);
        target.add(taken).write_bytes(0, usize::from(copy.bytes) - taken);
    }
}

/// Commits, for each lane, all copies since the lane's last commit as one group.
///
/// # Safety
///
/// No condition.
pub(crate) unsafe fn commit(warp: &mut Warp<'_>, _: &Instruction, mask: u32) {
    each_lane(mask, |lane| warp.state.copies.committed[lane] += 1);
}

/// Waits until at most `detail` groups per lane are pending. If `detail` is `NONE`, waits for all copies, committed or
/// not.
///
/// # Safety
///
/// As for each [`Operation`](crate::program::Operation).
pub(crate) unsafe fn wait(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    let mut pending = std::mem::take(&mut warp.state.copies.pending);
    pending.retain(|copy| {
        let lane = u32::from(copy.lane);
        let committed = warp.state.copies.committed[usize::from(copy.lane)];
        let left = u64::from(copy.group) + u64::from(instruction.detail) >= u64::from(committed);
        if mask >> lane & 1 == 0 || left && instruction.detail != NONE {
            return true;
        }
        if !warp.run.early_copies {
            // SAFETY: `start` converted the addresses of source and target without a fault.
            unsafe { arrive(warp, copy) };
        }
        if warp.run.shadows {
            warp.shade_arrival(lane, copy.target, u32::from(copy.bytes));
        }
        false
    });
    warp.state.copies.pending = pending;
}
