//! Qwen3.5: a pre-norm decoder with two kinds of layers. Most layers have a gated delta net, whose state is in
//! slots. The other layers have grouped-query attention, whose output is multiplied by a sigmoid gate. Checkpoints
//! store a norm's weight as its difference from 1. Rotation covers a part of each head. In Qwen3.5-MoE each MLP is a
//! mixture of experts plus a shared expert, which a sigmoid gate scales.
//!
//! Paper of the delta net: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464. Reference: transformers
//! `models/qwen3_5/modeling_qwen3_5.py`.

mod config;
mod weights;

use std::path::Path;

use tutti_kernels::{
    Attention, AttentionShape, DeltaShape, Device, DeviceError, GateUp, GatedDelta, GatedNorm, Linear, Norm,
    RopeFrequencies, Rotary, RotateAndStore, collective::GroupRank,
};

pub(crate) use self::config::Config;
use self::{
    config::LayerKind,
    weights::{AttentionWeights, DeltaWeights, Layer, LayerSpecs, Mixer, mlp_name},
};
use crate::{
    DecoderDevice, LoadError,
    architecture::{Architecture, Needs},
    config::text::TextConfig,
    decoder::{LayerStep, Layers, SlotPlane, TextShape},
    encoders::{EncoderRules, VideoRule},
    experts::{ExpertLayout, ExpertMixer, ExpertShape},
    vision,
    weights::{Loader, TensorSpec, Values},
};

/// A family of this architecture. The families differ in the kind of their MLPs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    /// Name in logs and errors.
    pub name: &'static str,
    /// True if each layer has experts in place of an MLP.
    pub experts: bool,
}

pub(crate) const DENSE: Variant = Variant { name: "Qwen3.5", experts: false };

/// Qwen3.5-MoE. Reference: transformers `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.
pub(crate) const MOE: Variant = Variant { name: "Qwen3.5-MoE", experts: true };

/// Rules of media. The vision encoder is that of Qwen3-VL without features.
pub(crate) const ENCODERS: EncoderRules =
    EncoderRules { vision: &vision::VL, videos: VideoRule::Stamped, features: false };

/// Index of the first of the delta nets' three slot planes.
const PLANE: usize = 0;

/// The layers of a Qwen3.5, with buffers for the largest step, which has `T` tokens. In the shapes below, the numbers
/// of heads and `intermediate` are the sizes of this rank's shard.
pub(crate) struct Qwen35<D: Device> {
    layers: Vec<Layer<D>>,
    eps: f32,
    full: FullAttention<D>,
    delta: DeltaNet<D>,
    /// Input of the down projection, `[T, intermediate]`.
    activated: D::Tensor,
    /// Buffers of the layers with experts; `None` in a dense model.
    mixture: Option<Mixture<D>>,
}

/// Buffers of the layers with experts.
struct Mixture<D: Device> {
    /// Gate of the shared expert, `[T, 1]`.
    gate: D::Tensor,
    mixer: ExpertMixer<D>,
}

/// Shape and buffers of the layers with attention.
struct FullAttention<D: Device> {
    rope: RopeFrequencies,
    shape: AttentionShape,
    /// Angles of the rotation, `[T, rotated elements of a head]`.
    angles: D::Tensor,
    /// q, k and v, `[T, (heads + 2 * kv_heads) * head_dim]`.
    qkv: D::Tensor,
    /// Gates of the attention's output, `[T, heads * head_dim]`.
    gate: D::Tensor,
    /// Output of the attention, `[T, heads * head_dim]`.
    attended: D::Tensor,
}

/// Shape and buffers of the layers with a delta net.
struct DeltaNet<D: Device> {
    shape: DeltaShape,
    /// Output of the input projection, `[T, shape.projected()]`.
    projected: D::Tensor,
    /// Input of the delta rule, `[T, shape.inputs()]`.
    inputs: D::Tensor,
    /// Output of the delta rule, `[T, value_heads * value_dim]`.
    remembered: D::Tensor,
}

impl Architecture for Config {
    type LayerSpecs = LayerSpecs;
    type Layers<D: DecoderDevice> = Qwen35<D>;

    fn needs(&self) -> Needs {
        Needs {
            experts: self.experts.is_some(),
            delta_rule: self.layers.contains(&LayerKind::Delta),
            ..Needs::default()
        }
    }

    fn experts(&mut self) -> Option<&mut ExpertShape> {
        self.experts.as_mut()
    }

