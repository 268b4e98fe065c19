//! Division of tensors among the ranks of a TP group.

use std::ops::Range;

use tutti_kernels::{
    HostMatrix, WeightType,
    collective::{GroupRank, share},
};

use super::Dims;

/// The rule by which one tensor is divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Every rank holds the whole tensor.
    Replicated,
    /// The ranks divide the outputs of each part of each matrix. The outputs form this number of equal units, such as
    /// heads, and no unit is split. In a stack of experts, every rank thus holds a share of every expert.
    Rows(usize),
    /// The ranks divide the inputs of each matrix. The inputs form this number of equal units. The matrix products of
    /// all ranks are summed.
    Columns(usize),
    /// The ranks divide the matrices of a stack. Each rank thus holds whole experts.
    Matrices,
    /// The outputs of each matrix are three sections of different heights, one below another. The ranks divide the
    /// units of each section.
    Sections([Section; 3]),
    /// The outputs of each matrix form `units` equal units, each of `parts` equal parts. The tensor of this spec is the
    /// part with the index `part` of every unit; other specs declare the other parts. The ranks divide the units.
    PartOfRows { units: usize, parts: usize, part: usize },
    /// Only rank 0 holds the tensor. Used for a bias of a matrix product that is summed over ranks, so that the sum
    /// contains the bias once.
    Leader,
}

/// One of several sections of a matrix's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    /// Number of outputs.
    pub rows: usize,
    /// Number of equal units that the outputs form.
    pub units: usize,
}

/// The part of a tensor that a rank holds: a range of the matrices, and the same rows and columns of each matrix in the
/// range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardRange {
    /// Range of matrices.
    pub matrices: Range<usize>,
    /// Ranges of rows of each matrix, ascending.
    pub rows: Vec<Range<usize>>,
    /// Range of columns.
    pub columns: Range<usize>,
    /// Dimensions of the whole tensor.
    pub dims: Dims,
}

/// A window of one matrix of a tensor: consecutive rows and consecutive columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Index of the matrix in the tensor.
    pub matrix: usize,
    /// Range of rows in the whole matrix.
    pub rows: Range<usize>,
    /// Range of columns.
    pub columns: Range<usize>,
    /// Dimensions of the whole tensor.
    pub dims: Dims,
}

impl Cut {
    /// Returns the part of a tensor that a rank holds.
    pub fn shard_range(self, dims: Dims, group_rank: GroupRank) -> ShardRange {
        let Dims { matrices, rows, columns, parts, .. } = dims;
        let height = rows / parts.max(1);
        let within = |units: usize, length: usize| {
            let (share, unit) = (share(units, group_rank), length / units.max(1));
            share.start * unit..share.end * unit
        };
        let moved = |range: Range<usize>, by: usize| range.start + by..range.end + by;
        let of_parts =
            |range: Range<usize>| (0..parts).map(|part| moved(range.clone(), part * height)).collect();
        let whole =
            ShardRange { matrices: 0..matrices, rows: of_parts(0..height), columns: 0..columns, dims };
        match self {
            Self::Rows(units) => ShardRange { rows: of_parts(within(units, height)), ..whole },
            Self::Sections(sections) => {
                let first = |index: usize| sections[..index].iter().map(|section| section.rows).sum();
                let section = |(index, Section { rows, units })| moved(within(units, rows), first(index));
                ShardRange { rows: sections.into_iter().enumerate().map(section).collect(), ..whole }
            }
            Self::PartOfRows { units, parts, part } => {
                let height = rows / units.max(1) / parts.max(1);
                let of_unit = |unit: usize| moved(0..height, (unit * parts + part) * height);
                ShardRange { rows: share(units, group_rank).map(of_unit).collect(), ..whole }
            }
            Self::Columns(units) => ShardRange { columns: within(units, columns), ..whole },
            Self::Matrices => ShardRange { matrices: share(matrices, group_rank), ..whole },
            Self::Leader if !group_rank.is_leader() => ShardRange { matrices: 0..0, ..whole },
            Self::Replicated | Self::Leader => whole,
        }
    }
}

impl ShardRange {
    /// Number of elements. The product saturates, because an absurd config may ask for more elements than a `usize` can
    /// count.
    pub fn elements(&self) -> usize {
        let rows = self.rows.iter().fold(0, |sum: usize, rows| sum.saturating_add(rows.len()));
        [rows, self.columns.len()].iter().fold(self.matrices.len(), |product, &n| product.saturating_mul(n))
    }

    /// Returns the windows that the rank holds of the matrix with this index, one per range of rows.
    pub fn windows(&self, matrix: usize) -> impl Iterator<Item = Window> {
        let Self { rows, columns, dims, .. } = self.clone();
        rows.into_iter().map(move |rows| Window { matrix, rows, columns: columns.clone(), dims })
    }

    /// Returns the windows of all matrices that the rank holds, in order.
    pub fn all_windows(&self) -> impl Iterator<Item = Window> {
        self.matrices.clone().flat_map(|matrix| self.windows(matrix))
    }
}

impl Window {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows.len().saturating_mul(self.columns.len())
    }

    /// Returns the window in `tensor`, the bytes of the whole tensor, in the stored layout. In a transposed matrix, the
    /// window's columns are outputs.
    pub fn view<'a>(&self, tensor: &'a [u8], dtype: WeightType) -> HostMatrix<'a> {
        let (extent, size) = (self.extent(), dtype.bytes());
        let bytes = &tensor[extent.start * size..extent.end * size];
        HostMatrix { bytes, dtype, ..self.stored() }
    }

    /// Returns the range of the tensor's stored elements from the window's first element to its last. The range may
    /// contain elements of other columns.
    pub fn extent(&self) -> Range<usize> {
        let Self { matrix, rows, columns, dims } = self;
        let (row, column) =
            if dims.transposed { (columns.start, rows.start) } else { (rows.start, columns.start) };
        let stored = self.stored();
        let first = matrix * dims.matrix_elements() + row * stored.stride + column;
        let elements = stored.extent().unwrap_or(0) / stored.dtype.bytes();
        if elements == 0 { 0..0 } else { first..first + elements }
    }

    /// Returns the window's shape in the stored layout, with no bytes.
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
