//! The tensors of the layers of a Qwen3.5 checkpoint: their names, their division among ranks, and their fusion on a
//! device.
//!
//! The division among ranks is Megatron's (arXiv:1909.08053), by heads: a rank holds whole heads of the attention and
//! of the delta net. The channels of the convolutions and the state are divided in the same way.

use tutti_kernels::{Device, HeadNorms, WeightType, collective::GroupRank};

use super::{LayerKind, config::Config};
use crate::{
    LoadError,
    config::text::TextConfig,
    experts::{ExpertLayout, ExpertSpecs, ExpertWeights},
    weights::{Cut, Loader, Precision, Role, Section, TensorSpec, Values},
};

/// The tensors of one layer.
pub(crate) struct LayerSpecs {
    input_norm: TensorSpec,
    mixer: MixerSpecs,
    post_norm: TensorSpec,
    /// Gate and up of the dense MLP or of the shared expert.
    gate_up: [TensorSpec; 2],
    down: TensorSpec,
    /// Gate of the shared expert, and the routed experts. `None` in a dense model.
    mixture: Option<(TensorSpec, ExpertSpecs)>,
}

/// The name of a layer's MLP in the checkpoint.
pub(super) fn mlp_name(prefix: &str, layer: usize) -> String {
    format!("{prefix}layers.{layer}.mlp")
}

/// The tensors of the sublayer that mixes tokens.
enum MixerSpecs {
    Full {
        /// q, k and v.
        qkv: Vec<TensorSpec>,
        gate: TensorSpec,
        q_norm: TensorSpec,
        k_norm: TensorSpec,
        o: TensorSpec,
    },
    Delta {
        /// Four tensors: one of q, k and v, and one each of z, b and a.
        inward: Vec<TensorSpec>,
        taps: TensorSpec,
        rate: TensorSpec,
        bias: TensorSpec,
        norm: TensorSpec,
        out: TensorSpec,
    },
}

impl LayerSpecs {
    /// Declares the tensors of a layer that a rank loads. `layout` is the layout of the experts, if the model has
    /// experts.
    pub fn new(config: &Config, layer: usize, layout: ExpertLayout, rank: GroupRank) -> Self {
        let (hidden, intermediate) = (config.text.hidden_size, config.intermediate_size);
        let names = Names { prefix: config.prefix, layer };
        let mlp = if config.experts.is_some() { "mlp.shared_expert" } else { "mlp" };
        let linear = |module: &str, outputs, inputs, cut| {
            names.matrix(&format!("{mlp}.{module}"), outputs, inputs, cut)
        };
        let mixture = |shape| {
            // The gate is a single row, so its quantisation would save no memory. The device holds it in f32, like the
            // router.
            let gate = names.matrix("mlp.shared_expert_gate", 1, hidden, Cut::Replicated);
            let gate = gate.held_as(Precision::Type(WeightType::F32));
            (gate, ExpertSpecs::new(&mlp_name(config.prefix, layer), shape, layout, rank))
        };
        Self {
            input_norm: names.norm("input_layernorm", hidden),
            mixer: match config.layers[layer] {
                LayerKind::Full => MixerSpecs::full(config, names),
                LayerKind::Delta => MixerSpecs::delta(config, names),
            },
            post_norm: names.norm("post_attention_layernorm", hidden),
            gate_up: [
                linear("gate_proj", intermediate, hidden, Cut::Rows(intermediate)),
                linear("up_proj", intermediate, hidden, Cut::Rows(intermediate)),
            ],
            down: linear("down_proj", hidden, intermediate, Cut::Columns(intermediate)),
            mixture: config.experts.as_ref().map(mixture),
        }
    }

    /// Returns all tensors, in the order of loading.
    pub fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        let Self { input_norm, mixer, post_norm, gate_up, down, mixture } = self;
        let mixture = mixture.iter().flat_map(|(gate, experts)| [gate].into_iter().chain(experts.all()));
        std::iter::once(input_norm)
            .chain(mixer.all())
            .chain([post_norm])
            .chain(gate_up)
            .chain([down])
            .chain(mixture)
    }
}

