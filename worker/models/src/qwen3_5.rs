//! Qwen3.5, text: pre-norm decoder whose layers are of two kinds. Most have a gated delta net, whose state is in slots;
//! the others have grouped-query attention, whose output is multiplied by a sigmoid gate. Norms store their weight's
//! difference from 1, and rotation covers a part of each head. In Qwen3.5-MoE each MLP is a mixture of experts and a
//! shared expert, which a sigmoid gate scales.
//!
//! Paper of the delta net: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464. Reference: transformers
//! `models/qwen3_5/modeling_qwen3_5.py`. A checkpoint with a vision encoder loads as its text model.

mod config;
mod weights;

use std::path::Path;

use tutti_kernels::{
    Attention, AttentionShape, DeltaShape, Device, DeviceError, GateUp, GatedDelta, GatedNorm, Linear, Norm,
    RopeFrequencies, Rotary, RotateAndStore,
};

use self::{
    config::{Config, LayerKind},
    weights::{AttentionWeights, DeltaWeights, Layer, LayerSpecs, Mixer, mlp_name},
};
use crate::{
    DecoderDevice, LoadError, LoadOptions,
    config::ConfigFile,
    decoder::{Decoder, LayerStep, Layers},
    experts::{ExpertLayout, ExpertMixer},
    load::Needs,
    weights::Progress,
};

/// One family of this architecture: its names, and the kind of its MLPs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// Name in a config's `architectures`.
    pub architecture: &'static str,
    /// Name in a config's `model_type`, which is used only if `architectures` is missing.
    pub model_type: &'static str,
    /// Name in logs and errors.
    pub name: &'static str,
    /// True if each layer has experts in place of an MLP.
    pub experts: bool,
}

const DENSE: Family = Family {
    architecture: "Qwen3_5ForConditionalGeneration",
    model_type: "qwen3_5",
    name: "Qwen3.5",
    experts: false,
};

/// Reference: transformers `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.
const MOE: Family = Family {
    architecture: "Qwen3_5MoeForConditionalGeneration",
    model_type: "qwen3_5_moe",
    name: "Qwen3.5-MoE",
    experts: true,
};

/// The families of this architecture, each with a vision encoder and as a text model.
pub(crate) const FAMILIES: [&Family; 4] = [
    &DENSE,
    &Family { architecture: "Qwen3_5ForCausalLM", model_type: "qwen3_5_text", ..DENSE },
    &MOE,
    &Family { architecture: "Qwen3_5MoeForCausalLM", model_type: "qwen3_5_moe_text", ..MOE },
];

/// Index of the first of the three slot planes.
const PLANE: usize = 0;

/// The layers of a Qwen3.5, with buffers for the largest step, of `T` tokens. In the shapes below, numbers of heads and
/// `intermediate` are those of this rank's shard.
pub(crate) struct Qwen35<D: Device> {
    layers: Vec<Layer<D>>,
    eps: f32,
    full: FullAttention<D>,
    delta: DeltaNet<D>,
    /// Input of the down projection, `[T, intermediate]`.
    activated: D::Tensor,
    /// `None` in a dense model.
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
    /// `[T, rotated elements of a head]`.
    angles: D::Tensor,
    /// q, k and v, `[T, (heads + 2 * kv_heads) * head_dim]`.
    qkv: D::Tensor,
    /// `[T, heads * head_dim]`.
    gate: D::Tensor,
    /// Output of the attention, `[T, heads * head_dim]`.
    attended: D::Tensor,
}

/// Shape and buffers of the layers with a delta net.
struct DeltaNet<D: Device> {
    shape: DeltaShape,
    /// `[T, shape.projected()]`.
    projected: D::Tensor,
    /// `[T, shape.inputs()]`.
    inputs: D::Tensor,
    /// Output of the delta rule, `[T, value_heads * value_dim]`.
    remembered: D::Tensor,
}

/// Loads a model of `family` from `dir`, whose `config.json` is `file`.
pub(crate) fn load<D: DecoderDevice>(
    family: &'static Family,
    file: &ConfigFile,
    dir: &Path,
    options: &LoadOptions,
    device: D,
    progress: Progress<'_>,
) -> Result<Decoder<D, Qwen35<D>>, LoadError> {
    let invalid = |problem| file.invalid(problem);
    let mut config = Config::parse(file, family)?;
    if options.expert_parallel {
        config.divide_whole_experts().map_err(invalid)?;
    }
    let needs =
        Needs { experts: config.experts.is_some(), delta_rule: config.layers.contains(&LayerKind::Delta) };
    needs.check(file, family.architecture, &device)?;
    let shard = config.shard(device.group_rank()).map_err(invalid)?;
    let rope = config.rope_frequencies().map_err(invalid)?;
    let rank = device.group_rank();
    let layout = match &config.experts {
        Some(_) => ExpertLayout::of(dir, options, &mlp_name(config.prefix, 0))?,
        None => ExpertLayout::Each,
    };
    let (tokens, specs) = (options.max_step_tokens, LayerSpecs::of(&config, layout, rank));
    let text = config.text(dir, tokens)?;
    let all = specs.iter().flat_map(LayerSpecs::all);
    Decoder::load(text, all, (dir, options), device, progress, |loader| {
        let layers = specs.iter().map(|specs| Layer::load(specs, loader)).collect::<Result<_, _>>()?;
        let device = loader.device();
        let (q, kv, delta) = (shard.heads * shard.head_dim, shard.kv_heads * shard.head_dim, shard.delta);
        let mixture = config.experts.as_ref().map(|shape| {
            let mixer = ExpertMixer::allocate(shape, tokens, device)?;
            Ok::<_, DeviceError>(Mixture { gate: device.tensor(tokens, 1)?, mixer })
        });
        let mixture = mixture.transpose()?;
        let mut tensor = |width| device.tensor(tokens, width);
        Ok(Qwen35 {
            layers,
            eps: config.rms_norm_eps,
            full: FullAttention {
                shape: shard.attention(),
                angles: tensor(2 * rope.inverse.len())?,
                qkv: tensor(q + 2 * kv)?,
                gate: tensor(q)?,
                attended: tensor(q)?,
                rope,
            },
            delta: DeltaNet {
                shape: delta,
                projected: tensor(delta.projected())?,
                inputs: tensor(delta.inputs())?,
                remembered: tensor(delta.values())?,
            },
            activated: tensor(shard.intermediate_size)?,
            mixture,
        })
    })
}

/// One layer's place: its index among the layers of its kind, which is that of its plane's layer, and its role as the
/// last layer of the model.
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
            let x = GateUp { x: &*step.hidden, norm: Some(norm()), weight: &layer.gate_up };
            step.device.gate_up(x, activated)?;
            if let (Some(Mixture { gate, mixer }), Some(weights)) = (mixture.as_mut(), &layer.mixture) {
                // A row's gate commutes with the down projection, which is linear.
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
    /// Adds the gated attention of a layer to the residual stream. Without logit rows the last layer writes its keys
    /// and values only.
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
    /// Adds the delta net of a layer to the residual stream. Without logit rows the last layer changes its state only.
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
