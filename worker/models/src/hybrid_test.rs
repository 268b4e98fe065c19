//! A test model of two kinds of layers: linear recurrences, whose state is in a slot, and paged attention. It tests all
//! code that handles slots, and it is the example of docs/adding-a-model.md. The cargo feature `hybrid-test-model` adds
//! the family to a build. The model's weights are random (`--load-format dummy`).
//!
//! Layers alternate between recurrence and attention, and the first is a recurrence. A recurrence maps the hidden state
//! to `state_size` channels and back. Each channel decays at its own rate. Prefill and decode add in the same order,
//! token by token, so chunks and preemption change no bit.

use std::path::Path;

use tutti_kernels::{
    Attention, AttentionShape, DecayedSum, Device, DeviceError, Linear, Norm, RopeFrequencies, Rotary,
    RotateAndStore, collective::GroupRank,
};

use crate::{
    DecoderDevice, LoadError,
    architecture::Architecture,
    config::{
        ConfigFile, ranges,
        text::{TextConfig, TextDefaults, divides},
    },
    decoder::{LayerStep, Layers, SlotPlane, TextShape},
    experts::ExpertLayout,
    rope::{RopeDefaults, RopeTables},
    weights::{Cut, Loader, Role, TensorSpec, Values, share},
};

const EPS: f32 = 1e-6;
const DEFAULTS: TextDefaults = TextDefaults { kv_heads: None, head_dim: None, max_position_embeddings: 1024 };

/// The checked config. In the config of a rank's shard, the numbers of heads are the rank's share.
#[derive(Clone)]
pub(crate) struct Config {
    text: TextConfig,
    /// Number of channels of a recurrence. Each rank holds a share of the channels.
    state_size: usize,
    rope: RopeFrequencies,
    group_rank: GroupRank,
}

/// One layer: a norm, a map to this rank's channels or heads, and a map back.
pub(crate) struct Layer<D: Device> {
    norm: D::Vector,
    inward: D::Matrix,
    outward: D::Matrix,
}

pub(crate) struct Hybrid<D: Device> {
    layers: Vec<Layer<D>>,
    /// Decay per channel of this rank.
    decay: D::Vector,
    rope: RopeFrequencies,
    attention: AttentionShape,
    /// Angles of the rotation, `[T, head_dim]`, where `T` is the maximum number of tokens per step.
    angles: D::Tensor,
    /// q, k and v, `[T, (heads + 2 * kv_heads) * head_dim]`.
    qkv: D::Tensor,
    /// Output of the attention, `[T, heads * head_dim]`.
    attended: D::Tensor,
    /// Input and output of a recurrence, `[T, channels]`.
    channels: [D::Tensor; 2],
}

/// The tensors of a layer: the norm, the maps to channels or heads, and the map back.
pub(crate) struct LayerSpecs {
    norm: TensorSpec,
    inward: Vec<TensorSpec>,
    outward: TensorSpec,
}

impl Config {
    pub fn parse(file: &ConfigFile) -> Result<Self, LoadError> {
        let keys = file.keys();
        let text = TextConfig::read(&keys, &keys, DEFAULTS)?;
        let rope = RopeTables::read(&keys, &["full_attention"], text.max_context, RopeDefaults::PLAIN)?
            .frequencies(text.head_dim)
            .map_err(|problem| file.invalid(problem))?
            .remove(0);
        let state_size = keys.need(&ranges::STATE_SIZE)?;
        ranges::product([("state_size", state_size), ("hidden_size", text.hidden_size)], ranges::MAX_TENSOR)
            .map_err(|problem| file.invalid(problem))?;
        Ok(Self { text, state_size, rope, group_rank: GroupRank::ALONE })
    }
}

impl Architecture for Config {
    type LayerSpecs = LayerSpecs;
    type Layers<D: DecoderDevice> = Hybrid<D>;

    fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        divides("state_size", self.state_size, group_rank)?;
        Ok(Self { text: self.text.shard(group_rank)?, group_rank, ..self.clone() })
    }

    fn text(&self, dir: &Path, max_step_tokens: usize) -> Result<TextShape, LoadError> {
        let (count, units) = (self.text.layers, self.state_size);
        let (layers, unit_bytes) = (count.div_ceil(2), size_of::<f32>());
        Ok(TextShape {
            summary: "hybrid (for tests)".into(),
            prefix: "model.",
            embedding: "embed_tokens.weight",
            lm_head: "lm_head.weight",
            levels: 0,
            hidden_size: self.text.hidden_size,
            norm_eps: EPS,
            norm_values: Values::AsStored,
            tied: true,
            dtype: self.text.dtype,
            limits: self.text.limits(dir, max_step_tokens)?,
            kv: Some(self.text.kv_plane(count / 2)),
            attention_modules: Vec::new(),
            entries: Vec::new(),
            page_tokens: None,
            slots: vec![SlotPlane { name: "recurrence", layers, units, unit_bytes }],
            expert_layers: Vec::new(),
        })
    }

    fn layers(&self) -> usize {
        self.text.layers
    }

    fn layer_specs(&self, layer: usize, _: ExpertLayout, _: GroupRank) -> LayerSpecs {
        let matrix = |name: &str, rows, columns, cut| {
            TensorSpec::matrix(format!("layers.{layer}.{name}"), Role::Projection, rows, columns).cut(cut)
        };
        let TextConfig { hidden_size: hidden, head_dim: dim, heads: q, kv_heads: kv, .. } = self.text;
        let heads = |name, heads| matrix(name, heads * dim, hidden, Cut::Rows(heads));
        let norm = TensorSpec::vector(format!("layers.{layer}.norm"), Role::Norm, hidden);
        if layer.is_multiple_of(2) {
            let (size, inward) = (self.state_size, Cut::Rows(self.state_size));
            let outward = matrix("out", hidden, size, Cut::Columns(size));
            return LayerSpecs { norm, inward: vec![matrix("in", size, hidden, inward)], outward };
        }
        let outward = matrix("o", hidden, q * dim, Cut::Columns(q));
        LayerSpecs { norm, inward: vec![heads("q", q), heads("k", kv), heads("v", kv)], outward }
    }

    fn tensors(LayerSpecs { norm, inward, outward }: &LayerSpecs) -> Vec<&TensorSpec> {
        [norm].into_iter().chain(inward).chain([outward]).collect()
    }

    fn load<D: DecoderDevice>(
        &self,
        specs: &[LayerSpecs],
        tokens: usize,
        loader: &mut Loader<'_, D>,
    ) -> Result<Hybrid<D>, LoadError> {
        let mut layers = Vec::new();
        for LayerSpecs { norm, inward, outward } in specs {
            let (norm, inward) =
                (loader.vector(&[norm])?, loader.matrix(&inward.iter().collect::<Vec<_>>())?);
            layers.push(Layer { norm, inward, outward: loader.matrix(&[outward])? });
        }
        let channels = share(self.state_size, self.group_rank);
        let decay: Vec<f32> = channels.clone().map(|channel| 1.0 - 1.0 / (channel + 2) as f32).collect();
        let TextConfig { heads, kv_heads, head_dim, .. } = self.text;
        let device = loader.device();
        let mut tensor = |width| device.tensor(tokens, width);
        Ok(Hybrid {
            layers,
            attention: self.text.attention(None),
            angles: tensor(2 * self.rope.inverse.len())?,
            qkv: tensor((heads + 2 * kv_heads) * head_dim)?,
            attended: tensor(heads * head_dim)?,
            channels: [tensor(channels.len())?, tensor(channels.len())?],
            decay: device.vector(&decay)?,
            rope: self.rope.clone(),
        })
    }
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
