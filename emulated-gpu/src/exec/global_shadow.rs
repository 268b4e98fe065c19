//! Shadow of global memory: the bytes that were written, and races between the blocks of a launch.
//!
//! Blocks are not ordered, so two accesses of different blocks to one byte race if one of them is a write. There are
//! two exceptions. First, strong accesses (atomic, volatile, or with a memory order) do not race with each other.
//! Second, a fence and atomic operations order two blocks: block A accesses the byte, fences and runs an atomic
//! operation, then block B runs an atomic operation and accesses the byte. The last block of a reduction reads the
//! other blocks' results in this way. This order is tracked per block, not per thread and address. So some races are
//! missed, but no false races are reported.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::fault::FaultKind;

use super::Warp;
use super::address::Access;
use super::rows::{Row, each_lane};

/// Number of low bits of a tag that hold a block's number. The higher bits hold the launch's number.
const BLOCK_BITS: u32 = 20;
const BLOCK_MASK: u32 = (1 << BLOCK_BITS) - 1;
/// Number that marks strong accesses, in place of a block's number.
const STRONG: u32 = BLOCK_MASK;
/// Number that marks accesses of several blocks, in place of a block's number.
const SEVERAL: u32 = BLOCK_MASK - 1;
/// Largest launch number. The launch after it has number 1 again.
pub(crate) const LAST_LAUNCH: u32 = (1 << (32 - BLOCK_BITS)) - 1;

/// The order between blocks, which fences and atomic operations establish.
pub(crate) struct Orders {
    clock: AtomicU64,
    /// Per block: bit 0 is set once the block has run a fence. The other bits are the time of the block's last atomic
    /// operation after its first fence; 0 means none.
    released: Vec<AtomicU64>,
    /// Per block: time of the block's last atomic operation; 0 means none.
    acquired: Vec<AtomicU64>,
}

impl Orders {
    /// Creates the orders of `blocks` blocks. With 0 blocks, nothing is recorded.
    pub fn new(blocks: u64) -> Self {
        let zeros = || (0..blocks).map(|_| AtomicU64::new(0)).collect();
        Orders { clock: AtomicU64::new(0), released: zeros(), acquired: zeros() }
    }

    /// Records a fence of a thread of the block.
    pub fn fence(&self, block: u32) {
        if let Some(released) = self.released.get(block as usize) {
            released.fetch_or(1, Ordering::SeqCst);
        }
    }

    /// Records an atomic operation of a thread of the block.
    pub fn meet(&self, block: u32) {
        let Some(released) = self.released.get(block as usize) else { return };
        let now = self.clock.fetch_add(1, Ordering::SeqCst) + 1;
        if released.load(Ordering::SeqCst) & 1 != 0 {
            released.store(now << 1 | 1, Ordering::SeqCst);
        }
        self.acquired[block as usize].store(now, Ordering::SeqCst);
    }

    /// True if all accesses so far of block `first` are ordered before the current access of block `then`.
    fn ordered(&self, first: u32, then: u32) -> bool {
        let time = |times: &[AtomicU64], block: u32| {
            times.get(block as usize).map_or(0, |t| t.load(Ordering::SeqCst))
        };
        let released = time(&self.released, first) >> 1;
        let acquired = time(&self.acquired, then);
        acquired != 0 && (released != 0 && acquired > released || first == SEVERAL - 1)
    }
}

