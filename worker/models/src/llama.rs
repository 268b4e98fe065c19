//! The architecture of Llama: pre-norm decoder with RMS norms, grouped-query attention, RoPE and SwiGLU.
//!
//! Paper: Touvron et al., "LLaMA", arXiv:2302.13971. Several families share this architecture. The families differ in
//! biases, sliding windows, norms of heads, experts, and defaults of config keys. [`variant`] names the paper and the
//! reference of each family.

mod config;
mod moe;
mod variant;
mod weights;

use std::path::Path;

use tutti_kernels::{
    Attention, AttentionShape, Device, DeviceError, GateUp, Linear, Norm, RopeFrequencies, Rotary,
    RotateAndStore, collective::GroupRank,
};

use self::weights::{Layer, LayerSpecs, Mlp, mlp_name};
pub(crate) use self::{
    config::Config,
    variant::{LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_OMNI, QWEN3_VL, QWEN3_VL_MOE, Variant},
};
use crate::{
    DecoderDevice, LoadError,
    architecture::{Architecture, Needs},
    config::text::TextConfig,
    decoder::{LayerStep, Layers, TextShape},
    experts::{ExpertLayout, ExpertMixer, ExpertShape},
    weights::{Loader, TensorSpec, Values},
};

/// The layers of a model, with buffers for the largest step, which has `T` tokens. In the shapes below, `heads`,
/// `kv_heads` and `intermediate` are the sizes of this rank's shard.
pub(crate) struct Llama<D: Device> {
    layers: Vec<Layer<D>>,
    eps: f32,
    /// Frequencies of each rotary table.
    rope: Vec<RopeFrequencies>,
    /// Index of the rotary table of each layer.
    table_of: Vec<usize>,
    /// Shape of each layer's attention. Layers differ only in their window.
    attention: Vec<AttentionShape>,
    /// Angles of each rotary table, `[T, head_dim]`.
    angles: Vec<D::Tensor>,
    /// q, k and v, `[T, (heads + 2 * kv_heads) * head_dim]`.
    qkv: D::Tensor,
    /// Output of the attention, `[T, heads * head_dim]`.
    attended: D::Tensor,
    /// Input of the down projection of a dense MLP, `[T, intermediate]`. `None` if all layers have experts.
    activated: Option<D::Tensor>,
    /// Buffers of the layers with experts; `None` if all layers have a dense MLP.
    experts: Option<ExpertMixer<D>>,
}

impl Architecture for Config {
    type LayerSpecs = LayerSpecs;
    type Layers<D: DecoderDevice> = Llama<D>;

    fn needs(&self) -> Needs {
        Needs { experts: self.moe.is_some(), ..Needs::default() }
    }

    fn experts(&mut self) -> Option<&mut ExpertShape> {
        self.moe.as_mut().map(|moe| &mut moe.shape)
    }

    fn module_with_experts(&self) -> Option<String> {
        (0..self.text.layers).find(|&layer| self.is_sparse(layer)).map(|layer| mlp_name(self, layer))
    }

    fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        self.shard(group_rank)
    }

    fn text(&self, dir: &Path, max_step_tokens: usize) -> Result<TextShape, LoadError> {
        let TextConfig { layers, heads, kv_heads, head_dim, hidden_size, vocab_size, .. } = self.text;
        let names = self.variant.names;
        let experts = self.moe.as_ref().map_or(String::new(), |moe| format!(", {}", moe.shape));
        Ok(TextShape {
            summary: format!(
                "{}{experts}, {layers} layers of width {hidden_size}, {heads} + {kv_heads} heads of {head_dim}, \
                 vocabulary {vocab_size}",
                self.variant.name
            ),
            prefix: names.prefix,
            embedding: "embed_tokens.weight",
            lm_head: names.lm_head,
            levels: self.levels,
            hidden_size,
            norm_eps: self.text.rms_norm_eps,
            norm_values: Values::AsStored,
            tied: self.text.tied,
            dtype: self.text.dtype,
            limits: self.text.limits(dir, max_step_tokens)?,
            kv: Some(self.text.kv_plane(layers)),
            attention_modules: (0..layers)
                .map(|layer| format!("{}layers.{layer}.self_attn", names.prefix))
                .collect(),
            entries: Vec::new(),
            page_tokens: None,
            slots: Vec::new(),
            expert_layers: (0..layers).filter(|&layer| self.is_sparse(layer)).collect(),
        })
    }

    fn layers(&self) -> usize {
        self.text.layers
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
    ) -> Result<Llama<D>, LoadError> {
        let layers = specs.iter().map(|specs| Layer::load(specs, loader)).collect::<Result<_, _>>()?;
        let device = loader.device();
        let TextConfig { heads, kv_heads, head_dim, rms_norm_eps, .. } = self.text;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let angles = self.rope.iter().map(|rope| device.tensor(tokens, 2 * rope.inverse.len()));
        Ok(Llama {
            layers,
            eps: rms_norm_eps,
            angles: angles.collect::<Result<_, _>>()?,
            rope: self.rope.clone(),
            table_of: self.table_of.clone(),
            attention: self.windows.iter().map(|&window| self.text.attention(window)).collect(),
            qkv: device.tensor(tokens, q + 2 * kv)?,
            attended: device.tensor(tokens, q)?,
            activated: self
                .has_dense_mlps()
                .then(|| device.tensor(tokens, self.intermediate_size))
                .transpose()?,
            experts: self
                .moe
                .as_ref()
                .map(|moe| ExpertMixer::allocate(&moe.shape, tokens, device))
                .transpose()?,
        })
    }
}

impl<D: DecoderDevice> Layers<D> for Llama<D> {
    fn run(&mut self, step: &mut LayerStep<'_, D>) -> Result<(), DeviceError> {
        let Self { layers, eps, rope, table_of, attention, angles, qkv, attended, activated, experts } = self;
        let (eps, count) = (*eps, layers.len());
        for (rope, angles) in rope.iter().zip(&mut *angles) {
            step.device.rope_angles(rope, angles)?;
        }
        for (index, (layer, &shape)) in layers.iter().zip(&*attention).enumerate() {
            let last = index + 1 == count;
            let (norm, bias) = (Some(Norm { weight: &layer.input_norm, eps }), layer.qkv_bias.as_ref());
            step.device.linear(Linear { x: step.hidden, norm, weight: &layer.qkv, bias }, qkv)?;
            step.device.rotate_and_store(RotateAndStore {
                qkv,
                shape,
                norms: layer.head_norms(eps),
                rotary: Rotary { angles: &angles[table_of[index]] },
                planes: step.planes,
                layer: index,
            })?;
            if last && !step.has_logit_rows() {
                break;
            }
            step.device.attention(Attention { qkv, shape, planes: step.planes, layer: index }, attended)?;
            if last {
                step.keep_logit_rows(&mut [attended])?;
            }
            let bias = layer.o_bias.as_ref();
            step.add(Linear { x: attended, norm: None, weight: &layer.o, bias })?;

            let norm = Norm { weight: &layer.post_norm, eps };
            match (&layer.mlp, &mut *activated, &mut *experts) {
                (Mlp::Dense { gate_up, down }, Some(activated), _) => {
                    let norm = Some(norm);
                    step.device
                        .gate_up(GateUp { x: step.hidden, norm, weight: gate_up, limit: None }, activated)?;
                    step.add(Linear::plain(activated, down))?;
                }
                (Mlp::Experts(weights), _, Some(experts)) => experts.run(step, weights, norm, index)?,
                _ => return Err(DeviceError::Misuse(format!("layer {index} has no buffers for its MLP"))),
            }
            if !last {
                step.add_features(index)?;
            }
            step.pause()?;
        }
        Ok(())
    }
}
