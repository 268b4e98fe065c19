//! Where weights come from, and how they are handed to a device.

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

/// A tensor that a family expects to find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape there: `[outputs, inputs]` of a matrix, `[width]` of a vector.
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
    /// How it is divided among the ranks of a TP group.
    pub cut: Cut,
}

/// What a tensor is for. Dummy weights are drawn accordingly, so that activations keep a sane size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A row for each vocabulary id.
    Embedding,
    /// A linear map.
    Projection,
    /// A norm's weight.
    Norm,
    /// A linear map's bias.
    Bias,
}

impl TensorSpec {
    /// A matrix `[rows, columns]`.
    pub fn matrix(name: impl Into<String>, role: Role, rows: usize, columns: usize) -> Self {
        Self { name: name.into(), shape: vec![rows, columns], role, cut: Cut::Replicated }
    }

    /// A vector.
    pub fn vector(name: impl Into<String>, role: Role, width: usize) -> Self {
        Self { name: name.into(), shape: vec![width], role, cut: Cut::Replicated }
    }

    /// The same tensor, divided this way.
    pub fn cut(self, cut: Cut) -> Self {
        Self { cut, ..self }
    }

    /// What a rank holds of it.
    pub fn shard_range(&self, group_rank: GroupRank) -> ShardRange {
        let (rows, columns) = match self.shape[..] {
            [rows, columns] => (rows, columns),
            // Each element is an output of its own.
            _ => (self.elements(), 1),
        };
        self.cut.shard_range(rows, columns, group_rank)
    }

    /// How many elements it has; saturates where a config is absurd, and then no file matches.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1, |product, &n| product.saturating_mul(n))
    }

    /// `[rows, columns]`; a vector is one row.
    fn rows_columns(&self) -> (usize, usize) {
        match self.shape[..] {
            [rows, columns] => (rows, columns),
            _ => (1, self.elements()),
        }
    }
}