impl Warp<'_> {
    /// Checks and records an access to the allocation at `index`, at the device addresses in `out`. Returns `None`
    /// after a fault.
    #[inline(never)]
    pub fn shade_global(
        &mut self,
        index: usize,
        mask: u32,
        bytes: u32,
        access: Access,
        out: &Row<u64>,
        contiguous: bool,
    ) -> Option<()> {
        let run = self.run;
        let allocation = &run.memory[index];
        let first = mask.trailing_zeros() as usize;
        let whole = if contiguous { 1 << first } else { mask };
        let bytes_each = if contiguous { 32 * bytes } else { bytes };
        let mut unwritten = None;
        let mut race = None;
        let shadow = if run.checks.races { allocation.race_shadow() } else { None };
        let base = allocation.base;
        each_lane(whole, |lane| {
            let (at, n) = ((out.0[lane] - base) as usize, bytes_each as usize);
            // SAFETY: the access lies in the allocation, and the shadows are as long as the allocation. Threads that
            // run other blocks may change the shadows at the same time. A report of a race may then name either of its
            // two accesses.
            unsafe {
                let written = std::slice::from_raw_parts_mut(allocation.written.add(at), n);
                if access.reads() && run.checks.uninitialised && unwritten.is_none() {
                    unwritten = written.iter().position(|&w| w == 0).map(|i| (lane, at + i));
                }
                if access.writes() {
                    written.fill(1);
                }
                if let Some(shadow) = shadow {
                    let writes = std::slice::from_raw_parts_mut(shadow.writes.add(at), n);
                    let reads = std::slice::from_raw_parts_mut(shadow.reads.add(at), n);
                    if let Some((i, other, wrote)) = self.note(access, writes, reads) {
                        race = race.or(Some((lane, at + i, other, wrote)));
                    }
                }
            }
        });
        let locate = |lane: usize, at: usize| {
            let lane =
                if contiguous { (at as u64 + base - out.0[first]) / u64::from(bytes) } else { lane as u64 };
            (lane as u32, Some(base + at as u64))
        };
        if let Some((lane, at)) = unwritten {
            let (lane, address) = locate(lane, at);
            let what = "global memory is read that nothing wrote".to_owned();
            self.fail(FaultKind::Uninitialised, lane, address, what);
            return None;
        }
        if let Some((lane, at, other, wrote)) = race {
            let (lane, address) = locate(lane, at);
            let mine = if access.writes() { "written" } else { "read" };
            let theirs = if wrote { "wrote" } else { "read" };
            let other =
                if other == SEVERAL { "several blocks".to_owned() } else { format!("block {}", other - 1) };
            let what = format!("global memory is {mine} that {other} {theirs} in the same launch");
            self.fail(FaultKind::Race, lane, address, what);
            return None;
        }
        Some(())
    }

    /// Records an access in a range of tags. If there is a race, returns the byte's offset in the range, the other
    /// block's number, and true if the other block wrote.
    fn note(&self, access: Access, writes: &mut [u32], reads: &mut [u32]) -> Option<(usize, u32, bool)> {
        let launch = self.run.launch_number << BLOCK_BITS;
        let number = self.block_index % (SEVERAL - 2) + 1;
        let me = launch | number;
        let foreign = |tag: u32| (tag & !BLOCK_MASK == launch) & (tag != me) & (tag & BLOCK_MASK != STRONG);
        let unordered = |tag: u32| {
            let block = tag & BLOCK_MASK;
            let first = if block == SEVERAL { SEVERAL - 1 } else { block - 1 };
            !self.run.orders.ordered(first, self.block_index)
        };
        // Few accesses find another block's tag, so the whole range is tested first. The test has no branches and
        // becomes vector code.
        let mut meets = false;
        for &tag in writes.iter() {
            meets |= foreign(tag);
        }
        if access.writes() {
            for &tag in reads.iter() {
                meets |= foreign(tag);
            }
        }
        if !meets {
            if access.writes() {
                writes.fill(if access.strong() { launch | STRONG } else { me });
            } else if access == Access::Read {
                for tag in reads.iter_mut() {
                    *tag = if foreign(*tag) { launch | SEVERAL } else { me };
                }
            }
            return None;
        }
        let mut found = None;
        for (i, tag) in writes.iter_mut().enumerate() {
            if foreign(*tag) && access != Access::StrongRead && found.is_none() && unordered(*tag) {
                found = Some((i, *tag & BLOCK_MASK, true));
            }
            if access.writes() {
                *tag = if access.strong() { launch | STRONG } else { me };
            }
        }
        for (i, tag) in reads.iter_mut().enumerate() {
            if access.writes() {
                if foreign(*tag) && found.is_none() && unordered(*tag) {
                    found = Some((i, *tag & BLOCK_MASK, false));
                }
            } else if access == Access::Read {
                *tag = if foreign(*tag) { launch | SEVERAL } else { me };
            }
        }
        found
    }
}
