//! The shape of a launch, and the optional checks of a launch.

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks in the grid: x, y, z.
    pub blocks: [u32; 3],
    /// Number of threads in a block: x, y, z.
    pub threads: [u32; 3],
    /// Bytes of shared memory in addition to the kernel's static shared memory.
    pub dynamic_shared_bytes: u32,
}

impl Grid {
    /// Number of threads in a block.
    pub fn threads_per_block(&self) -> u64 {
        self.threads.iter().map(|&n| u64::from(n)).product()
    }

    /// Number of blocks in the grid.
    pub fn block_count(&self) -> u64 {
        self.blocks.iter().map(|&n| u64::from(n)).product()
    }
}

/// Optional checks of a launch, and the order of its warps and blocks. Bounds, alignment, barriers and shuffles are
/// always checked.
///
/// Checks of global memory need [`DeviceMemory::watched`](crate::DeviceMemory::watched).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Seed of the order of warps and blocks. Without a seed, warps and blocks run in ascending order, and the turns of
    /// warps are long.
    pub seed: Option<u64>,
    /// True to report races in shared memory (between warps and inside a warp), races in global memory between blocks,
    /// and reads of `cp.async` data before the wait.
    pub races: bool,
    /// True to report reads of global and shared memory that was never written.
    pub uninitialised: bool,
    /// Host threads that run blocks; 0 means one per processor.
    pub threads: usize,
}

impl Checks {
    /// Enables all checks. Warps and blocks run in the order of `seed`.
    pub fn all(seed: u64) -> Self {
        Checks { seed: Some(seed), races: true, uninitialised: true, threads: 0 }
    }
}