/// The names of one layer's tensors.
#[derive(Clone, Copy)]
struct Names {
    prefix: &'static str,
    layer: usize,
}

impl Names {
    fn tensor(self, name: &str) -> String {
        format!("{}layers.{}.{name}", self.prefix, self.layer)
    }

    fn matrix(self, module: &str, outputs: usize, inputs: usize, cut: Cut) -> TensorSpec {
        let name = self.tensor(&format!("{module}.weight"));
        TensorSpec::matrix(name, Role::Projection, outputs, inputs).cut(cut)
    }

    /// Returns the tensor of a norm whose weight is stored as its difference from 1.
    fn norm(self, module: &str, width: usize) -> TensorSpec {
        let name = self.tensor(&format!("{module}.weight"));
        TensorSpec::vector(name, Role::Norm, width).with_values(Values::PlusOne)
    }
}

impl MixerSpecs {
    fn full(config: &Config, names: Names) -> Self {
        let TextConfig { hidden_size: hidden, heads, kv_heads, head_dim: dim, .. } = config.text;
        // In the stored matrix, the first half of each head's rows is the head's query, and the second half its gate.
        let half = |part| {
            let cut = Cut::PartOfRows { units: heads, parts: 2, part };
            names.matrix("self_attn.q_proj", 2 * heads * dim, hidden, cut)
        };
        let of_kv = |module| names.matrix(module, kv_heads * dim, hidden, Cut::Rows(kv_heads));
        Self::Full {
            qkv: vec![half(0), of_kv("self_attn.k_proj"), of_kv("self_attn.v_proj")],
            gate: half(1),
            q_norm: names.norm("self_attn.q_norm", dim),
            k_norm: names.norm("self_attn.k_norm", dim),
            o: names.matrix("self_attn.o_proj", hidden, heads * dim, Cut::Columns(heads)),
        }
    }

    fn delta(config: &Config, names: Names) -> Self {
        let (hidden, shape) = (config.text.hidden_size, config.delta);
        let (keys, values) = (shape.key_heads, shape.value_heads);
        let of_keys = Section { rows: keys * shape.key_dim, units: keys };
        let of_values = Section { rows: shape.values(), units: values };
        let qkv = Cut::Sections([of_keys, of_keys, of_values]);
        let of_heads = |module, width| names.matrix(module, values * width, hidden, Cut::Rows(values));
        let vector =
            |name: &str| TensorSpec::vector(names.tensor(name), Role::Bias, values).cut(Cut::Rows(values));
        let shape_of_taps = [shape.channels(), 1, shape.taps];
        let taps = names.tensor("linear_attn.conv1d.weight");
        let norm = names.tensor("linear_attn.norm.weight");
        Self::Delta {
            inward: vec![
                names.matrix("linear_attn.in_proj_qkv", shape.channels(), hidden, qkv),
                of_heads("linear_attn.in_proj_z", shape.value_dim),
                of_heads("linear_attn.in_proj_b", 1),
                of_heads("linear_attn.in_proj_a", 1),
            ],
            taps: TensorSpec::flattened(taps, Role::Projection, &shape_of_taps).cut(qkv),
            rate: vector("linear_attn.A_log").with_values(Values::NegatedExp),
            bias: vector("linear_attn.dt_bias"),
            norm: TensorSpec::vector(norm, Role::Norm, shape.value_dim),
            out: names.matrix("linear_attn.out_proj", hidden, shape.values(), Cut::Columns(values)),
        }
    }

    fn all(&self) -> Vec<&TensorSpec> {
        match self {
            Self::Full { qkv, gate, q_norm, k_norm, o } => {
                qkv.iter().chain([gate, q_norm, k_norm, o]).collect()
            }
            Self::Delta { inward, taps, rate, bias, norm, out } => {
                inward.iter().chain([taps, rate, bias, norm, out]).collect()
            }
        }
    }
}