    fn module_with_experts(&self) -> Option<String> {
        self.experts.as_ref().map(|_| mlp_name(self.prefix, 0))
    }

    fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        self.shard(group_rank)
    }

    fn text(&self, dir: &Path, max_step_tokens: usize) -> Result<TextShape, LoadError> {
        let TextConfig { layers, heads, kv_heads, head_dim, hidden_size, vocab_size, .. } = self.text;
        let (attentions, deltas, delta) =
            (self.count(LayerKind::Full), self.count(LayerKind::Delta), self.delta);
        let plane = |name, units, unit_bytes| SlotPlane { name, layers: deltas, units, unit_bytes };
        let planes = [
            plane("conv_keys", delta.key_heads, delta.key_conv_bytes()),
            plane("conv_values", delta.value_heads, delta.value_conv_bytes()),
            plane("delta", delta.value_heads, delta.memory_bytes()),
        ];
        let experts = self.experts.as_ref().map_or(String::new(), |shape| format!(", {shape}"));
        Ok(TextShape {
            summary: format!(
                "{}{experts}, {layers} layers of width {hidden_size}, {attentions} with {heads} + {kv_heads} heads of \
                 {head_dim}, vocabulary {vocab_size}",
                self.variant.name,
            ),
            prefix: self.prefix,
            embedding: "embed_tokens.weight",
            lm_head: "lm_head.weight",
            levels: 0,
            hidden_size,
            norm_eps: self.text.rms_norm_eps,
            norm_values: Values::PlusOne,
            tied: self.text.tied,
            dtype: self.text.dtype,
            limits: self.text.limits(dir, max_step_tokens)?,
            kv: Some(self.text.kv_plane(attentions)),
            attention_modules: self.attention_modules(),
            entries: Vec::new(),
            page_tokens: None,
            slots: if deltas > 0 { planes.to_vec() } else { Vec::new() },
            expert_layers: if self.experts.is_some() { (0..layers).collect() } else { Vec::new() },
        })
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn layer_specs(&self, layer: usize, layout: ExpertLayout, group_rank: GroupRank) -> LayerSpecs {
        LayerSpecs::new(self, layer, layout, group_rank)
    }

    fn tensors(specs: &LayerSpecs) -> Vec<&TensorSpec> {
        specs.all().collect()
    }

    fn load<D: DecoderDevice>(
        &self,
        specs: &[LayerSpecs],
        tokens: usize,
        loader: &mut Loader<'_, D>,
    ) -> Result<Qwen35<D>, LoadError> {
        let layers = specs.iter().map(|specs| Layer::load(specs, loader)).collect::<Result<_, _>>()?;
        let device = loader.device();
        let mixture = self.experts.as_ref().map(|shape| {
            let mixer = ExpertMixer::allocate(shape, tokens, device)?;
            Ok::<_, DeviceError>(Mixture { gate: device.tensor(tokens, 1)?, mixer })
        });
        let mixture = mixture.transpose()?;
        let TextConfig { heads, kv_heads, head_dim, rms_norm_eps, .. } = self.text;
        let (q, kv, delta) = (heads * head_dim, kv_heads * head_dim, self.delta);
        let mut tensor = |width| device.tensor(tokens, width);
        Ok(Qwen35 {
            layers,
            eps: rms_norm_eps,
            full: FullAttention {
                shape: self.text.attention(None),
                angles: tensor(2 * self.rope.inverse.len())?,
                qkv: tensor(q + 2 * kv)?,
                gate: tensor(q)?,
                attended: tensor(q)?,
                rope: self.rope.clone(),
            },
            delta: DeltaNet {
                shape: delta,
                projected: tensor(delta.projected())?,
                inputs: tensor(delta.inputs())?,
                remembered: tensor(delta.values())?,
            },
            activated: tensor(self.intermediate_size)?,
            mixture,
        })
    }
}

/// The position of a layer. `of_kind` is its index among the layers of the same kind, and in the planes of that kind.
/// `last` is true for the last layer of the model.
#[derive(Clone, Copy)]
struct Position {
    of_kind: usize,
    last: bool,
}

