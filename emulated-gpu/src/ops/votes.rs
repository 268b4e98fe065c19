//! Instructions of a whole warp: shuffles, votes, matches and reductions.

use crate::exec::{Row, Warp, each_lane};
use crate::fault::FaultKind;
use crate::program::{Instruction, NONE, Operation};

/// Returns the lane that `lane` reads in a shuffle, and true if this source lane is in the segment of `lane`. `bounds`
/// is operand `c` of the instruction. Bits 0-4 of `bounds` are the clamp. Bits 8-12 mask the bits of a lane's index
/// that are equal within a segment.
const fn source<const MODE: u32>(lane: u32, b: u32, bounds: u32) -> (u32, bool) {
    let (clamp, shared) = (bounds & 31, bounds >> 8 & 31);
    let last = lane & shared | clamp & !shared;
    let first = lane & shared;
    let b = b & 31;
    match MODE {
        0 => {
            let from = first | b & !shared;
            (from, from <= last)
        }
        // In mode `up`, the clamp is the lowest lane of the segment.
        1 => (lane.wrapping_sub(b), lane as i32 - b as i32 >= last as i32),
        2 => (lane + b, lane + b <= last),
        _ => (lane ^ b, lane ^ b <= last),
    }
}

/// For each lane, its bit in a mask.
const BITS: [u32; 32] = {
    let (mut bits, mut lane) = ([0; 32], 0);
    while lane < 32 {
        bits[lane] = 1 << lane;
        lane += 1;
    }
    bits
};

/// `shfl.sync`. `MODE` is 0 for idx, 1 for up, 2 for down and 3 for bfly. `from` holds value, operand and bounds.
unsafe fn shuffle_lanes<const MODE: u32>(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    // SAFETY: the lowering chose three sources and a target of 32 bits, and a predicate or no row as the second target.
    unsafe {
        let [value, operand, bounds] = [0, 1, 2].map(|i| warp.get::<u32>(instruction.from[i]));
        // A lane reads its own value if its source lies outside of its segment. The loop also computes lanes that take
        // no part, because only a loop without branches becomes vector code.
        let (mut from, mut inside) = (Row::<u32>::zero(), Row::<u32>::zero());
        for (lane, bit) in BITS.iter().enumerate().take(warp.lanes()) {
            let (other, ok) = source::<MODE>(lane as u32, operand.0[lane], bounds.0[lane]);
            from.0[lane] = if ok { other & 31 } else { lane as u32 };
            inside.0[lane] = if ok { *bit } else { 0 };
        }
        let mut result = Row::<u32>::zero();
        for (result, &from) in result.0.iter_mut().zip(&from.0) {
            *result = value.0[(from & 31) as usize];
        }
        if mask != u32::MAX {
            let reads_stranger = |&lane: &usize| mask & BITS[lane] != 0 && mask >> from.0[lane] & 1 == 0;
            if let Some(lane) = (0..32).find(reads_stranger) {
                let from = from.0[lane];
                let what = format!("a shuffle reads lane {from}, which takes no part; lanes {mask:#010x} do");
                return warp.fail(FaultKind::Barrier, lane as u32, None, what);
            }
        }
        warp.put(instruction.into[0], mask, &result);
        warp.put_predicate(instruction.into[1], mask, inside.0.into_iter().fold(0, |all, one| all | one));
    }
}

/// Returns the operation of a shuffle. `mode` is 0 for idx, 1 for up, 2 for down and 3 for bfly.
pub(crate) fn shuffle(mode: u32) -> Operation {
    match mode {
        0 => shuffle_lanes::<0>,
        1 => shuffle_lanes::<1>,
        2 => shuffle_lanes::<2>,
        _ => shuffle_lanes::<3>,
    }
}

