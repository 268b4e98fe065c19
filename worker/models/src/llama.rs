//! The architecture of Llama: pre-norm decoder with RMS norms, grouped-query attention, RoPE and SwiGLU.
//!
//! Paper: Touvron et al., "LLaMA", arXiv:2302.13971. Several families share it, and differ in biases, sliding windows,
//! norms of heads and defaults of their configs: see [`family`], which names the paper and the reference of each.

mod config;
mod family;
mod moe;
mod weights;

use std::path::Path;

use tutti_kernels::{
    Attention, AttentionShape, Device, DeviceError, GateUp, Linear, Norm, RopeFrequencies, Rotary,
    RotateAndStore,
};

#[cfg(any(fuzzing, feature = "media-test-model"))]
pub(crate) use self::config::Config as Shape;
#[cfg(feature = "media-test-model")]
pub(crate) use self::family::QWEN3;
pub(crate) use self::family::{FAMILIES, Family};
use self::{
    config::Config,
    weights::{Layer, LayerSpecs, Mlp, mlp_name},
};
use crate::{
    DecoderDevice, LoadError, LoadOptions,
    config::ConfigFile,
    decoder::{Decoder, LayerStep, Layers},
    experts::{ExpertLayout, ExpertMixer},
    load::Needs,
    weights::Progress,
};

/// The layers of a model, with buffers for the largest step, of `T` tokens. In the shapes below, `heads`,
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
    /// `None` if all layers have a dense MLP.
    experts: Option<ExpertMixer<D>>,
}

/// Loads a model of `family` from `dir`, whose `config.json` is `file`.
pub(crate) fn load<D: DecoderDevice>(
    family: &'static Family,
    file: &ConfigFile,
    dir: &Path,
    options: &LoadOptions,
    device: D,
    progress: Progress<'_>,
) -> Result<Decoder<D, Llama<D>>, LoadError> {
    let invalid = |problem| file.invalid(problem);
    let mut config = Config::parse(file, family)?;
    if options.expert_parallel {
        config.divide_whole_experts().map_err(invalid)?;
    }
    let needs = Needs { experts: config.moe.is_some(), ..Needs::default() };
    needs.check(file, family.architecture, &device)?;
    let shard = config.shard(device.group_rank()).map_err(invalid)?;
    let rope = config.rope.frequencies(config.head_dim).map_err(invalid)?;
    let layout = match (0..config.layers).find(|&layer| config.is_sparse(layer)) {
        Some(layer) => ExpertLayout::of(dir, options, &mlp_name(layer))?,
        None => ExpertLayout::Each,
    };
    let (tokens, specs) = (options.max_step_tokens, LayerSpecs::of(&config, layout, device.group_rank()));
    let (q, kv) = (shard.heads * shard.head_dim, shard.kv_heads * shard.head_dim);
    let text = config.text(dir, tokens)?;
    let all = specs.iter().flat_map(LayerSpecs::all);
    Decoder::load(text, all, (dir, options), device, progress, |loader| {
        let layers = specs.iter().map(|specs| Layer::load(specs, loader)).collect::<Result<_, _>>()?;
        let device = loader.device();
        let angles = rope.iter().map(|rope| device.tensor(tokens, 2 * rope.inverse.len()));
        Ok(Llama {
            layers,
            eps: config.rms_norm_eps,
            angles: angles.collect::<Result<_, _>>()?,
            rope,
            table_of: shard.rope.of_layer.clone(),
            attention: shard.windows.iter().map(|&window| shard.attention(window)).collect(),
            qkv: device.tensor(tokens, q + 2 * kv)?,
            attended: device.tensor(tokens, q)?,
            activated: config
                .has_dense_mlps()
                .then(|| device.tensor(tokens, shard.intermediate_size))
                .transpose()?,
            experts: config
                .moe
                .as_ref()
                .map(|moe| ExpertMixer::allocate(&moe.shape, tokens, device))
                .transpose()?,
        })
    })
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
                    step.device.gate_up(GateUp { x: step.hidden, norm, weight: gate_up }, activated)?;
                    step.add(Linear::plain(activated, down))?;
                }
                (Mlp::Experts(weights), _, Some(experts)) => experts.run(step, weights, norm, index)?,
                _ => return Err(DeviceError::Misuse(format!("layer {index} has no buffers for its MLP"))),
            }
            step.pause()?;
        }
        Ok(())
    }
}
