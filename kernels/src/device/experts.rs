//! Mixtures of experts: MLPs of which each token uses a few.

use super::family::family;
use crate::{Device, DeviceError};

/// The number of a token's experts, and their weights by a router's logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Number of experts per token.
    pub top_k: usize,
    /// The function from logits to scores, which become weights.
    pub score: Score,
    /// True if the weights of a token's experts are divided by their sum plus 1e-20.
    pub renormalise: bool,
    /// Factor by which the weights are multiplied in the end.
    pub scale: f32,
}

impl Routing {
    /// Returns the routing by a softmax over all experts, without further steps.
    pub const fn softmax(top_k: usize) -> Self {
        Self { top_k, score: Score::Softmax, renormalise: false, scale: 1.0 }
    }
}

/// The function from the logits of a row to the scores of the experts, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// The softmax over all experts.
    Softmax,
    /// `sqrt(ln(1 + e^logit))`, each expert for itself. Reference: transformers
    /// `models/deepseek_v4/modular_deepseek_v4.py`.
    SqrtSoftplus,
}

/// The rule that chooses a token's experts.
pub enum ExpertChoice<'a, V> {
    /// The experts with the largest scores; of equal scores the lower index wins.
    Largest {
        /// Term of each expert, `[experts]`, that is added to its score for the choice alone. The weights do not
        /// contain it.
        bias: Option<&'a V>,
    },
    /// The experts in the token id's row of this table, `[vocabulary, top_k]`. Its elements are indices of experts,
    /// which f32 represents exactly. A row names no expert twice. The rows of the operation are the tokens of the step:
    /// this choice cannot be made behind [`Dense::keep_logit_rows`](crate::Dense::keep_logit_rows).
    ByToken(&'a V),
}

/// Buffers for the intermediate results of one expert. A token chooses an expert at most once, so each buffer has room
/// for the tokens of the largest step.
pub struct ExpertBuffers<T> {
    /// Inputs of the expert's tokens, `[tokens, width]`.
    pub inputs: T,
    /// Gated activations, `[tokens, intermediate]`.
    pub activated: T,
    /// Outputs of the expert, `[tokens, width]`.
    pub outputs: T,
}

/// The operands of [`Experts::mix_experts`].
pub struct MixExperts<'a, T, M, V> {
    /// Input, `[rows, width]`.
    pub x: &'a T,
    /// Number of rows that choose experts. Later rows are padding: their outputs are zeros, and they are not counted.
    pub valid_rows: usize,
    /// Logits of the router, `[rows, experts]`.
    pub logits: &'a T,
    /// The number of experts per token, and their weights.
    pub routing: Routing,
    /// The choice of experts.
    pub choice: ExpertChoice<'a, V>,
    /// Bound of gate and up: see [`GateUp::limit`](crate::GateUp::limit).
    pub limit: Option<f32>,
    /// Index of the first expert that this rank holds: 0 unless the ranks divide whole experts among themselves.
    pub first: usize,
    /// Gate and up of each expert that this rank holds, from [`Device::gate_up_matrix`].
    pub gate_up: &'a [M],
    /// Down projection of each expert that this rank holds, `[width, intermediate]`.
    pub down: &'a [M],
    /// Buffers, which any number of layers may share.
    pub buffers: &'a mut ExpertBuffers<T>,
    /// Index of the layer, for [`Experts::expert_tokens`].
    pub layer: usize,
}

/// Sizes of the operands of [`Experts::mix_experts`].
pub(crate) struct MixSizes {
    /// Live rows of the input, and of the router's logits.
    pub rows: usize,
    pub logit_rows: usize,
    pub valid_rows: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Index of the first expert that this rank holds. `held` counts the rank's gate and up matrices, and its down
    /// matrices.
    pub first: usize,
    pub held: [usize; 2],
}

impl MixSizes {
    /// Returns an error for operands that do not fit each other.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let Self { rows, logit_rows, valid_rows, experts, top_k, first, held } = *self;
        let refuse = |why: String| Err(DeviceError::Misuse(why));
        if logit_rows != rows {
            return refuse(format!("{logit_rows} rows of router logits for {rows} rows"));
        }
        if top_k == 0 || top_k > experts {
            return refuse(format!("{top_k} of {experts} experts per token"));
        }
        if held[0] != held[1] || first.checked_add(held[0]).is_none_or(|end| end > experts) {
            return refuse(format!("matrices of {held:?} experts from {first} on, of {experts}"));
        }
        if valid_rows > rows {
            return refuse(format!("{valid_rows} valid rows of {rows}"));
        }
        Ok(())
    }
}

family! {
    /// Operations of mixtures of experts.
    pub trait Experts {
        /// Computes `out[t] = Σ w[e] · down[e](silu(gate[e](x[t])) * up[e](x[t]))` over those experts `e` of token `t`
        /// that this rank holds, in ascending order.
        ///
        /// [`MixExperts::choice`] names the `top_k` experts of a token. `w` is the score of the expert's logit
        /// ([`Routing::score`]) in f32, divided by its sum over the token's experts if [`Routing::renormalise`] is
        /// true, times [`Routing::scale`]. An expert without tokens is not read. The `w` of a row with a logit that is
        /// NaN or positive infinity are NaN.
        fn mix_experts(
            &mut self,
            mix: MixExperts<'_, Self::Tensor, Self::Matrix, Self::Vector>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.experts(mix.x, mix.routing.top_k, mix.gate_up, mix.down);
        /// Sets `out` to the number of tokens that chose each expert of a layer since the device was created. `out` is
        /// empty if the layer has not run. Does not wait, so the tokens of a step that is not collected may be missing.
        fn expert_tokens(&mut self, layer: usize, out: &mut Vec<u64>) => |recorder| recorder.by_token();
    }
}
