//! Dense Qwen3: pre-norm decoder, grouped-query attention with an RMS norm on each head of q and k, RoPE, SwiGLU.
//!
//! Paper: "Qwen3 Technical Report", arXiv:2505.09388. Reference: transformers `models/qwen3/modeling_qwen3.py`.

mod config;
#[cfg(fuzzing)]
pub(crate) mod fuzzing {
    pub(crate) use super::config::Config;
}
mod weights;

use std::path::Path;

use tutti_kernels::{
    Attention, AttentionShape, Device, DeviceError, GateUp, Linear, Norm, RopeFrequencies, Rotary,
    RotateAndStore,
};

#[cfg(feature = "media-test-model")]
pub(crate) use self::config::Config as Shape;
use self::{
    config::Config,
    weights::{Layer, LayerSpecs},
};
use crate::{
    DecoderDevice, LoadError, LoadOptions,
    config::ConfigFile,
    decoder::{Decoder, LayerStep, Layers},
    weights::Progress,
};

/// The name of this family in a config's `architectures`.
pub(crate) const ARCHITECTURE: &str = "Qwen3ForCausalLM";
/// The name of this family in a config's `model_type`, which is used only if `architectures` is missing.
pub(crate) const MODEL_TYPE: &str = "qwen3";

/// The layers of a dense Qwen3, with buffers for the largest step, of `T` tokens. In the shapes below, `heads`,
/// `kv_heads` and `intermediate` are the sizes of this rank's shard.
pub(crate) struct Qwen3<D: Device> {
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
    /// Input of the down projection, `[T, intermediate]`.
    activated: D::Tensor,
}

/// Loads a model of this family from `dir`, whose `config.json` is `file`.
pub(crate) fn load<D: DecoderDevice>(
    file: &ConfigFile,
    dir: &Path,
    options: &LoadOptions,
    device: D,
    progress: Progress<'_>,
) -> Result<Decoder<D, Qwen3<D>>, LoadError> {
    let config = Config::parse(file)?;
    let invalid = |problem| file.invalid(problem);
    let shard = config.shard(device.group_rank()).map_err(invalid)?;
    let rope = config.rope.frequencies(config.head_dim).map_err(invalid)?;
    let (tokens, specs) = (options.max_step_tokens, LayerSpecs::of(&config));
    let (q, kv) = (shard.heads * shard.head_dim, shard.kv_heads * shard.head_dim);
    let text = config.text(dir, tokens)?;
    let all = specs.iter().flat_map(LayerSpecs::all);
    Decoder::load(text, all, (dir, options), device, progress, |loader| {
        let layers = specs.iter().map(|specs| Layer::load(specs, loader)).collect::<Result<_, _>>()?;
        let device = loader.device();
        let angles = rope.iter().map(|rope| device.tensor(tokens, 2 * rope.inverse.len()));
        Ok(Qwen3 {
            layers,
            eps: config.rms_norm_eps,
            angles: angles.collect::<Result<_, _>>()?,
            rope,
            table_of: shard.rope.of_layer.clone(),
            attention: shard.windows.iter().map(|&window| shard.attention(window)).collect(),
            qkv: device.tensor(tokens, q + 2 * kv)?,
            attended: device.tensor(tokens, q)?,
            activated: device.tensor(tokens, shard.intermediate_size)?,
        })
    })
}

impl<D: DecoderDevice> Layers<D> for Qwen3<D> {
    fn run(&mut self, step: &mut LayerStep<'_, D>) -> Result<(), DeviceError> {
        let Self { layers, eps, rope, table_of, attention, angles, qkv, attended, activated } = self;
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
                norms: Some(layer.head_norms(eps)),
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

            let norm = Some(Norm { weight: &layer.post_norm, eps });
            step.device.gate_up(GateUp { x: step.hidden, norm, weight: &layer.gate_up }, activated)?;
            step.add(Linear::plain(activated, &layer.down))?;
            step.pause()?;
        }
        Ok(())
    }
}
