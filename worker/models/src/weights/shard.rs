//! Division of tensors among the ranks of a TP group.

use std::ops::Range;

use tutti_kernels::{HostMatrix, WeightType, collective::GroupRank};

use super::Dims;

/// The rule by which one tensor is divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Every rank holds the whole tensor.
    Replicated,
    /// The ranks divide the outputs of each part of each matrix. The outputs form this number of equal units (heads or
    /// single outputs), and no unit is split. In a stack of experts, every rank thus holds a share of every expert.
    Rows(usize),
    /// The ranks divide the inputs of each matrix, which form this number of equal units. The ranks' products are summed.
    Columns(usize),
    /// The ranks divide the matrices of a stack: each holds whole experts.
    Matrices,
    /// Only rank 0 holds the tensor. Used for a bias that is added to a sum over ranks, so that the bias is added once.
    Leader,
}

/// The part of a tensor that a rank holds: a range of its matrices and, of each of these, the same rows of every part and
/// the same columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardRange {
    /// Range of matrices.
    pub matrices: Range<usize>,
    /// Range of rows within each part.
    pub rows: Range<usize>,
    /// Range of columns.
    pub columns: Range<usize>,
    /// The whole tensor.
    pub dims: Dims,
}

/// A window of one matrix of a tensor: consecutive rows and consecutive columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Index of the matrix.
    pub matrix: usize,
    /// Range of rows of the whole matrix.
    pub rows: Range<usize>,
    /// Range of columns.
    pub columns: Range<usize>,
    /// The whole tensor.
    pub dims: Dims,
}

/// Returns a rank's share of `units`. With more ranks than units, neighbouring ranks hold the same unit. The caller has
/// checked that the number of units is a multiple or a divisor of the number of ranks.
pub(crate) fn share(units: usize, group_rank: GroupRank) -> Range<usize> {
    let first = group_rank.rank * units / group_rank.world_size;
    first..first + (units / group_rank.world_size).max(1)
}

impl Cut {
    /// Returns the part of a tensor that a rank holds.
    pub fn shard_range(self, dims: Dims, group_rank: GroupRank) -> ShardRange {
        let Dims { matrices, rows, columns, parts, .. } = dims;
        let rows = rows / parts.max(1);
        let within = |units: usize, length: usize| {
            let (share, unit) = (share(units, group_rank), length / units.max(1));
            share.start * unit..share.end * unit
        };
        let whole = ShardRange { matrices: 0..matrices, rows: 0..rows, columns: 0..columns, dims };
        match self {
            Self::Rows(units) => ShardRange { rows: within(units, rows), ..whole },
            Self::Columns(units) => ShardRange { columns: within(units, columns), ..whole },
            Self::Matrices => ShardRange { matrices: share(matrices, group_rank), ..whole },
            Self::Leader if !group_rank.is_leader() => ShardRange { matrices: 0..0, ..whole },
            Self::Replicated | Self::Leader => whole,
        }
    }
}

impl ShardRange {
    /// Number of elements. Saturates instead of overflowing, for a config so absurd that no file matches it.
    pub fn elements(&self) -> usize {
        [self.dims.parts, self.rows.len(), self.columns.len()]
            .iter()
            .fold(self.matrices.len(), |product, &n| product.saturating_mul(n))
    }

    /// The windows that the rank holds of the matrix with this index, one per part.
    pub fn windows(&self, matrix: usize) -> impl Iterator<Item = Window> {
        let Self { rows, columns, dims, .. } = self.clone();
        let tall = dims.rows / dims.parts.max(1);
        (0..dims.parts).map(move |part| {
            let rows = part * tall + rows.start..part * tall + rows.end;
            Window { matrix, rows, columns: columns.clone(), dims }
        })
    }

    /// The windows that the rank holds of all its matrices, in order.
    pub fn all_windows(&self) -> impl Iterator<Item = Window> {
        self.matrices.clone().flat_map(|matrix| self.windows(matrix))
    }
}

impl Window {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows.len().saturating_mul(self.columns.len())
    }

    /// Returns the window in `tensor`, the bytes of the whole tensor, as it is stored: a window of a transposed matrix
    /// has its outputs as columns.
    pub fn view<'a>(&self, tensor: &'a [u8], dtype: WeightType) -> HostMatrix<'a> {
        let (extent, size) = (self.extent(), dtype.bytes());
        let bytes = &tensor[extent.start * size..extent.end * size];
        HostMatrix { bytes, dtype, ..self.stored() }
    }

    /// Range of the tensor's elements, as they are stored, from the window's first element to its last. Elements of other
    /// columns lie between them.
    pub fn extent(&self) -> Range<usize> {
        let Self { matrix, rows, columns, dims } = self;
        let (row, column) =
            if dims.transposed { (columns.start, rows.start) } else { (rows.start, columns.start) };
        let stored = self.stored();
        let first = matrix * dims.matrix_elements() + row * stored.stride + column;
        let elements = stored.extent().unwrap_or(0) / stored.dtype.bytes();
        if elements == 0 { 0..0 } else { first..first + elements }
    }

    /// The window's shape as it is stored, without its bytes.
    fn stored(&self) -> HostMatrix<'static> {
        let Self { rows, columns, dims, .. } = self;
        let (rows, columns, stride) = match dims.transposed {
            true => (columns.len(), rows.len(), dims.rows),
            false => (rows.len(), columns.len(), dims.columns),
        };
        HostMatrix { bytes: &[], dtype: WeightType::F32, rows, columns, stride }
    }
}

#[cfg(test)]
mod tests;
