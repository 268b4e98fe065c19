//! A mutable slice that tasks of one parallel operation share.

use std::marker::PhantomData;

/// A mutable slice whose disjoint ranges are written by the tasks of one parallel operation.
pub(in crate::cpu) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    borrows: PhantomData<&'a mut [T]>,
}

// SAFETY: ranges are only accessible through the unsafe `slice` and `slice_mut`, whose callers guarantee that a range
// which is written is disjoint from all others.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: the value is equivalent to the `&mut [T]` that it was made from.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(in crate::cpu) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrows: PhantomData }
    }

    /// Elements `first .. first + len`.
    ///
    /// # Safety
    ///
    /// No two slices that exist at the same time overlap.
    #[allow(clippy::mut_from_ref)] // The safety contract excludes slices that overlap.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn slice_mut(&self, first: usize, len: usize) -> &mut [T] {
        assert!(first <= self.len && len <= self.len - first, "range of a shared slice out of bounds");
        // SAFETY: the range is in bounds by the assertion, and disjoint from every other slice by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }

    /// Address of the first element, for kernels that access strided patterns.
    #[inline(always)]
    pub(in crate::cpu) fn as_ptr(&self) -> *mut T {
        self.start
    }

    #[inline(always)]
    pub(in crate::cpu) fn len(&self) -> usize {
        self.len
    }
}

impl<T: Sync> Shared<'_, T> {
    /// Elements `first .. first + len`, to read.
    ///
    /// # Safety
    ///
    /// No slice of [`Self::slice_mut`] that exists at the same time overlaps this one.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn slice(&self, first: usize, len: usize) -> &[T] {
        assert!(first <= self.len && len <= self.len - first, "range of a shared slice out of bounds");
        // SAFETY: the range is in bounds by the assertion. By the caller's contract, no slice that allows writes
        // overlaps the range.
        unsafe { std::slice::from_raw_parts(self.start.add(first), len) }
    }
}
