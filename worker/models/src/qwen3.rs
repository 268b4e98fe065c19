//! Dense Qwen3: pre-norm decoder, grouped-query attention with an RMS norm on each head of q and k, RoPE, SwiGLU.
//!
//! Paper: "Qwen3 Technical Report", arXiv:2505.09388. Reference: transformers `models/qwen3/modeling_qwen3.py`.

mod config;
mod forward;
mod weights;

use std::{collections::VecDeque, path::Path};

use tutti_kernels::{
    AttentionShape, Device, DeviceError, KvShape, Quantize, RopeFrequencies, WeightType,
    collective::GroupRank,
};
use tutti_proto::declaration::ModelDeclaration;

#[cfg(feature = "media-test-model")]
pub(crate) use self::config::Config as Shape;
use self::{
    config::Config,
    weights::{Specs, Weights},
};
use crate::{
    DecoderDevice, LoadError, LoadFormat, LoadOptions, Model, StepHook,
    config::ConfigFile,
    model::Limits,
    thinker,
    weights::{Dummy, Loader, Progress, SafetensorsDir, Source},
};

/// The name of this family in a config's `architectures`.
pub(crate) const ARCHITECTURE: &str = "Qwen3ForCausalLM";
/// The name of this family in a config's `model_type`, which is used only if `architectures` is missing.
pub(crate) const MODEL_TYPE: &str = "qwen3";

/// Number of logit rows computed at once. It bounds the memory for logits: one row as wide as the vocabulary for each.
const LOGIT_TILE: usize = 32;

/// A dense Qwen3 on a device.
pub(crate) struct Qwen3<D: Device> {
    device: D,
    group_rank: GroupRank,
    /// The shape of the whole model, not of this rank's shard.
    config: Config,
    limits: Limits,
    declaration: ModelDeclaration,
    weights: Weights<D>,
    weight_bytes: u64,
    /// Type of the weights in the checkpoint.
    weight_type: WeightType,
    quantize: Quantize,
    rope: RopeFrequencies,
    /// Shape of each layer's attention on this rank. Layers differ only in their window.
    attention: Vec<AttentionShape>,
    activations: Activations<D>,
    /// Shape of the KV pool. Its `pages` is 0 until the pool is allocated.
    kv_shape: KvShape,
    planes: Option<D::Planes>,
    step_hook: Option<Box<dyn StepHook>>,
    /// Number of logit rows of a step whose layers are enqueued, and whose logits are not: `activations.hidden` holds
    /// their hidden states. `None` between two steps.
    logit_rows: Option<usize>,
    /// Steps in flight whose logits are enqueued, oldest first.
    in_flight: VecDeque<D::Done>,
}

/// Buffers for the largest step, of `T` tokens. In the shapes below, `heads`, `kv_heads`, `intermediate` and `vocab`
/// are the sizes of this rank's shard.
struct Activations<D: Device> {
    /// The residual stream, `[T, hidden]`.
    hidden: D::Tensor,
    /// This rank's part of a sublayer's output, which is summed over ranks, `[T, hidden]`. `None` in a group of one
    /// rank.
    partial: Option<D::Tensor>,
    /// q, k and v, `[T, (heads + 2 * kv_heads) * head_dim]`.
    qkv: D::Tensor,
    /// Rotary angles, `[T, head_dim]`.
    angles: D::Tensor,
    /// Output of the attention, `[T, heads * head_dim]`.
    attended: D::Tensor,
    /// Input of the down projection, `[T, intermediate]`.
    activated: D::Tensor,
    /// Hidden states of a tile's logit rows, `[LOGIT_TILE, hidden]`.
    tile: D::Tensor,
    /// Logits of a tile, `[LOGIT_TILE, vocab]`.
    logits: D::Tensor,
    /// The logits of all ranks side by side, `[LOGIT_TILE, ranks * vocab]`. `None` except on the leader of a TP group.
    gathered: Option<D::Tensor>,
}

/// Loads a model of this family from `dir`, whose `config.json` is `file`.
pub(crate) fn load<D: DecoderDevice>(
    file: &ConfigFile,
    dir: &Path,
    options: &LoadOptions,
    device: D,
    progress: Progress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    Ok(Box::new(Qwen3::load(file, dir, options, device, progress)?))
}

impl<D: Device> Qwen3<D> {
    /// Loads the model as a concrete type, for families that use a Qwen3 as one of their nodes.
    pub(crate) fn load(
        file: &ConfigFile,
        dir: &Path,
        options: &LoadOptions,
        mut device: D,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError> {
        let config = Config::parse(file)?;
        let source = match options.load_format {
            LoadFormat::Auto => Source::Files(SafetensorsDir::open(dir)?),
            LoadFormat::Dummy => Source::Dummy(Dummy { seed: options.seed, dtype: config.dtype }),
        };

        let group_rank = device.group_rank();
        let shard = config.shard(group_rank).map_err(|problem| file.invalid(problem))?;
        let specs = Specs::new(&config);
        let mut loader = Loader::new(source, options.quantize, specs.all(), &mut device, progress)?;
        let weight_type = loader.dtype(&specs.embedding)?;
        let weights = Weights::load(&specs, &mut loader)?;
        let weight_bytes = loader.finish();

        let activations = Activations::allocate(&shard, options.max_step_tokens, &mut device)?;
        let page_tokens = options.page_tokens;
        let kv_shape = KvShape {
            layers: config.layers,
            kv_heads: shard.kv_heads,
            head_dim: config.head_dim,
            page_tokens,
            pages: 0,
            dtype: weight_type,
        };
        let attention = config.windows.iter().map(|&window| shard.attention(window)).collect();
        Ok(Self {
            limits: Limits {
                steps_in_flight: device.limits().steps_in_flight,
                ..config.limits(dir, options.max_step_tokens)?
            },
            declaration: thinker::declaration(page_tokens, kv_shape.page_bytes() / page_tokens.max(1))?,
            rope: config.rope.frequencies(config.head_dim),
            device,
            group_rank,
            config,
            weights,
            weight_bytes,
            weight_type,
            quantize: options.quantize,
            attention,
            activations,
            kv_shape,
            planes: None,
            step_hook: None,
            logit_rows: None,
            in_flight: VecDeque::new(),
        })
    }

    /// The device that the model runs on.
    #[cfg(feature = "media-test-model")]
    pub(crate) fn device(&mut self) -> &mut D {
        &mut self.device
    }
}

impl<D: Device> Activations<D> {
    fn allocate(config: &Config, tokens: usize, device: &mut D) -> Result<Self, DeviceError> {
        let group_rank = device.group_rank();
        let gathers = group_rank.is_leader() && !group_rank.is_alone();
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        Ok(Self {
            hidden: device.tensor(tokens, hidden)?,
            partial: (!group_rank.is_alone()).then(|| device.tensor(tokens, hidden)).transpose()?,
            qkv: device.tensor(tokens, q + 2 * kv)?,
            angles: device.tensor(tokens, config.head_dim)?,
            attended: device.tensor(tokens, q)?,
            activated: device.tensor(tokens, intermediate)?,
            tile: device.tensor(LOGIT_TILE, hidden)?,
            logits: device.tensor(LOGIT_TILE, config.vocab_size)?,
            gathered: gathers
                .then(|| device.tensor(LOGIT_TILE, config.vocab_size * group_rank.world_size))
                .transpose()?,
        })
    }
}
