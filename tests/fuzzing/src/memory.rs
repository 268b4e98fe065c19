//! An allocator that counts the bytes in use and passes calls on to the system's allocator.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// An allocator that counts the bytes in use, and their peak, over all threads.
pub struct Counting {
    used: AtomicUsize,
    peak: AtomicUsize,
}

impl Counting {
    /// Creates the allocator with zero bytes in use.
    pub const fn new() -> Self {
        Self { used: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Resets the peak to the bytes in use, and returns them.
    pub fn begin(&self) -> usize {
        let used = self.used.load(Relaxed);
        self.peak.store(used, Relaxed);
        used
    }

    /// Returns the largest number of bytes in use since [`Counting::begin`].
    pub fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }

    fn add(&self, bytes: usize) {
        let used = self.used.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(used, Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged, under the caller's own promises.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller makes the promises that the system's allocator requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller makes the promises that the system's allocator requires.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        self.used.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller makes the promises that the system's allocator requires.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.add(size);
        self.used.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller makes the promises that the system's allocator requires.
        unsafe { System.realloc(memory, layout, size) }
    }
}
