//! C functions for the occupancy of multiprocessors (`cuOccupancy…`).

use std::ffi::c_void;

use super::{Out, calls};
use crate::error::Error;
use crate::module::{FUNCTIONS, Function};
use crate::occupancy::{self, MULTIPROCESSORS, RESERVED_SHARED_BYTES, SHARED_BYTES};

/// A callback that returns the shared memory, in bytes, of a block with the given number of threads
/// (`CUoccupancyB2DSize`).
type SharedBytes = Option<unsafe extern "C" fn(i32) -> usize>;

calls! {
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<i32>, function: *mut c_void, threads: i32, shared: usize) {
        let function = FUNCTIONS.get(function)?;
        let threads = u32::try_from(threads).ok().filter(|&threads| threads > 0).ok_or(Error::INVALID_VALUE)?;
        let shared = u32::try_from(shared).map_err(|_| Error::INVALID_VALUE)?;
        blocks.set(occupancy::blocks(function.kernel()?, threads, shared) as i32)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>, function: *mut c_void, threads: i32, shared: usize, _flags: u32,
    ) {
        match cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared) {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    }
    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>, block: Out<i32>, function: *mut c_void, shared_of: SharedBytes, shared: usize, limit: i32,
    ) {
        let function = FUNCTIONS.get(function)?;
        let kernel = function.kernel()?;
        let most = match u32::try_from(limit) {
            Ok(limit @ 1..) => limit.min(Function::max_threads(kernel)),
            _ => Function::max_threads(kernel),
        };
        let resident = |threads: u32| {
            // SAFETY: the program passed a function with this signature.
            let shared = shared_of.map_or(shared, |shared_of| unsafe { shared_of(threads as i32) });
            occupancy::blocks(kernel, threads, u32::try_from(shared).unwrap_or(u32::MAX)) * threads
        };
        // Takes the largest of the block sizes that keep the most threads resident.
        let best = (1..=most / 32).map(|warps| 32 * warps).max_by_key(|&threads| (resident(threads), threads));
        let best = best.unwrap_or(most);
        grid.set((resident(best) / best * MULTIPROCESSORS) as i32)?;
        block.set(best as i32)
    }
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>, block: Out<i32>, function: *mut c_void, shared_of: SharedBytes, shared: usize, limit: i32,
        _flags: u32,
    ) {
        match cuOccupancyMaxPotentialBlockSize(grid, block, function, shared_of, shared, limit) {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<usize>, function: *mut c_void, blocks: i32, _threads: i32) {
        let function = FUNCTIONS.get(function)?;
        let kernel = function.kernel()?;
        let blocks = u32::try_from(blocks).ok().filter(|&blocks| blocks > 0).ok_or(Error::INVALID_VALUE)?;
        let left = (SHARED_BYTES / blocks).saturating_sub(kernel.static_shared_bytes + RESERVED_SHARED_BYTES);
        bytes.set(left as usize)
    }
}
