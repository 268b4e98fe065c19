//! Rows: the values of one register in the 32 lanes of a warp.

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
    /// Returns the number of lanes of a warp, always 32. The compiler knows only that the result is a multiple of 32,
    /// so it turns loops over the lanes into vector loops. It would unroll a loop of constant length into 32 scalar
    /// steps.
    #[inline(always)]
    pub fn lanes(&self) -> usize {
        self.warp_size_in_32 << 5
    }

    /// Returns the row at an offset in the register file.
    ///
    /// # Safety
    ///
    /// A row with lanes of the size of `T` starts at the offset.
    #[inline(always)]
    pub unsafe fn row<T>(&self, offset: u32) -> *mut T {
        // SAFETY: the caller promises that a row of the register file starts at the offset.
        unsafe { self.file.add(offset as usize).cast() }
    }

    /// Returns a copy of a row.
    ///
    /// # Safety
    ///
    /// As for [`Warp::row`].
    #[inline(always)]
    pub unsafe fn get<T: Copy>(&self, offset: u32) -> Row<T> {
        // SAFETY: the caller promises that a row of this type starts at the offset. A row has 32 lanes and starts at a
        // multiple of 64 bytes.
        unsafe { *self.row::<Row<T>>(offset) }
    }

    /// Writes the lanes of `mask` of a row. Does nothing if the offset is `NONE`.
    ///
    /// # Safety
    ///
    /// As for [`Warp::row`], or the offset is `NONE`.
    #[inline(always)]
    pub unsafe fn put<T: Copy>(&mut self, offset: u32, mask: u32, values: &Row<T>) {
        if offset == NONE {
            return;
        }
        // SAFETY: the offset is not `NONE`, so the caller promises that a row of this type starts there.
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

    /// Returns the mask of a predicate: one bit per lane.
    ///
    /// # Safety
    ///
    /// A predicate's row starts at the offset.
    #[inline(always)]
    pub unsafe fn predicate(&self, offset: u32) -> u32 {
        // SAFETY: the caller promises that the row of a predicate, one `u32`, starts at the offset.
        unsafe { *self.row::<u32>(offset) }
    }

    /// Writes the bits of a predicate for the lanes of `mask`.
    ///
    /// # Safety
    ///
    /// A predicate's row starts at the offset, or the offset is `NONE`.
    #[inline(always)]
    pub unsafe fn put_predicate(&mut self, offset: u32, mask: u32, values: u32) {
        if offset != NONE {
            // SAFETY: the offset is not `NONE`, so the caller promises that the row of a predicate starts there.
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