impl<D: DecoderDevice> Layers<D> for Qwen35<D> {
    fn run(&mut self, step: &mut LayerStep<'_, D>) -> Result<(), DeviceError> {
        let Self { layers, eps, full, delta, activated, mixture } = self;
        let (eps, count) = (*eps, layers.len());
        step.device.rope_angles(&full.rope, &mut full.angles)?;
        let (mut attentions, mut deltas) = (0, 0);
        for (index, layer) in layers.iter().enumerate() {
            let last = index + 1 == count;
            let norm = Norm { weight: &layer.input_norm, eps };
            match &layer.mixer {
                Mixer::Full(weights) => {
                    full.run(step, norm, weights, Position { of_kind: attentions, last })?;
                    attentions += 1;
                }
                Mixer::Delta(weights) => {
                    delta.run(step, norm, weights, Position { of_kind: deltas, last })?;
                    deltas += 1;
                }
            }
            if last && !step.has_logit_rows() {
                break;
            }
            let norm = || Norm { weight: &layer.post_norm, eps };
            let x = GateUp { x: &*step.hidden, norm: Some(norm()), weight: &layer.gate_up, limit: None };
            step.device.gate_up(x, activated)?;
            if let (Some(Mixture { gate, mixer }), Some(weights)) = (mixture.as_mut(), &layer.mixture) {
                // The gate scales each row. It can be applied before the down projection, because that projection is
                // linear.
                let x = Linear { x: &*step.hidden, norm: Some(norm()), weight: &weights.gate, bias: None };
                step.device.linear(x, gate)?;
                step.device.sigmoid_gate(gate, activated)?;
                mixer.run(step, &weights.experts, norm(), index)?;
            }
            step.add(Linear::plain(activated, &layer.down))?;
            step.pause()?;
        }
        Ok(())
    }
}

impl<D: DecoderDevice> FullAttention<D> {
    /// Adds the gated attention of a layer to the residual stream. In a step without logit rows, the last layer only
    /// writes its keys and values.
    fn run(
        &mut self,
        step: &mut LayerStep<'_, D>,
        norm: Norm<'_, D::Vector>,
        weights: &AttentionWeights<D>,
        Position { of_kind: layer, last }: Position,
    ) -> Result<(), DeviceError> {
        let Self { shape, angles, qkv, gate, attended, .. } = self;
        let (shape, eps) = (*shape, norm.eps);
        let normed = || Some(Norm { weight: norm.weight, eps });
        let product = Linear { x: &*step.hidden, norm: normed(), weight: &weights.qkv, bias: None };
        step.device.linear(product, qkv)?;
        step.device.rotate_and_store(RotateAndStore {
            qkv,
            shape,
            norms: Some(weights.head_norms(eps)),
            rotary: Rotary { angles },
            planes: step.planes,
            layer,
        })?;
        if last && !step.has_logit_rows() {
            return Ok(());
        }
        step.device.attention(Attention { qkv, shape, planes: step.planes, layer }, attended)?;
        if last {
            step.keep_logit_rows(&mut [attended])?;
        }
        let product = Linear { x: &*step.hidden, norm: normed(), weight: &weights.gate, bias: None };
        step.device.linear(product, gate)?;
        step.device.sigmoid_gate(gate, attended)?;
        step.add(Linear::plain(attended, &weights.o))
    }
}

impl<D: DecoderDevice> DeltaNet<D> {
    /// Adds the delta net of a layer to the residual stream. In a step without logit rows, the last layer only updates
    /// its state.
    fn run(
        &mut self,
        step: &mut LayerStep<'_, D>,
        norm: Norm<'_, D::Vector>,
        weights: &DeltaWeights<D>,
        Position { of_kind: layer, last }: Position,
    ) -> Result<(), DeviceError> {
        let Self { shape, projected, inputs, remembered } = self;
        let (shape, plane, eps) = (*shape, PLANE, norm.eps);
        let product = Linear { x: &*step.hidden, norm: Some(norm), weight: &weights.inward, bias: None };
        step.device.linear(product, projected)?;
        let (taps, rate, bias) = (&weights.taps, &weights.rate, &weights.bias);
        let planes = &mut *step.planes;
        let operands = GatedDelta { projected, shape, taps, rate, bias, inputs, planes, plane, layer };
        step.device.delta_rule(operands, remembered)?;
        if last {
            if !step.has_logit_rows() {
                return Ok(());
            }
            step.keep_logit_rows(&mut [remembered, projected])?;
        }
        let norm = Norm { weight: &weights.norm, eps };
        let gated = GatedNorm { gate: &*projected, column: shape.channels(), norm };
        step.device.gated_norm(gated, remembered)?;
        step.add(Linear::plain(remembered, &weights.out))
    }
}