/// One layer's weights on a device. The shapes below are for a group of one rank.
pub(super) struct Layer<D: Device> {
    pub input_norm: D::Vector,
    pub mixer: Mixer<D>,
    pub post_norm: D::Vector,
    /// gate and up fused: `[2 * intermediate, hidden]`.
    pub gate_up: D::Matrix,
    /// Down projection, `[hidden, intermediate]`.
    pub down: D::Matrix,
    /// `None` in a dense model.
    pub mixture: Option<MixtureWeights<D>>,
}

/// The weights of a mixture of experts, without those of the shared expert.
pub(super) struct MixtureWeights<D: Device> {
    /// Gate of the shared expert, `[1, hidden]`.
    pub gate: D::Matrix,
    pub experts: ExpertWeights<D>,
}

/// The sublayer that mixes tokens.
pub(super) enum Mixer<D: Device> {
    Full(AttentionWeights<D>),
    Delta(DeltaWeights<D>),
}

/// The weights of gated attention.
pub(super) struct AttentionWeights<D: Device> {
    /// q, k and v fused: `[(heads + 2 * kv_heads) * head_dim, hidden]`.
    pub qkv: D::Matrix,
    /// Gate of the attention's output, `[heads * head_dim, hidden]`.
    pub gate: D::Matrix,
    q_norm: D::Vector,
    k_norm: D::Vector,
    /// Output projection, `[hidden, heads * head_dim]`.
    pub o: D::Matrix,
}

/// The weights of a gated delta net.
pub(super) struct DeltaWeights<D: Device> {
    /// q, k, v, z, b and a fused: `[projected, hidden]`.
    pub inward: D::Matrix,
    /// Weights of the convolutions, `[taps, channels]`.
    pub taps: D::Vector,
    /// Rate of decay of each value head.
    pub rate: D::Vector,
    /// Bias of the projection a, one number per value head.
    pub bias: D::Vector,
    /// Norm of a head's output, `[value_dim]`.
    pub norm: D::Vector,
    /// Output projection, `[hidden, value_heads * value_dim]`.
    pub out: D::Matrix,
}

impl<D: Device> Layer<D> {
    pub fn load(specs: &LayerSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        let input_norm = loader.vector(&[&specs.input_norm])?;
        let mixer = match &specs.mixer {
            MixerSpecs::Full { qkv, gate, q_norm, k_norm, o } => Mixer::Full(AttentionWeights {
                qkv: loader.matrix(&qkv.iter().collect::<Vec<_>>())?,
                gate: loader.matrix(&[gate])?,
                q_norm: loader.vector(&[q_norm])?,
                k_norm: loader.vector(&[k_norm])?,
                o: loader.matrix(&[o])?,
            }),
            MixerSpecs::Delta { inward, taps, rate, bias, norm, out } => Mixer::Delta(DeltaWeights {
                inward: loader.matrix(&inward.iter().collect::<Vec<_>>())?,
                taps: loader.columns(taps)?,
                rate: loader.vector(&[rate])?,
                bias: loader.vector(&[bias])?,
                norm: loader.vector(&[norm])?,
                out: loader.matrix(&[out])?,
            }),
        };
        Ok(Self {
            input_norm,
            mixer,
            post_norm: loader.vector(&[&specs.post_norm])?,
            gate_up: loader.gate_up(specs.gate_up.each_ref())?,
            down: loader.matrix(&[&specs.down])?,
            mixture: match &specs.mixture {
                Some((gate, experts)) => Some(MixtureWeights {
                    gate: loader.matrix(&[gate])?,
                    experts: ExpertWeights::load(experts, loader)?,
                }),
                None => None,
            },
        })
    }
}

impl<D: Device> AttentionWeights<D> {
    /// Returns the norms that apply to each head of q and of k.
    pub fn head_norms(&self, eps: f32) -> HeadNorms<'_, D::Vector> {
        HeadNorms { q: &self.q_norm, k: &self.k_norm, eps }
    }
}
