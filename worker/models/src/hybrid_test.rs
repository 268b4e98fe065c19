//! A test model of two kinds of layers: linear recurrences, whose state is in a slot, and paged attention. It tests
//! slots through every part that carries them until a real family has them, and it is the example of
//! docs/adding-a-model.md. The cargo feature `hybrid-test-model` adds the family to a build. Its weights are random
//! (`--load-format dummy`).
//!
//! Layers alternate, a recurrence first. A recurrence maps the hidden state to `state_size` channels, of which each
//! decays at a rate of its own, and back. Prefill and decode add in the same order, token by token, so neither chunks
//! nor preemption change a bit.

use std::path::Path;

use serde::Deserialize;
use tutti_kernels::{
    Attention, AttentionShape, DecayedSum, Device, DeviceError, Linear, Norm, RopeFrequencies, Rotary,
    RotateAndStore, WeightType,
};

use crate::{
    DecoderDevice, LoadError, LoadOptions,
    config::ConfigFile,
    decoder::{Decoder, KvPlane, LayerStep, Layers, SlotPlane, TextShape},
    model::Limits,
    rope::{RopeKeys, RopeTables},
    weights::{Cut, Progress, Role, TensorSpec, Values, share},
};

pub(crate) const ARCHITECTURE: &str = "TuttiHybridTestForCausalLM";
pub(crate) const MODEL_TYPE: &str = "tutti_hybrid_test";
const EPS: f32 = 1e-6;

#[derive(Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    state_size: usize,
    max_position_embeddings: usize,
    #[serde(flatten)]
    rope: RopeKeys,
}

/// One layer: a norm, a map to this rank's channels or heads, and a map back.
struct Layer<D: Device> {
    norm: D::Vector,
    inward: D::Matrix,
    outward: D::Matrix,
}

struct Hybrid<D: Device> {
    layers: Vec<Layer<D>>,
    /// Decay of each of this rank's channels.
    decay: D::Vector,
    rope: RopeFrequencies,
    attention: AttentionShape,
    /// `[T, head_dim]`.
    angles: D::Tensor,
    /// q, k and v, `[T, (heads + 2 * kv_heads) * head_dim]`.
    qkv: D::Tensor,
    /// `[T, heads * head_dim]`.
    attended: D::Tensor,
    /// Input and output of a recurrence, `[T, channels]`.
    channels: [D::Tensor; 2],
}

impl Config {
    fn text(&self, max_step_tokens: usize) -> TextShape {
        let (count, units) = (self.num_hidden_layers, self.state_size);
        let (layers, unit_bytes) = (count.div_ceil(2), size_of::<f32>());
        TextShape {
            summary: "hybrid (for tests)".into(),
            prefix: "model.",
            hidden_size: self.hidden_size,
            norm_eps: EPS,
            norm_values: Values::AsStored,
            tied: true,
            dtype: WeightType::F32,
            limits: Limits::new(self.vocab_size, self.max_position_embeddings, max_step_tokens),
            kv: Some(KvPlane { layers: count / 2, heads: self.num_key_value_heads, head_dim: self.head_dim }),
            slots: vec![SlotPlane { name: "recurrence", layers, units, unit_bytes }],
            expert_layers: Vec::new(),
        }
    }

    /// The tensors of a layer: norm, maps inward, map outward.
    fn specs(&self, layer: usize) -> (TensorSpec, Vec<TensorSpec>, TensorSpec) {
        let matrix = |name: &str, rows, columns, cut| {
            TensorSpec::matrix(format!("layers.{layer}.{name}"), Role::Projection, rows, columns).cut(cut)
        };
        let (hidden, dim) = (self.hidden_size, self.head_dim);
        let heads = |name, heads| matrix(name, heads * dim, hidden, Cut::Rows(heads));
        let norm = TensorSpec::vector(format!("layers.{layer}.norm"), Role::Norm, hidden);
        if layer.is_multiple_of(2) {
            let (size, inward) = (self.state_size, Cut::Rows(self.state_size));
            let outward = matrix("out", hidden, size, Cut::Columns(size));
            return (norm, vec![matrix("in", size, hidden, inward)], outward);
        }
        let (q, kv) = (self.num_attention_heads, self.num_key_value_heads);
        let outward = matrix("o", hidden, q * dim, Cut::Columns(q));
        (norm, vec![heads("q", q), heads("k", kv), heads("v", kv)], outward)
    }
}

