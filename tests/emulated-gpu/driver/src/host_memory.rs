//! Pinned host memory. Copies from and to it happen when the stream comes to them; other host memory is copied at once.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Outcome};

/// Alignment of the real driver's pinned memory.
const PAGE: usize = 4096;
/// Content of fresh pinned memory: a NaN as f32, so that a missing copy shows.
const POISON: u8 = 0xff;

/// Bytes of each pinned range by its first address.
static PINNED: LazyLock<Mutex<BTreeMap<usize, usize>>> = LazyLock::new(Mutex::default);

fn pinned() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(bytes: usize) -> Outcome<Layout> {
    Layout::from_size_align(bytes, PAGE).map_err(|_| Error::OUT_OF_MEMORY)
}

/// Allocates pinned memory.
///
/// # Errors
///
/// `INVALID_VALUE` for no bytes, `OUT_OF_MEMORY` when the host has no more.
pub fn allocate(bytes: usize) -> Outcome<*mut c_void> {
    if bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the layout has a size.
    let block = unsafe { alloc(layout(bytes)?) };
    if block.is_null() {
        return Err(Error::OUT_OF_MEMORY);
    }
    // SAFETY: the block has `bytes` bytes.
    unsafe { block.write_bytes(POISON, bytes) };
    pinned().insert(block.expose_provenance(), bytes);
    Ok(block.cast())
}

/// Frees pinned memory, which no work of a device uses any more.
///
/// # Errors
///
/// `INVALID_VALUE` if no pinned range begins there.
pub fn free(block: *mut c_void) -> Outcome {
    let bytes = pinned().remove(&block.addr()).ok_or(Error::INVALID_VALUE)?;
    // SAFETY: `allocate` made the block with this layout, and it was in the table until now.
    unsafe { dealloc(block.cast(), layout(bytes)?) };
    Ok(())
}

/// True if a range lies in pinned memory.
pub fn is_pinned(address: usize, bytes: usize) -> bool {
    let pinned = pinned();
    let range = pinned.range(..=address).next_back();
    range.is_some_and(|(base, size)| address - base < *size && bytes <= size - (address - base))
}
