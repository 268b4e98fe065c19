//! Page-aligned memory. It is either anonymous or mapped from a file. The system commits anonymous memory at the first
//! access, or in [`Buffer::make_resident`].

use std::fs::File;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::DeviceError;
use crate::cpu::threads::ThreadPool;

/// Bytes that one task makes resident: a multiple of every page size.
const RESIDENT_AT_ONCE: usize = 64 << 20;

/// Types for which every bit pattern is a value. Zeroed memory holds valid values, and any bytes may be written over
/// them.
///
/// # Safety
///
/// Any bytes are a valid value, there is no padding, and the type needs no drop.
pub(in crate::cpu) unsafe trait Element: Copy + Send + Sync + 'static {}
// SAFETY: every bit pattern is a number of this type, which has no padding and needs no drop.
unsafe impl Element for f32 {}
// SAFETY: every bit pattern is a number of this type, which has no padding and needs no drop.
unsafe impl Element for u64 {}
// SAFETY: every bit pattern is a number of this type, which has no padding and needs no drop.
unsafe impl Element for u32 {}
// SAFETY: every bit pattern is a number of this type, which has no padding and needs no drop.
unsafe impl Element for u16 {}
// SAFETY: every bit pattern is a number of this type, which has no padding and needs no drop.
unsafe impl Element for u8 {}

/// A fixed number of elements in a memory mapping that holds nothing else.
pub(in crate::cpu) struct Buffer<T: Element> {
    start: NonNull<T>,
    len: usize,
    bytes: usize,
    owns: PhantomData<T>,
}

// SAFETY: the buffer is the only owner of its mapping, and its elements are plain numbers.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: a shared reference to a buffer only reads the elements.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// Allocates `len` zeros. A `len` of `None` stands for a length that overflowed, and is an error. `what` names the
    /// buffer in errors.
    pub(in crate::cpu) fn zeroed(
        len: impl Into<Option<usize>>,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        let len = len.into().unwrap_or(usize::MAX);
        let too_much = || DeviceError::OutOfMemory { what, wanted: len.saturating_mul(size_of::<T>()) };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(too_much)?.max(1);
        // SAFETY: a new private mapping at an address of the operating system's choice affects no other memory.
        let mapped = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|_| too_much())?;
        advise_huge_pages(mapped, bytes);
        let start = NonNull::new(mapped.cast::<T>()).ok_or_else(too_much)?;
        Ok(Self { start, len, bytes, owns: PhantomData })
    }

    /// Maps `len` elements of `file` from byte `from` on. `from` is a multiple of the page size. A `len` of `None`
    /// stands for a length that overflowed, and is an error. Writes do not reach the file. All pages are read at once,
    /// so that a failing read is an error here and not a signal later.
    pub(in crate::cpu) fn mapped(
        file: &File,
        from: u64,
        len: impl Into<Option<usize>>,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        let len = len.into().unwrap_or(usize::MAX);
        let too_much = || DeviceError::OutOfMemory { what, wanted: len.saturating_mul(size_of::<T>()) };
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes > 0).ok_or_else(too_much)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new private mapping at an address of the operating system's choice affects no other memory.
        let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, file, from) }
            .map_err(|_| too_much())?;
        let start = NonNull::new(mapped.cast::<T>()).ok_or_else(too_much)?;
        let buffer = Self { start, len, bytes, owns: PhantomData };
        match read_all(mapped, bytes) {
            Ok(()) => Ok(buffer),
            Err(error) => Err(DeviceError::Lost(format!("cannot read {what} from a file: {error}"))),
        }
    }
}

impl<T: Element> Buffer<T> {
    /// Takes all memory of the buffer from the operating system at once, on all threads of the pool. Otherwise the
    /// system clears each part when it is first written.
    pub(in crate::cpu) fn make_resident(
        &mut self,
        pool: &mut ThreadPool,
        what: &'static str,
    ) -> Result<(), DeviceError> {
        let (start, bytes) = (self.start.as_ptr().expose_provenance(), self.bytes);
        let lacking = AtomicBool::new(false);
        pool.run(bytes.div_ceil(RESIDENT_AT_ONCE), |task, _| {
            let offset = task * RESIDENT_AT_ONCE;
            let len = RESIDENT_AT_ONCE.min(bytes - offset);
            if !populate(std::ptr::with_exposed_provenance_mut(start + offset), len) {
                lacking.store(true, Ordering::Relaxed);
            }
        })?;
        if lacking.into_inner() { Err(DeviceError::OutOfMemory { what, wanted: bytes }) } else { Ok(()) }
    }

    /// The elements as bytes.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        // SAFETY: elements have no padding, bytes need no alignment, and `&self` excludes writers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), size_of_val(&**self)) }
    }

    /// The elements as bytes, for writing.
    pub(in crate::cpu) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: elements have no padding, bytes need no alignment, and any bytes are valid elements. `&mut self`
        // makes this slice the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), size_of_val(&**self)) }
    }
}

/// Requests huge pages for large buffers. Every step reads all weights, and with small pages the translation of their
/// addresses costs bandwidth.
#[cfg(target_os = "linux")]
fn advise_huge_pages(start: *mut std::ffi::c_void, bytes: usize) {
    const WORTH_IT: usize = 4 << 20;
    if bytes >= WORTH_IT {
        // SAFETY: the range is the mapping that the caller has just made, and the advice changes no contents. Errors
        // are ignored: an operating system without this advice returns an error, and the pages stay small.
        let _ = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxHugepage) };
    }
}

/// Makes a range of an anonymous mapping resident. Returns `false` if memory is short.
#[cfg(target_os = "linux")]
fn populate(start: *mut std::ffi::c_void, bytes: usize) -> bool {
    // SAFETY: the range lies in a mapping that the caller owns, and the advice changes no contents.
    let done = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxPopulateWrite) };
    // An operating system without this advice clears each page when the page is first written, so only a lack of memory
    // is a failure.
    !matches!(done, Err(rustix::io::Errno::NOMEM | rustix::io::Errno::FAULT))
}

#[cfg(not(target_os = "linux"))]
fn populate(_: *mut std::ffi::c_void, _: usize) -> bool {
    true
}

/// Reads all pages of a file mapping.
#[cfg(target_os = "linux")]
fn read_all(start: *mut std::ffi::c_void, bytes: usize) -> rustix::io::Result<()> {
    // SAFETY: the range is the mapping that the caller has just made, and the advice only reads its pages.
    match unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxPopulateRead) } {
        // An operating system without this advice reads each page when the page is first touched, so this is no
        // failure.
        Err(rustix::io::Errno::INVAL) => Ok(()),
        done => done,
    }
}

#[cfg(not(target_os = "linux"))]
fn read_all(_: *mut std::ffi::c_void, _: usize) -> rustix::io::Result<()> {
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: *mut std::ffi::c_void, _: usize) {}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the range is the whole mapping made in `zeroed` or `mapped`, and no borrows of it are left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `len` valid elements, which are written only through `&mut`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the mapping holds `len` valid elements, and `&mut self` makes this slice the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests;
