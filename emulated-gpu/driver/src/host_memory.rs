//! Pinned host memory. A copy from or to pinned memory happens when the copy runs in its stream. A copy from or to
//! other host memory happens during the call.
//!
//! Kernels can access pinned memory that was allocated with `CU_MEMHOSTALLOC_DEVICEMAP`. Such memory has a device
//! address and a host address.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use crate::context::Context;
use crate::error::{Error, Outcome};

/// Alignment of the real driver's pinned memory.
const PAGE: usize = 4096;
/// Byte that fills new pinned memory. Read as f32, the memory is NaN, so that a missing copy shows.
const POISON: u8 = 0xff;

/// A pinned range.
struct Pinned {
    bytes: usize,
    /// Context and device address, if kernels can access the range. The range is then also an allocation of the device.
    mapped: Option<(Weak<Context>, u64)>,
}

/// Pinned ranges by their first addresses.
static PINNED: LazyLock<Mutex<BTreeMap<usize, Pinned>>> = LazyLock::new(Mutex::default);

fn pinned() -> MutexGuard<'static, BTreeMap<usize, Pinned>> {
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(bytes: usize) -> Outcome<Layout> {
    Layout::from_size_align(bytes, PAGE).map_err(|_| Error::OUT_OF_MEMORY)
}

/// Allocates pinned memory.
///
/// # Errors
///
/// `INVALID_VALUE` for 0 bytes, `OUT_OF_MEMORY` if the host has too little memory.
pub fn allocate(bytes: usize) -> Outcome<*mut c_void> {
    if bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the layout has a size above zero.
    let block = unsafe { alloc(layout(bytes)?) };
    if block.is_null() {
        return Err(Error::OUT_OF_MEMORY);
    }
    // SAFETY: the block has `bytes` bytes.
    unsafe { block.write_bytes(POISON, bytes) };
    pinned().insert(block.expose_provenance(), Pinned { bytes, mapped: None });
    Ok(block.cast())
}

/// Allocates pinned memory that kernels of `context` can access.
///
/// # Errors
///
/// As for [`allocate`].
pub fn allocate_mapped(context: &Arc<Context>, bytes: usize) -> Outcome<*mut c_void> {
    if bytes == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let memory = &context.memory.device;
    let address = memory.allocate(bytes as u64).map_err(|_| Error::OUT_OF_MEMORY)?;
    let block = memory.host_pointer(address, bytes as u64).map_err(|_| Error::OUT_OF_MEMORY)?;
    // SAFETY: the block has `bytes` bytes.
    unsafe { block.write_bytes(POISON, bytes) };
    let mapped = Some((Arc::downgrade(context), address));
    pinned().insert(block.expose_provenance(), Pinned { bytes, mapped });
    Ok(block.cast())
}

/// Returns the device address for a host address in mapped memory.
///
/// # Errors
///
/// `INVALID_VALUE` if the address does not lie in mapped memory.
pub fn device_address(host: *const c_void) -> Outcome<u64> {
    let pinned = pinned();
    let (base, range) = pinned.range(..=host.addr()).next_back().ok_or(Error::INVALID_VALUE)?;
    let (_, address) = range.mapped.as_ref().ok_or(Error::INVALID_VALUE)?;
    let offset = host.addr() - base;
    if offset < range.bytes { Ok(address + offset as u64) } else { Err(Error::INVALID_VALUE) }
}

/// Frees pinned memory. No work of a device may use it any more.
///
/// # Errors
///
/// `INVALID_VALUE` if no pinned range begins at `block`.
pub fn free(block: *mut c_void) -> Outcome {
    let Pinned { bytes, mapped } = pinned().remove(&block.addr()).ok_or(Error::INVALID_VALUE)?;
    match mapped {
        // If the context has ended, its memory is already freed.
        Some((context, address)) => context.upgrade().map_or(Ok(()), |context| context.memory.free(address)),
        None => {
            // SAFETY: `allocate` made the block with this layout, and it was in the table until now.
            unsafe { dealloc(block.cast(), layout(bytes)?) };
            Ok(())
        }
    }
}

/// True if a range lies in pinned memory.
pub fn is_pinned(address: usize, bytes: usize) -> bool {
    let pinned = pinned();
    let range = pinned.range(..=address).next_back();
    range.is_some_and(|(base, Pinned { bytes: size, .. })| {
        address - base < *size && bytes <= size - (address - base)
    })
}
