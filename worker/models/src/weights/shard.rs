//! Division of tensors among the ranks of a TP group.

use std::{borrow::Cow, ops::Range};

use tutti_kernels::{HostMatrix, WeightType, collective::GroupRank};

/// The rule by which one tensor is divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Every rank holds the whole tensor.
    Replicated,
    /// The ranks divide the outputs. The outputs form this number of equal units (heads or single outputs), and no unit
    /// is split.
    Rows(usize),
    /// The ranks divide the inputs, which form this number of equal units. The ranks' products are summed.
    Columns(usize),
    /// Only rank 0 holds the tensor. Used for a bias that is added to a sum over ranks, so that the bias is added once.
    Leader,
}

/// The rows and columns that a rank holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardRange {
    /// Range of outputs, or of a vector's elements.
    pub rows: Range<usize>,
    /// Range of inputs; `0..1` for a vector.
    pub columns: Range<usize>,
}

/// Returns a rank's share of `units`. With more ranks than units, neighbouring ranks hold the same unit. The caller has
/// checked that the number of units is a multiple or a divisor of the number of ranks.
pub(crate) fn share(units: usize, group_rank: GroupRank) -> Range<usize> {
    let first = group_rank.rank * units / group_rank.world_size;
    first..first + (units / group_rank.world_size).max(1)
}

impl Cut {
    /// Returns the rows and columns that a rank holds of a tensor of this shape.
    pub fn shard_range(self, rows: usize, columns: usize, group_rank: GroupRank) -> ShardRange {
        let within = |units: usize, length: usize| {
            let (share, unit) = (share(units, group_rank), length / units.max(1));
            share.start * unit..share.end * unit
        };
        match self {
            Self::Rows(units) => ShardRange { rows: within(units, rows), columns: 0..columns },
            Self::Columns(units) => ShardRange { rows: 0..rows, columns: within(units, columns) },
            Self::Leader if !group_rank.is_leader() => ShardRange { rows: 0..0, columns: 0..columns },
            Self::Replicated | Self::Leader => ShardRange { rows: 0..rows, columns: 0..columns },
        }
    }
}

impl ShardRange {
    /// Number of elements. Saturates instead of overflowing, for a config so absurd that no file matches it.
    pub fn elements(&self) -> usize {
        self.rows.len().saturating_mul(self.columns.len())
    }

    /// Returns the bytes of this range of the matrix `whole`. The bytes are borrowed if the range has all columns,
    /// because such bytes are contiguous. Otherwise the bytes are copied.
    pub fn slice<'a>(&self, whole: HostMatrix<'a>) -> Cow<'a, [u8]> {
        let Self { rows, columns } = self;
        let size = whole.dtype.bytes();
        let row_bytes = whole.columns * size;
        if columns.len() == whole.columns {
            return Cow::Borrowed(&whole.bytes[rows.start * row_bytes..rows.end * row_bytes]);
        }
        let mut bytes = Vec::with_capacity(self.elements() * size);
        for row in rows.clone() {
            let row = &whole.bytes[row * row_bytes..][..row_bytes];
            bytes.extend_from_slice(&row[columns.start * size..columns.end * size]);
        }
        Cow::Owned(bytes)
    }

    /// Returns `bytes`, the contents of this range, as a matrix.
    pub fn view<'a>(&self, bytes: &'a [u8], dtype: WeightType) -> HostMatrix<'a> {
        HostMatrix { bytes, dtype, rows: self.rows.len(), columns: self.columns.len() }
    }

    /// Returns the indices of the range's elements in the whole tensor, as contiguous runs. A row of the whole tensor
    /// has `width` elements.
    pub fn runs(&self, width: usize) -> impl Iterator<Item = Range<usize>> {
        let Self { rows, columns } = self.clone();
        let (count, step) = match (rows.len(), columns.len()) {
            (0, _) | (_, 0) => (0, 1),
            (rows, columns) if columns == width => (1, rows),
            (rows, _) => (rows, 1),
        };
        (0..count).map(move |run| {
            let first = rows.start + run;
            first * width + columns.start..(first + step - 1) * width + columns.end
        })
    }
}

#[cfg(test)]
mod tests;