/// `vote.sync`. `detail` is 0 for ballot, 1 for any, 2 for all and 3 for uni, plus 4 for a negated predicate.
pub(crate) unsafe fn vote(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    // SAFETY: the source is a predicate, and the members are a row of masks.
    unsafe {
        let flip = if instruction.detail & 4 != 0 { u32::MAX } else { 0 };
        let votes = warp.predicate(instruction.from[0]) ^ flip;
        let members = warp.get::<u32>(instruction.members);
        let (mut ballots, mut result) = (Row::<u32>::zero(), 0);
        each_lane(mask, |lane| {
            let voters = members.0[lane] & mask;
            let ayes = votes & voters;
            ballots.0[lane] = ayes;
            let holds = match instruction.detail & 3 {
                1 => ayes != 0,
                2 => ayes == voters,
                _ => ayes == 0 || ayes == voters,
            };
            result |= u32::from(holds) << lane;
        });
        if instruction.detail & 3 == 0 {
            warp.put(instruction.into[0], mask, &ballots);
        } else {
            warp.put_predicate(instruction.into[0], mask, result);
        }
    }
}

/// Returns for each lane of `mask` the members that hold the same value as the lane.
///
/// # Safety
///
/// The source is as wide as `T`, and the members are a row of masks.
unsafe fn equals<T: Copy + PartialEq>(warp: &Warp<'_>, instruction: &Instruction, mask: u32) -> Row<u32> {
    let mut result = Row::<u32>::zero();
    // SAFETY: the caller promises that the source is as wide as `T` and that the members are a row of masks.
    let (value, members) =
        unsafe { (warp.get::<T>(instruction.from[0]), warp.get::<u32>(instruction.members)) };
    each_lane(mask, |lane| {
        each_lane(members.0[lane] & mask, |other| {
            result.0[lane] |= u32::from(value.0[other] == value.0[lane]) << other;
        });
    });
    result
}

macro_rules! matches {
    ($name:ident, $T:ty) => {
        unsafe fn $name(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
            // SAFETY: the lowering chose a source of this width.
            unsafe {
                let mut result = equals::<$T>(warp, instruction, mask);
                if instruction.detail == 1 {
                    // `match.all` returns all members if their values are equal, and zero otherwise.
                    let members = warp.get::<u32>(instruction.members);
                    let mut all = 0;
                    each_lane(mask, |lane| {
                        let same = result.0[lane] == members.0[lane] & mask;
                        all |= u32::from(same) << lane;
                        if !same {
                            result.0[lane] = 0;
                        }
                    });
                    warp.put_predicate(instruction.into[1], mask, all);
                }
                warp.put(instruction.into[0], mask, &result);
            }
        }
    };
}
matches!(match_words, u32);
matches!(match_longs, u64);

/// `match.any.sync`; `detail` is 0.
pub(crate) fn match_any(bits: u32) -> Operation {
    if bits == 64 { match_longs } else { match_words }
}

/// `match.all.sync`; `detail` is 1.
pub(crate) fn match_all(bits: u32) -> Operation {
    match_any(bits)
}

/// `redux.sync`. `detail` is the operation's code (0 `add`, 1 `min`, 2 `max`, 3 `and`, 4 `or`, 5 `xor`), plus 8 for
/// signed values.
pub(crate) unsafe fn reduce(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    // SAFETY: the source has 32 bits, and the members are a row of masks.
    unsafe {
        let value = warp.get::<u32>(instruction.from[0]);
        let members = warp.get::<u32>(instruction.members);
        let mut result = Row::<u32>::zero();
        // With flipped sign bits, signed values have the order of unsigned values.
        let flip = if instruction.detail & 8 != 0 { 1 << 31 } else { 0 };
        each_lane(mask, |lane| {
            let mut sum = None;
            each_lane(members.0[lane] & mask, |other| {
                let next = value.0[other] ^ flip;
                sum = Some(match (sum, instruction.detail & 7) {
                    (None, _) => next,
                    (Some(sum), 0) => next.wrapping_add(sum),
                    (Some(sum), 1) => next.min(sum),
                    (Some(sum), 2) => next.max(sum),
                    (Some(sum), 3) => next & sum,
                    (Some(sum), 4) => next | sum,
                    (Some(sum), _) => next ^ sum,
                });
            });
            result.0[lane] = sum.unwrap_or(0) ^ flip;
        });
        warp.put(instruction.into[0], mask, &result);
    }
}

/// `activemask`.
pub(crate) unsafe fn active_mask(warp: &mut Warp<'_>, instruction: &Instruction, mask: u32) {
    debug_assert_ne!(instruction.into[0], NONE);
    // SAFETY: the lowering chose a target of 32 bits.
    unsafe { warp.put(instruction.into[0], mask, &Row([mask; 32])) };
}
