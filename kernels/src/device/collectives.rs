//! Operations over all ranks of a TP group. The transports are in [`crate::collective`].

use super::family::family;
use crate::{Device, DeviceError};

family! {
    /// Operations over all ranks of a TP group. Every rank calls them in the same order: see [`Device::group_rank`].
    pub trait Collectives {
        /// Replaces each rank's `x` with the elementwise sum of all ranks' `x`.
        fn all_reduce(&mut self, x: &mut Self::Tensor) => |recorder| recorder.by_row(x);
        /// Does an [`all_reduce`](Self::all_reduce) of `x`, and then `out += x`. This is the residual addition after a
        /// matrix product whose inputs are divided among the ranks.
        fn all_reduce_add(&mut self, x: &mut Self::Tensor, out: &mut Self::Tensor) => |recorder| recorder.by_row(x);
        /// Replaces each rank's `x` with the elementwise maximum of all ranks' `x`. An element is NaN if it is NaN at
        /// any rank.
        fn all_reduce_max(&mut self, x: &mut Self::Tensor) => |recorder| recorder.by_row(x);
        /// Like [`gather_columns`](Self::gather_columns), but only for the rows with these indices. Each row keeps its
        /// index in `out`. The other rows of `out` are undefined.
        fn gather_rows(&mut self, part: &Self::Tensor, rows: &[usize], out: Option<&mut Self::Tensor>)
            => |recorder| recorder.by_row(part);
        /// Gathers columns at rank 0: each row of `out` is the concatenation of the ranks' rows of `part`. Only rank 0
        /// passes an `out`.
        fn gather_columns(&mut self, part: &Self::Tensor, out: Option<&mut Self::Tensor>)
            => |recorder| recorder.by_row(part);
    }
}
