//! DeepSeek-V4: a decoder whose residual stream is several streams, which hyper-connections mix before and behind each
//! sublayer. Attention has one head of keys, which are also the values, for all query heads. It sees a window of recent
//! tokens and, in most layers, compressed entries of all tokens. Each MLP is a mixture of experts plus a shared expert.
//! In the first layers, a table by token id chooses a token's experts.
//!
//! Reference: transformers `models/deepseek_v4/modular_deepseek_v4.py`.

mod attention;
mod config;
mod weights;

use std::path::Path;

use tutti_kernels::{
    CompressorShape, Device, DeviceError, GateUp, HyperShape, Linear, Norm, collective::GroupRank,
};

pub(crate) use self::config::Config;
use self::{
    attention::Attention,
    config::{LayerKind, PAGE_TOKENS},
    weights::{Layer, LayerSpecs, MlpWeights, Projection, mlp_name},
};
use crate::{
    DecoderDevice, LoadError,
    architecture::{Architecture, Needs},
    config::text::TextConfig,
    decoder::{EntryPlane, LayerStep, Layers, SlotPlane, TextShape},
    experts::{ExpertLayout, ExpertMixer, ExpertShape},
    weights::{Loader, TensorSpec, Values},
};

/// The layers of a DeepSeek-V4, with buffers for the largest step, which has `T` tokens. In the shapes below, the
/// numbers of heads and groups and the widths of MLPs are the sizes of this rank's shard.
pub(crate) struct DeepseekV4<D: Device> {
    layers: Vec<Layer<D>>,
    /// The projection behind all layers.
    head: Projection<D>,
    eps: f32,
    hyper: HyperShape,
    /// The residual streams, `[T, streams * hidden]`.
    streams: D::Tensor,
    /// Mixes of the streams around a sublayer, `[T, hyper.mix_elements()]`.
    mixes: D::Tensor,
    /// Input of a sublayer, `[T, hidden]`.
    collapsed: D::Tensor,
    attention: Attention<D>,
    mlp: Mlp<D>,
}

/// Buffers of the MLPs.
struct Mlp<D: Device> {
    mixer: ExpertMixer<D>,
    /// Input of the shared expert's down projection, `[T, width]`.
    activated: D::Tensor,
    /// Bound of gate and up.
    limit: Option<f32>,
}

impl Config {
    /// Returns the planes of entries and of state.
    fn planes(&self) -> (Vec<EntryPlane>, Vec<SlotPlane>) {
        let (sparse, heavy) = (self.count(LayerKind::Sparse), self.count(LayerKind::Heavy));
        let index = self.index_compressor();
        let slot = |name, layers, unit_bytes| SlotPlane { name, layers, units: 1, unit_bytes };
        let (mut entries, mut slots) =
            (Vec::new(), vec![slot("window", self.layers.len(), self.window_shape().ring_bytes())]);
        let mut add = |[plane, partials]: [&'static str; 2], layers, shape: CompressorShape| {
            entries.push(EntryPlane { name: plane, layers, width: shape.width, ratio: shape.ratio });
            slots.push(slot(partials, layers, shape.state_bytes()));
        };
        if let (1.., Some(shape)) = (sparse, self.compressor(LayerKind::Sparse)) {
            add(["csa_entries", "csa_partials"], sparse, shape);
            add(["index_keys", "index_partials"], sparse, index);
        }
        if let (1.., Some(shape)) = (heavy, self.compressor(LayerKind::Heavy)) {
            add(["hca_entries", "hca_partials"], heavy, shape);
        }
        (entries, slots)
    }
}

impl Architecture for Config {
    type LayerSpecs = LayerSpecs;
    type Layers<D: DecoderDevice> = DeepseekV4<D>;

    fn needs(&self) -> Needs {
        Needs { experts: true, hyper_connections: true, compressed: true, ..Needs::default() }
    }

    fn experts(&mut self) -> Option<&mut ExpertShape> {
        Some(&mut self.experts)
    }

    fn module_with_experts(&self) -> Option<String> {
        Some(mlp_name(0))
    }

    fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        self.shard(group_rank)
    }

    fn text(&self, dir: &Path, max_step_tokens: usize) -> Result<TextShape, LoadError> {
        let TextConfig { layers, heads, head_dim, hidden_size, vocab_size, .. } = self.text;
        let (entries, slots) = self.planes();
        Ok(TextShape {
            summary: format!(
                "DeepSeek-V4, {}, {layers} layers of width {hidden_size} x {}, {} with an indexer, {heads} heads of \
                 {head_dim}, vocabulary {vocab_size}",
                self.experts,
                self.hyper.streams,
                self.count(LayerKind::Sparse),
            ),
            prefix: "",
            embedding: "embed.weight",
            lm_head: "head.weight",
            levels: 0,
            hidden_size,
            norm_eps: self.text.rms_norm_eps,
            norm_values: Values::AsStored,
            tied: self.text.tied,
            dtype: self.text.dtype,
            limits: self.text.limits(dir, max_step_tokens)?,
            kv: None,
            attention_modules: Vec::new(),
            entries,
            page_tokens: Some(PAGE_TOKENS),
            slots,
            expert_layers: (0..layers).collect(),
        })
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn layer_specs(&self, layer: usize, layout: ExpertLayout, group_rank: GroupRank) -> LayerSpecs {
        LayerSpecs::new(self, layer, layout, group_rank)
    }

    fn tensors(specs: &LayerSpecs) -> Vec<&TensorSpec> {
        specs.all()
    }

    fn load<D: DecoderDevice>(
        &self,
        specs: &[LayerSpecs],
        tokens: usize,
        loader: &mut Loader<'_, D>,
    ) -> Result<DeepseekV4<D>, LoadError> {
        let (mut layers, mut head) = (Vec::with_capacity(specs.len()), None);
        for specs in specs {
            layers.push(Layer::load(specs, loader)?);
            head = Projection::load_head(specs, loader)?.or(head);
        }
        let Some(head) = head else { unreachable!("a model without layers") };
        let (device, hyper, hidden) = (loader.device(), self.hyper, self.text.hidden_size);
        Ok(DeepseekV4 {
            layers,
            head,
            eps: self.text.rms_norm_eps,
            hyper,
            streams: device.tensor(tokens, hyper.stream_elements())?,
            mixes: device.tensor(tokens, hyper.mix_elements())?,
            collapsed: device.tensor(tokens, hidden)?,
            attention: Attention::allocate(self, tokens, device)?,
            mlp: Mlp {
                mixer: ExpertMixer::allocate(&self.experts, tokens, device)?,
                activated: device.tensor(tokens, self.shared_width)?,
                limit: self.experts.limit,
            },
        })
    }
}

impl<D: DecoderDevice> Layers<D> for DeepseekV4<D> {
    fn run(&mut self, step: &mut LayerStep<'_, D>) -> Result<(), DeviceError> {
        let Self { layers, head, hyper, streams, mixes, collapsed, attention, mlp, .. } = self;
        let (eps, hyper, count) = (self.eps, *hyper, layers.len());
        attention.begin(step.device)?;
        step.device.spread(step.hidden, hyper, streams)?;
        for (index, layer) in layers.iter().enumerate() {
            let last = index + 1 == count;
            step.device.mix_streams(streams, layer.attention_streams.operands(), hyper, mixes)?;
            step.device.collapse_streams(streams, mixes, hyper, collapsed)?;
            let is_attended = !last || step.has_logit_rows();
            let norm = Norm { weight: &layer.attention_norm, eps };
            attention.run(step, (&*collapsed, norm), (&layer.attention, index), is_attended)?;
            if !is_attended {
                return Ok(());
            }
            if last {
                step.keep_logit_rows(&mut [streams, mixes, &mut attention.attended])?;
            }
            attention.project(step, &layer.attention)?;
            step.device.combine_streams(&attention.out, mixes, hyper, streams)?;

            step.device.mix_streams(streams, layer.mlp_streams.operands(), hyper, mixes)?;
            step.device.collapse_streams(streams, mixes, hyper, collapsed)?;
            mlp.run(step, (&*collapsed, Norm { weight: &layer.mlp_norm, eps }), &layer.mlp, index)?;
            step.device.combine_streams(&mlp.mixer.mixed, mixes, hyper, streams)?;
            step.pause()?;
        }
        step.device.head_streams(streams, head.operands(), hyper, step.hidden)
    }
}

impl<D: DecoderDevice> Mlp<D> {
    /// Computes the sum of a layer's experts and its shared expert, over all ranks, in `mixed` of the mixer.
    fn run(
        &mut self,
        step: &mut LayerStep<'_, D>,
        (x, norm): (&D::Tensor, Norm<'_, D::Vector>),
        weights: &MlpWeights<D>,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let Self { mixer, activated, limit } = self;
        let valid_rows = step.valid_rows();
        step.device.rms_norm(x, norm, &mut mixer.normed)?;
        mixer.mix(step.device, valid_rows, (&weights.experts, weights.choice()), layer)?;
        let shared = GateUp { x: &mixer.normed, norm: None, weight: &weights.gate_up, limit: *limit };
        step.device.gate_up(shared, activated)?;
        step.device.linear_add(Linear::plain(activated, &weights.down), &mut mixer.mixed)?;
        step.sum(&mut mixer.mixed)
    }
}
