//! Number of blocks of a kernel that fit on a multiprocessor, by the limits of compute capability 9.0. PTX does not say
//! how many registers a kernel gets, so every kernel is assumed to use [`ASSUMED_REGISTERS`] per thread.

use tutti_emulated_gpu::Kernel;

/// Number of multiprocessors of a device. It is small, so that even small shapes need several waves of blocks.
pub const MULTIPROCESSORS: u32 = 16;
/// Maximum threads per multiprocessor.
pub const THREADS: u32 = 2048;
/// Maximum blocks per multiprocessor.
pub const BLOCKS: u32 = 32;
/// Registers per multiprocessor.
pub const REGISTERS: u32 = 65_536;
/// Registers per thread that every kernel is assumed to use.
pub const ASSUMED_REGISTERS: u32 = 64;
/// Shared memory per multiprocessor, in bytes.
pub const SHARED_BYTES: u32 = 228 << 10;
/// Shared memory that the driver reserves per block, in bytes.
pub const RESERVED_SHARED_BYTES: u32 = 1 << 10;

/// Returns how many blocks fit on a multiprocessor at once. A block has `threads` threads and `dynamic_bytes` bytes of
/// dynamic shared memory.
pub fn blocks(kernel: &Kernel, threads: u32, dynamic_bytes: u32) -> u32 {
    let threads = threads.max(1).next_multiple_of(32);
    let shared =
        kernel.static_shared_bytes.saturating_add(dynamic_bytes).saturating_add(RESERVED_SHARED_BYTES);
    (THREADS / threads).min(REGISTERS / (ASSUMED_REGISTERS * threads)).min(SHARED_BYTES / shared).min(BLOCKS)
}
