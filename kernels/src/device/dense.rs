//! Operations of dense layers: embedding, norms and matrix products with weights.

use std::ops::Range;

use super::family::family;
use crate::{Device, DeviceError};

/// An RMS norm of each row of a tensor: `x / sqrt(mean(x²) + eps) * weight`.
pub struct Norm<'a, V> {
    /// Weights, one per element of a row.
    pub weight: &'a V,
    /// Epsilon that is added to the mean square.
    pub eps: f32,
}

/// The operands of [`Dense::embed`].
pub struct Embed<'a, M> {
    /// The table of embeddings, `[vocabulary, width]`, or one shard of its rows, from [`Device::table_matrix`] or
    /// [`Device::tied_matrix`].
    pub table: &'a M,
    /// The rows that `table` holds; `None` if it holds the whole vocabulary.
    pub shard: Option<VocabularyShard>,
}

/// One shard of a table with one row per token id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyShard {
    /// Token id of the shard's first row.
    pub first: usize,
    /// Number of rows of the whole table.
    pub vocabulary: usize,
}

/// The operands of a matrix product, `norm(x) · Wᵀ + bias`.
pub struct Linear<'a, T, M, V> {
    /// Input, `[rows, inputs]`.
    pub x: &'a T,
    /// Norm that is applied to the rows of `x` first.
    pub norm: Option<Norm<'a, V>>,
    /// Weight, `[outputs, inputs]`.
    pub weight: &'a M,
    /// Bias, `[outputs]`.
    pub bias: Option<&'a V>,
}

impl<'a, T, M, V> Linear<'a, T, M, V> {
    /// Returns the operands of `x · Wᵀ`, without a norm and without a bias.
    pub fn plain(x: &'a T, weight: &'a M) -> Self {
        Self { x, norm: None, weight, bias: None }
    }
}

/// The operands of [`Dense::gate_up`].
pub struct GateUp<'a, T, M, V> {
    /// Input, `[rows, inputs]`.
    pub x: &'a T,
    /// Norm that is applied to the rows of `x` first.
    pub norm: Option<Norm<'a, V>>,
    /// Gate and up, from [`Device::gate_up_matrix`].
    pub weight: &'a M,
    /// Bound `l`: the gate is at most `l`, and up is in `-l ..= l`, both before the activation. `None` for no bound.
    pub limit: Option<f32>,
}

/// The operands of [`Dense::grouped_linear`].
pub struct GroupedLinear<'a, T, M> {
    /// Input, `[rows, groups * inputs]`.
    pub x: &'a T,
    /// Weight of each group, `[outputs, inputs]`.
    pub weights: &'a [M],
    /// Buffers, which any number of layers may share.
    pub buffers: &'a mut GroupedBuffers<T>,
}

/// Buffers for the rows of each group, one group after the other.
pub struct GroupedBuffers<T> {
    /// Inputs, `[groups * rows, inputs]`.
    pub inputs: T,
    /// Outputs, `[groups * rows, outputs]`.
    pub outputs: T,
}

family! {
    /// Operations of dense layers.
    pub trait Dense {
        /// Computes `out[t] = table[token_ids[t]]`, `[tokens, width]`. If the step has a [shape](crate::StepShape), its
        /// padding becomes live rows after the tokens. This applies to all operations over tokens. The result is zeros
        /// for a token id that a shard does not hold, so that the sum of all ranks' results equals the result with the
        /// whole table.
        fn embed(&mut self, embed: Embed<'_, Self::Matrix>, out: &mut Self::Tensor)
            => |recorder| recorder.by_token();
        /// Computes `out = norm(x)`.
        fn rms_norm(&mut self, x: &Self::Tensor, norm: Norm<'_, Self::Vector>, out: &mut Self::Tensor)
            => |recorder| recorder.by_row(x);
        /// Computes `out = norm(x) · Wᵀ + bias`.
        fn linear(
            &mut self,
            linear: Linear<'_, Self::Tensor, Self::Matrix, Self::Vector>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.product(linear.x, linear.weight);
        /// Computes `out += norm(x) · Wᵀ + bias`: the residual add of attention and MLP outputs.
        fn linear_add(
            &mut self,
            linear: Linear<'_, Self::Tensor, Self::Matrix, Self::Vector>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.product(linear.x, linear.weight);
        /// Computes `out = silu(norm(x) · gateᵀ) * (norm(x) · upᵀ)`, of products within [`GateUp::limit`].
        fn gate_up(
            &mut self,
            gate_up: GateUp<'_, Self::Tensor, Self::Matrix, Self::Vector>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.product(gate_up.x, gate_up.weight);
        /// Computes the product of each group's columns of `x` with the group's weight: the product with a block
        /// diagonal matrix. `out` is `[rows, groups * outputs]`.
        fn grouped_linear(
            &mut self,
            linear: GroupedLinear<'_, Self::Tensor, Self::Matrix>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.products(linear.x, linear.weights);
        /// Computes `x = x * sigmoid(gate)`. `gate` is as wide as `x`, or has one element per row.
        fn sigmoid_gate(&mut self, gate: &Self::Tensor, x: &mut Self::Tensor) => |recorder| recorder.by_row(x);
        /// Keeps only the rows whose logits are needed: computes `x[i] = x[logit_rows[i]]`. Later operations on `x`,
        /// and on tensors computed from `x`, cover `logit_rows.len()` rows, or the padded number of a step with a
        /// [shape](crate::StepShape). The step's `logit_rows` ascend.
        fn keep_logit_rows(&mut self, x: &mut Self::Tensor) => |recorder| recorder.by_row(x);
        /// Computes `out[i] = x[rows.start + i]`. Later operations on `out`, and on tensors computed from `out`, cover
        /// `rows.len()` rows.
        fn copy_rows(&mut self, x: &Self::Tensor, rows: Range<usize>, out: &mut Self::Tensor)
            => |recorder| recorder.by_row(x);
    }
}