pub(crate) fn load<D: DecoderDevice>(
    file: &ConfigFile,
    dir: &Path,
    options: &LoadOptions,
    device: D,
    progress: Progress<'_>,
) -> Result<Decoder<D, impl Layers<D>>, LoadError> {
    let config: Config = file.parse()?;
    let rope = RopeTables::resolve(&config.rope, &["full_attention"], config.max_position_embeddings)
        .and_then(|tables| tables.frequencies(config.head_dim))
        .map_err(|problem| file.invalid(problem))?
        .remove(0);
    let (tokens, rank) = (options.max_step_tokens, device.group_rank());
    let specs: Vec<_> = (0..config.num_hidden_layers).map(|layer| config.specs(layer)).collect();
    let all = specs.iter().flat_map(|(norm, inward, out)| [norm].into_iter().chain(inward).chain([out]));
    Decoder::load(config.text(tokens), all, (dir, options), device, progress, |loader| {
        let mut layers = Vec::new();
        for (norm, inward, outward) in &specs {
            let (norm, inward) =
                (loader.vector(&[norm])?, loader.matrix(&inward.iter().collect::<Vec<_>>())?);
            layers.push(Layer { norm, inward, outward: loader.matrix(&[outward])? });
        }
        let channels = share(config.state_size, rank);
        let decay: Vec<f32> = channels.clone().map(|channel| 1.0 - 1.0 / (channel + 2) as f32).collect();
        let (head_dim, scale) = (config.head_dim, (config.head_dim as f32).sqrt().recip());
        let heads_of = |heads| share(heads, rank).len();
        let (heads, kv_heads) = (heads_of(config.num_attention_heads), heads_of(config.num_key_value_heads));
        let device = loader.device();
        let mut tensor = |width| device.tensor(tokens, width);
        Ok(Hybrid {
            layers,
            attention: AttentionShape { heads, kv_heads, head_dim, scale, window: None },
            angles: tensor(2 * rope.inverse.len())?,
            qkv: tensor((heads + 2 * kv_heads) * head_dim)?,
            attended: tensor(heads * head_dim)?,
            channels: [tensor(channels.len())?, tensor(channels.len())?],
            decay: device.vector(&decay)?,
            rope,
        })
    })
}

impl<D: DecoderDevice> Layers<D> for Hybrid<D> {
    fn run(&mut self, step: &mut LayerStep<'_, D>) -> Result<(), DeviceError> {
        let Self { layers, decay, rope, attention, angles, qkv, attended, channels: [x, sums] } = self;
        step.device.rope_angles(rope, angles)?;
        for (index, Layer { norm, inward, outward }) in layers.iter().enumerate() {
            let (norm, layer) = (Some(Norm { weight: norm, eps: EPS }), index / 2);
            let product = Linear { x: &*step.hidden, norm, weight: inward, bias: None };
            if index.is_multiple_of(2) {
                step.device.linear(product, x)?;
                let operands = DecayedSum { x, decay, planes: step.planes, plane: 0, layer };
                step.device.decayed_sum(operands, sums)?;
                step.add(Linear::plain(sums, outward))?;
            } else {
                step.device.linear(product, qkv)?;
                let (shape, rotary, planes) = (*attention, Rotary { angles }, &mut *step.planes);
                step.device.rotate_and_store(RotateAndStore {
                    qkv,
                    shape,
                    norms: None,
                    rotary,
                    planes,
                    layer,
                })?;
                step.device.attention(Attention { qkv, shape, planes: step.planes, layer }, attended)?;
                step.add(Linear::plain(attended, outward))?;
            }
            step.pause()?;
        }
        step.keep_logit_rows(&mut [])
    }
}
