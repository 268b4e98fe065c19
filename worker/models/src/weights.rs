//! Sources of weights, and loading onto a device.

mod dummy;
mod header;
mod loader;
mod safetensors;
mod shard;

pub(crate) use dummy::Dummy;
pub(crate) use loader::{Loader, Progress, Source};
pub(crate) use safetensors::SafetensorsDir;
pub(crate) use shard::{Cut, ShardRange, share};

pub use loader::LoadProgress;
use tutti_kernels::collective::GroupRank;

/// A tensor that a family requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint: `[outputs, inputs]` of a matrix, `[width]` of a vector.
    pub shape: Vec<usize>,
    /// Role in the model.
    pub role: Role,
    /// Division among the ranks of a TP group.
    pub cut: Cut,
}

/// The role of a tensor in the model. It determines the distribution of dummy weights, so that activations stay near
/// unit size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// An embedding: one row per vocabulary id.
    Embedding,
    /// A linear map.
    Projection,
    /// A norm's weight.
    Norm,
    /// A linear map's bias.
    Bias,
}

impl TensorSpec {
    /// Returns a replicated matrix `[rows, columns]`.
    pub fn matrix(name: impl Into<String>, role: Role, rows: usize, columns: usize) -> Self {
        Self { name: name.into(), shape: vec![rows, columns], role, cut: Cut::Replicated }
    }

    /// Returns a replicated vector.
    pub fn vector(name: impl Into<String>, role: Role, width: usize) -> Self {
        Self { name: name.into(), shape: vec![width], role, cut: Cut::Replicated }
    }

    /// Sets the division among ranks.
    pub fn cut(self, cut: Cut) -> Self {
        Self { cut, ..self }
    }

    /// Returns the rows and columns that a rank holds.
    pub fn shard_range(&self, group_rank: GroupRank) -> ShardRange {
        let (rows, columns) = match self.shape[..] {
            [rows, columns] => (rows, columns),
            // A vector is cut as a matrix of one column: each element belongs to one output.
            _ => (self.elements(), 1),
        };
        self.cut.shard_range(rows, columns, group_rank)
    }

    /// Number of elements. Saturates instead of overflowing, for a config so absurd that no file matches it.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1, |product, &n| product.saturating_mul(n))
    }

    /// Returns the numbers of rows and columns; a vector is one row.
    fn rows_columns(&self) -> (usize, usize) {
        match self.shape[..] {
            [rows, columns] => (rows, columns),
            _ => (1, self.elements()),
        }
    }
}
