//! Rows of 32 lanes.

use crate::program::NONE;

use super::Warp;

/// 32 values, one per lane.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Row<T>(pub [T; 32]);

impl<T: Copy + Default> Row<T> {
    #[inline(always)]
    pub fn zero() -> Self {
        Row([T::default(); 32])
    }
}

impl Warp<'_> {
    /// Number of lanes of a warp, which is always 32. The compiler knows only that it is a multiple of 32. Loops over
    /// the lanes then become vector loops; with a constant, they would be unrolled into 32 scalar steps.
    #[inline(always)]
    pub fn lanes(&self) -> usize {
        self.warp_size_in_32 << 5
    }

    /// The row at an offset in the register file.
    ///
    /// # Safety
    ///
    /// The offset is a row's, of lanes as wide as `T`.
    #[inline(always)]
    pub unsafe fn row<T>(&self, offset: u32) -> *mut T {
        // SAFETY: the caller promises that the offset is that of a row in the register file.
        unsafe { self.file.add(offset as usize).cast() }
    }

    /// A copy of a row.
    ///
    /// # Safety
    ///
    /// As for [`Warp::row`].
    #[inline(always)]
    pub unsafe fn get<T: Copy>(&self, offset: u32) -> Row<T> {
        // SAFETY: as above; a row has 32 lanes and starts at a multiple of 64 bytes.
        unsafe { *self.row::<Row<T>>(offset) }
    }

    /// Writes the lanes of `mask`.
    ///
    /// # Safety
    ///
    /// As for [`Warp::row`], or the offset is `NONE`.
    #[inline(always)]
    pub unsafe fn put<T: Copy>(&mut self, offset: u32, mask: u32, values: &Row<T>) {
        if offset == NONE {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            if mask == u32::MAX {
                *self.row::<Row<T>>(offset) = *values;
                return;
            }
            let target = self.row::<T>(offset);
            for lane in 0..self.lanes() {
                let old = *target.add(lane);
                let new = *values.0.as_ptr().add(lane);
                *target.add(lane) = if mask >> (lane as u32) & 1 != 0 { new } else { old };
            }
        }
    }

    /// A predicate's mask.
    ///
    /// # Safety
    ///
    /// The offset is a predicate's.
    #[inline(always)]
    pub unsafe fn predicate(&self, offset: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { *self.row::<u32>(offset) }
    }

    /// Writes the bits of `mask` to a predicate.
    ///
    /// # Safety
    ///
    /// The offset is a predicate's or `NONE`.
    #[inline(always)]
    pub unsafe fn put_predicate(&mut self, offset: u32, mask: u32, values: u32) {
        if offset != NONE {
            // SAFETY: the caller's promise.
            unsafe {
                let target = self.row::<u32>(offset);
                *target = *target & !mask | values & mask;
            }
        }
    }
}

/// Calls `f` with each lane of a mask, the lowest first.
#[inline(always)]
pub(crate) fn each_lane(mask: u32, mut f: impl FnMut(usize)) {
    let mut left = mask;
    while left != 0 {
        f(left.trailing_zeros() as usize);
        left &= left - 1;
    }
}
