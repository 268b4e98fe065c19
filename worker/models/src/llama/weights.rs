//! The tensors of the layers of a checkpoint: their names, their division among ranks, and their fusion on a
//! device.
//!
//! The division among ranks is Megatron's (arXiv:1909.08053). The ranks divide the outputs of q, k, v, gate and up, and
//! the inputs of o and down. Each layer thus needs two sums over ranks. Norms are replicated.

use tutti_kernels::{Device, HeadNorms, collective::GroupRank};

use super::config::Config;
use crate::{
    LoadError,
    config::text::TextConfig,
    experts::{ExpertLayout, ExpertSpecs, ExpertWeights},
    weights::{Cut, Loader, Role, TensorSpec},
};

/// The tensors of one layer.
pub(crate) struct LayerSpecs {
    input_norm: TensorSpec,
    qkv: [TensorSpec; 3],
    qkv_bias: Option<[TensorSpec; 3]>,
    head_norms: Option<[TensorSpec; 2]>,
    o: TensorSpec,
    o_bias: Option<TensorSpec>,
    post_norm: TensorSpec,
    mlp: MlpSpecs,
}

/// The tensors of one layer's MLP.
enum MlpSpecs {
    Dense(Box<DenseSpecs>),
    Experts(Box<ExpertSpecs>),
}

/// The tensors of a dense MLP.
struct DenseSpecs {
    gate_up: [TensorSpec; 2],
    down: TensorSpec,
}

/// The name of a layer's MLP in the checkpoint.
pub(super) fn mlp_name(config: &Config, layer: usize) -> String {
    format!("{}layers.{layer}.mlp", config.variant.names.prefix)
}

impl LayerSpecs {
    /// Declares the tensors of a layer that a rank loads. `layout` is the layout of the experts, if the layer has
    /// experts.
    pub fn new(config: &Config, layer: usize, layout: ExpertLayout, rank: GroupRank) -> Self {
        let TextConfig { hidden_size: hidden, heads, kv_heads, head_dim, .. } = config.text;
        let (intermediate, columns) = (config.intermediate_size, Cut::Columns(heads));
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let (heads, kv_heads) = (Cut::Rows(heads), Cut::Rows(kv_heads));
        let name = |tensor: &str| format!("{}layers.{layer}.{tensor}", config.variant.names.prefix);
        let linear = |module: &str, outputs, inputs, cut| {
            TensorSpec::matrix(name(&format!("{module}.weight")), Role::Projection, outputs, inputs).cut(cut)
        };
        let norm =
            |module: &str, width| TensorSpec::vector(name(&format!("{module}.weight")), Role::Norm, width);
        let bias = |module: &str, width, cut| {
            TensorSpec::vector(name(&format!("{module}.bias")), Role::Bias, width).cut(cut)
        };
        Self {
            input_norm: norm("input_layernorm", hidden),
            qkv: [
                linear("self_attn.q_proj", q, hidden, heads),
                linear("self_attn.k_proj", kv, hidden, kv_heads),
                linear("self_attn.v_proj", kv, hidden, kv_heads),
            ],
            qkv_bias: config.qkv_bias.then(|| {
                [
                    bias("self_attn.q_proj", q, heads),
                    bias("self_attn.k_proj", kv, kv_heads),
                    bias("self_attn.v_proj", kv, kv_heads),
                ]
            }),
            head_norms: config
                .variant
                .head_norms
                .then(|| ["self_attn.q_norm", "self_attn.k_norm"].map(|module| norm(module, head_dim))),
            o: linear("self_attn.o_proj", hidden, q, columns),
            o_bias: config.o_bias.then(|| bias("self_attn.o_proj", hidden, Cut::Leader)),
            post_norm: norm("post_attention_layernorm", hidden),
            mlp: match &config.moe {
                Some(moe) if moe.sparse[layer] => {
                    let specs = ExpertSpecs::new(&mlp_name(config, layer), &moe.shape, layout, rank);
                    MlpSpecs::Experts(Box::new(specs))
                }
                _ => MlpSpecs::Dense(Box::new(DenseSpecs {
                    gate_up: ["mlp.gate_proj", "mlp.up_proj"]
                        .map(|module| linear(module, intermediate, hidden, Cut::Rows(intermediate))),
                    down: linear("mlp.down_proj", hidden, intermediate, Cut::Columns(intermediate)),
                })),
            },
        }
    }

    /// Returns all tensors, in the order of loading.
    pub fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        let mlp: Box<dyn Iterator<Item = &TensorSpec>> = match &self.mlp {
            MlpSpecs::Dense(dense) => Box::new(dense.gate_up.iter().chain([&dense.down])),
            MlpSpecs::Experts(experts) => Box::new(experts.all()),
        };
        std::iter::once(&self.input_norm)
            .chain(&self.qkv)
            .chain(self.qkv_bias.iter().flatten())
            .chain(self.head_norms.iter().flatten())
            .chain([&self.o])
            .chain(&self.o_bias)
            .chain([&self.post_norm])
            .chain(mlp)
    }
}

/// One layer's weights on a device. The shapes below are for a group of one rank.
pub(super) struct Layer<D: Device> {
    pub input_norm: D::Vector,
    /// q, k and v fused: `[(heads + 2 * kv_heads) * head_dim, hidden]`.
    pub qkv: D::Matrix,
    pub qkv_bias: Option<D::Vector>,
    /// Norms of the heads of q and of k.
    head_norms: Option<[D::Vector; 2]>,
    /// Output projection of the attention, `[hidden, heads * head_dim]`.
    pub o: D::Matrix,
    /// Bias of the output projection o. Only rank 0 holds it, so that the sum over ranks adds it once.
    pub o_bias: Option<D::Vector>,
    pub post_norm: D::Vector,
    pub mlp: Mlp<D>,
}

/// The weights of one layer's MLP.
pub(super) enum Mlp<D: Device> {
    Dense {
        /// gate and up fused: `[2 * intermediate, hidden]`.
        gate_up: D::Matrix,
        /// Down projection, `[hidden, intermediate]`.
        down: D::Matrix,
    },
    Experts(ExpertWeights<D>),
}

impl<D: Device> Layer<D> {
    pub fn load(specs: &LayerSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        Ok(Self {
            input_norm: loader.vector(&[&specs.input_norm])?,
            qkv: loader.matrix(&specs.qkv.each_ref())?,
            qkv_bias: specs.qkv_bias.as_ref().map(|biases| loader.vector(&biases.each_ref())).transpose()?,
            head_norms: match &specs.head_norms {
                Some([q, k]) => Some([loader.vector(&[q])?, loader.vector(&[k])?]),
                None => None,
            },
            o: loader.matrix(&[&specs.o])?,
            o_bias: specs
                .o_bias
                .as_ref()
                .filter(|_| loader.group_rank().is_leader())
                .map(|spec| loader.vector(&[spec]))
                .transpose()?,
            post_norm: loader.vector(&[&specs.post_norm])?,
            mlp: match &specs.mlp {
                MlpSpecs::Dense(dense) => Mlp::Dense {
                    gate_up: loader.gate_up(dense.gate_up.each_ref())?,
                    down: loader.matrix(&[&dense.down])?,
                },
                MlpSpecs::Experts(specs) => Mlp::Experts(ExpertWeights::load(specs, loader)?),
            },
        })
    }

    /// Returns the norms that apply to each head of q and of k, if the family has them.
    pub fn head_norms(&self, eps: f32) -> Option<HeadNorms<'_, D::Vector>> {
        self.head_norms.as_ref().map(|[q, k]| HeadNorms { q, k, eps })
    }
}
