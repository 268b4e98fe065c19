//! The gated delta rule: layers whose state is a matrix per head, in the slots of requests.
//!
//! Paper: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, §3. Reference: transformers
//! `models/qwen3_5/modeling_qwen3_5.py`.

use super::dense::Norm;
use super::family::family;
use crate::{Device, DeviceError};

/// The heads of one layer with a gated delta rule.
///
/// A token's fused projections are `[q | k | v | z | b | a]`. q and k are `key_heads * key_dim` wide. v and the output
/// gate z are `value_heads * value_dim` wide. b and a have one element per value head. Value head `h` reads key head
/// `h / (value_heads / key_heads)`.
///
/// A request's state is in three slot planes, from the operand `plane` on. The first holds the last `taps - 1` inputs
/// of the convolutions of q and k: per key head `[q | k]`, each `[taps - 1, key_dim]`. The second holds the last
/// `taps - 1` inputs of the convolution of v: per value head `[taps - 1, value_dim]`. The third holds the state matrix
/// (*memory*) of each value head, `[key_dim, value_dim]`. All are f32, layer by layer. A request without tokens has a
/// state of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Number of heads of q and k.
    pub key_heads: usize,
    /// Number of heads of v, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements per head of q and k.
    pub key_dim: usize,
    /// Elements per head of v.
    pub value_dim: usize,
    /// Number of inputs that each output of the convolution depends on, at least 1.
    pub taps: usize,
}

impl DeltaShape {
    /// Returns an error unless all numbers are positive and `value_heads` is a multiple of `key_heads`.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let Self { key_heads, value_heads, key_dim, value_dim, taps } = *self;
        if [key_heads, value_heads, key_dim, value_dim, taps].contains(&0)
            || !value_heads.is_multiple_of(key_heads)
        {
            return Err(DeviceError::Misuse(format!("a delta rule of {self:?}")));
        }
        Ok(())
    }

    /// Number of convolved channels: those of q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Number of elements of v, of z and of a layer's output.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Number of elements of a token's fused projections.
    pub fn projected(&self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }

    /// Number of elements of a token's inputs of the delta rule.
    pub fn inputs(&self) -> usize {
        self.channels() + 2 * self.value_heads
    }

    /// Bytes per key head and layer of the first slot plane, which holds inputs of the convolutions of q and k.
    pub fn key_conv_bytes(&self) -> usize {
        2 * (self.taps.max(1) - 1) * self.key_dim * size_of::<f32>()
    }

    /// Bytes per value head and layer of the second slot plane, which holds inputs of the convolution of v.
    pub fn value_conv_bytes(&self) -> usize {
        (self.taps.max(1) - 1) * self.value_dim * size_of::<f32>()
    }

    /// Bytes per value head and layer of the third slot plane, which holds the state matrices.
    pub fn memory_bytes(&self) -> usize {
        self.key_dim * self.value_dim * size_of::<f32>()
    }
}

/// The operands of [`DeltaRule::delta_rule`].
pub struct GatedDelta<'a, T, V, P> {
    /// Fused projections of the step's tokens, `[tokens, shape.projected()]`.
    pub projected: &'a T,
    /// The layer's heads.
    pub shape: DeltaShape,
    /// Weights of the convolutions, `[taps, channels]`, the oldest input first.
    pub taps: &'a V,
    /// Rate of decay of each value head, below 0.
    pub rate: &'a V,
    /// Bias of a, one per value head.
    pub bias: &'a V,
    /// Receives the inputs of the delta rule, `[q | k | v | decay | beta]` per token: `[tokens, shape.inputs()]`.
    pub inputs: &'a mut T,
    /// Planes whose slots hold the last inputs of the convolutions and the state matrices.
    pub planes: &'a mut P,
    /// Index of the first of the three slot planes.
    pub plane: usize,
    /// Index of the layer among the layers with a delta rule.
    pub layer: usize,
}

/// The operands of [`DeltaRule::gated_norm`].
pub struct GatedNorm<'a, T, V> {
    /// Tensor that holds the gates in consecutive columns.
    pub gate: &'a T,
    /// Column of the first gate.
    pub column: usize,
    /// Norm of each head. Its weight is as wide as a head.
    pub norm: Norm<'a, V>,
}

family! {
    /// The gated delta rule over the tokens of each request. The order of all operations is the same in prefill and in
    /// decode, so neither chunks nor the other rows of a step change a bit. Rows with the null slot have results of
    /// zero, and change no state.
    pub trait DeltaRule {
        /// Computes the inputs of the delta rule, and applies the rule to the state matrices.
        ///
        /// For the inputs, q, k and v go through a causal convolution per channel and SiLU. Each head of q and k is
        /// then divided by `sqrt(Σx² + 1e-6)`, and q is multiplied by `1 / sqrt(key_dim)`. `decay = exp(rate *
        /// softplus(a + bias))` and `beta = sigmoid(b)`, each one per value head. The slots receive the last inputs of
        /// the convolutions.
        ///
        /// Then, for each token in order and each value head with state matrix `S`: `S = decay * S`,
        /// `S += k ⊗ (v - Sᵀk) * beta`, `out = Sᵀq`. `out` is `[tokens, value_heads * value_dim]`.
        fn delta_rule(
            &mut self,
            operands: GatedDelta<'_, Self::Tensor, Self::Vector, Self::Planes>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.delta_rule(&operands.shape);
        /// Computes `x = norm(x) * silu(gate)`, head by head.
        fn gated_norm(&mut self, operands: GatedNorm<'_, Self::Tensor, Self::Vector>, x: &mut Self::Tensor)
            => |recorder| recorder.by_row(x);
    }
}
