//! The kernel that the GPU began last, for error messages about a GPU that fails or hangs.
//!
//! CUDA reports the failure of a kernel at any later call, and without the kernel's name. So each kernel begins with a
//! store of a hash of its name (`BEGIN` in `sources/prelude.cuh`) into pinned host memory, which can be read even when
//! the GPU is lost. Products of cuBLASLt store nothing, so the failure of a product is reported under the name of the
//! kernel before it.

use std::ptr;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::sources;

/// Name of the variable in each module that holds the address of the word.
pub(super) const VARIABLE: &str = "progress";

/// A word in pinned memory: the hash of the last kernel's name.
pub(super) struct Progress {
    word: *mut u32,
    on_device: sys::CUdeviceptr,
}

impl Progress {
    /// Allocates the word. A context must be bound.
    pub(super) fn new() -> Result<Self, DriverError> {
        // SAFETY: a context is bound, and the memory is written before it is read.
        unsafe {
            let word = result::malloc_host(size_of::<u32>(), sys::CU_MEMHOSTALLOC_DEVICEMAP)?.cast::<u32>();
            word.write_volatile(0);
            let mut on_device = 0;
            sys::cuMemHostGetDevicePointer_v2(&mut on_device, word.cast(), 0).result()?;
            Ok(Self { word, on_device })
        }
    }

    /// The word's address on the device.
    pub(super) fn at(&self) -> &sys::CUdeviceptr {
        &self.on_device
    }

    /// Returns the name of the kernel that began last; `None` before the first kernel.
    pub(super) fn kernel(&self) -> Option<&'static str> {
        // SAFETY: the word lives until `free`. The GPU writes the word with a single store, so this read sees a whole
        // value.
        let hash = unsafe { self.word.read_volatile() };
        sources::names().find(|name| hash_of(name) == hash)
    }

    /// Frees the word.
    ///
    /// # Safety
    ///
    /// A context is bound, no kernel runs any more, and the word is not used afterwards.
    pub(super) unsafe fn free(&mut self) {
        // SAFETY: by the caller's contract, a context is bound, and nothing uses the word any more. An error is
        // ignored, because there is nothing left to do.
        unsafe {
            let _ = result::free_host(self.word.cast());
        }
        self.word = ptr::null_mut();
    }
}

/// FNV-1a of 32 bits: Fowler, Noll, Vo, RFC 9923. Equal to `hash_of` in `sources/prelude.cuh`.
fn hash_of(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests;
