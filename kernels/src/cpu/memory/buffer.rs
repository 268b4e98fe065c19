//! Memory of the device, page aligned: zeroed and committed only where it is touched, or a file's.

use std::fs::File;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::DeviceError;

/// Types whose every bit pattern is a value, so that fresh zeroed memory already holds valid ones, and bytes can be
/// written over them.
///
/// # Safety
///
/// Any bytes are a valid value, there is no padding, and the type needs no drop.
pub(in crate::cpu) unsafe trait Element: Copy + Send + Sync + 'static {}
// SAFETY: plain numbers.
unsafe impl Element for f32 {}
// SAFETY: plain numbers.
unsafe impl Element for u32 {}
// SAFETY: plain numbers.
unsafe impl Element for u16 {}
// SAFETY: plain numbers.
unsafe impl Element for u8 {}

/// A fixed number of elements in an anonymous mapping of their own.
pub(in crate::cpu) struct Buffer<T: Element> {
    start: NonNull<T>,
    len: usize,
    bytes: usize,
    owns: PhantomData<T>,
}

// SAFETY: the buffer owns its mapping alone; elements are plain numbers.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// `len` zeros, of which `None` is more than there are numbers for; `what` names them in the error when they do not fit.
    pub(in crate::cpu) fn zeroed(
        len: impl Into<Option<usize>>,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        let len = len.into().unwrap_or(usize::MAX);
        let too_much = || DeviceError::OutOfMemory { what, wanted: len.saturating_mul(size_of::<T>()) };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(too_much)?.max(1);
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches nothing that exists.
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

    /// `len` elements as they stand in `file` from byte `from` on, which is a multiple of the page size; `None` is more than
    /// there are numbers for. What is written here stays here. All of it is read at once, so that a file that cannot be
    /// read is an error and not a signal.
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
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches nothing that exists.
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
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        // SAFETY: elements have no padding, bytes have no alignment, and `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), size_of_val(&**self)) }
    }

    pub(in crate::cpu) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; any bytes are elements, and `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), size_of_val(&**self)) }
    }
}

/// Weights are read from end to end every step: with small pages the address translation alone costs bandwidth.
#[cfg(target_os = "linux")]
fn advise_huge_pages(start: *mut std::ffi::c_void, bytes: usize) {
    const WORTH_IT: usize = 4 << 20;
    if bytes >= WORTH_IT {
        // SAFETY: the range is the mapping just made; the advice changes no contents. A kernel that does not know it
        // refuses, and the pages stay small.
        let _ = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxHugepage) };
    }
}

/// Reads a file's pages into a mapping of it.
#[cfg(target_os = "linux")]
fn read_all(start: *mut std::ffi::c_void, bytes: usize) -> rustix::io::Result<()> {
    // SAFETY: the range is a mapping just made; pages are read from the file, and nothing else changes.
    match unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxPopulateRead) } {
        // A kernel that does not know the advice reads each page when it is touched.
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
        // SAFETY: exactly the mapping made in `zeroed`, and nothing borrows from it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `len` elements, zeroed at first and written only through `&mut`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes it the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
