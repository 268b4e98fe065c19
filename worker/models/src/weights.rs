//! Sources of weights, and loading onto a device.

mod convert;
mod dummy;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gguf;
mod header;
mod host_window;
pub(crate) mod kv_scales;
mod loader;
mod quantised;
mod read_ahead;
mod safetensors;
mod shard;
mod source;
mod unused;

pub(crate) use convert::{store, widen};
pub(crate) use dummy::Dummy;
pub(crate) use gguf::GgufFile;
pub(crate) use loader::{Loader, Progress, check_groups};
pub(crate) use safetensors::{SafetensorsDir, SourceFile};
pub(crate) use shard::{Cut, Section, ShardRange, Window};
pub(crate) use source::Source;
pub(crate) use tutti_kernels::collective::share;

pub use loader::LoadProgress;
use tutti_kernels::{WeightType, collective::GroupRank};

/// A tensor that a family requires: a vector, a matrix, or a stack of matrices (one per expert).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint, outermost dimension first.
    pub shape: Vec<usize>,
    /// Number and sizes of the matrices in the tensor.
    pub dims: Dims,
    /// Role in the model.
    pub role: Role,
    /// Division among the ranks of a TP group.
    pub cut: Cut,
    /// Precision on the device.
    pub precision: Precision,
    /// Conversion of a vector's stored elements to values on the device.
    pub values: Values,
}

/// A tensor as matrices of the same size. A vector is one matrix with one column, because each element belongs to one
/// output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dims {
    /// Number of matrices: 1, or the number of experts in a stack.
    pub matrices: usize,
    /// Rows (outputs) per matrix.
    pub rows: usize,
    /// Columns (inputs) per matrix.
    pub columns: usize,
    /// Number of parts of equal height, one below another, in each matrix, such as 2 for gate and up. A cut by rows
    /// takes a rank's share of every part.
    pub parts: usize,
    /// True if the checkpoint stores each matrix as `[columns, rows]`.
    pub transposed: bool,
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
    /// A table of indices, stored as integers of 64 bits.
    Indices,
}

/// The precision in which the device holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Precision {
    /// The tensor's stored type or, for a matrix, the quantisation of the load options.
    Configured,
    /// The stored type, even if the load options quantise. Used for a matrix whose quantisation would cost too much
    /// accuracy.
    Stored,
    /// This type, independent of the stored type. An example is a router that is computed in f32.
    Type(WeightType),
}

/// The value on the device for a stored element `x` of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    /// `x`, unchanged.
    AsStored,
    /// `1 + x`: a norm's weight that is stored as its difference from 1.
    PlusOne,
    /// `-exp(x)`: a rate of decay that is stored as its logarithm.
    NegatedExp,
}

impl Values {
    /// Returns the device's value of a stored element.
    pub fn of(self, x: f32) -> f32 {
        match self {
            Self::AsStored => x,
            Self::PlusOne => 1.0 + x,
            Self::NegatedExp => -x.exp(),
        }
    }
}

impl TensorSpec {
    fn new(
        name: impl Into<String>,
        role: Role,
        shape: &[usize],
        [matrices, rows, columns]: [usize; 3],
    ) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            dims: Dims { matrices, rows, columns, parts: 1, transposed: false },
            role,
            cut: Cut::Replicated,
            precision: Precision::Configured,
            values: Values::AsStored,
        }
    }

    /// Returns a replicated matrix `[rows, columns]`.
    pub fn matrix(name: impl Into<String>, role: Role, rows: usize, columns: usize) -> Self {
        Self::new(name, role, &[rows, columns], [1, rows, columns])
    }

    /// Returns a replicated vector.
    pub fn vector(name: impl Into<String>, role: Role, width: usize) -> Self {
        Self::new(name, role, &[width], [1, width, 1])
    }

    /// Sets the division among ranks.
    pub fn cut(self, cut: Cut) -> Self {
        Self { cut, ..self }
    }

    /// Sets the conversion of a vector's elements on the device.
    pub fn with_values(self, values: Values) -> Self {
        Self { values, ..self }
    }

    /// Returns a replicated tensor of any shape as one matrix. The first dimension gives the rows (outputs), and the
    /// product of the other dimensions gives the columns. Used for the weights of convolutions and patch embeddings.
    pub fn flattened(name: impl Into<String>, role: Role, shape: &[usize]) -> Self {
        let rows = shape.first().copied().unwrap_or(1);
        let columns = shape.iter().skip(1).fold(1, |product: usize, &n| product.saturating_mul(n));
        Self::new(name, role, shape, [1, rows, columns])
    }

    /// Returns the part of the tensor that a rank holds.
    pub fn shard_range(&self, group_rank: GroupRank) -> ShardRange {
        self.cut.shard_range(self.dims, group_rank)
    }
}

/// Constructors for families with experts or mixed precision.
impl TensorSpec {
    /// Returns a replicated stack of matrices, stored as one tensor `[matrices, rows, columns]`.
    pub fn stack(name: impl Into<String>, role: Role, shape: [usize; 3]) -> Self {
        Self::new(name, role, &shape, shape)
    }

    /// Sets the number of parts of equal height, one below another, in each matrix.
    pub fn in_parts(mut self, parts: usize) -> Self {
        self.dims.parts = parts;
        self
    }

    /// Marks the tensor as stored transposed: each matrix is `[inputs, outputs]`.
    pub fn transposed(mut self) -> Self {
        self.dims.transposed = true;
        if let [.., rows, columns] = &mut self.shape[..] {
            std::mem::swap(rows, columns);
        }
        self
    }

    /// Sets the precision on the device.
    pub fn held_as(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }
}

impl Dims {
    /// Number of elements of one matrix. The product saturates, because an absurd config may ask for more elements than
    /// a `usize` can count.
    pub fn matrix_elements(self) -> usize {
        self.rows.saturating_mul(self.columns)
    }
}

#[cfg(test)]
mod tests;
