//! The checked keys that all text models have, and the shapes and limits that follow from them in every family.

use std::path::Path;

use tutti_kernels::{AttentionShape, WeightType, collective::GroupRank};

use super::{
    TokenIds, eos_token_ids,
    keys::Keys,
    parse_dtype,
    ranges::{self, product},
};
use crate::{LoadError, decoder::KvPlane, model::Limits, weights::share};

/// The part of a config that all text models have. In the config of a rank's shard, heads and vocabulary are the rank's
/// share.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TextConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Number of layers.
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Maximum number of positions of a request.
    pub max_context: usize,
    pub rms_norm_eps: f32,
    /// True if the embedding matrix is also the LM head.
    pub tied: bool,
    pub eos_token_id: Option<TokenIds>,
    /// Type in which the weights were saved. Only dummy weights use it, because a checkpoint file states the type of
    /// each of its tensors.
    pub dtype: WeightType,
}

/// Defaults of keys that a config may lack, taken from the family's config class in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextDefaults {
    /// `num_key_value_heads`; `None` means the value of `num_attention_heads`.
    pub kv_heads: Option<usize>,
    /// `head_dim`; `None` means `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
}

impl TextConfig {
    /// Reads and checks the keys of a text model. `top` are the top-level keys of the file. A config with a vision
    /// encoder may have the same key in `top` and in `keys`. The value in `top` then wins.
    pub fn read(keys: &Keys<'_>, top: &Keys<'_>, defaults: TextDefaults) -> Result<Self, LoadError> {
        let heads = keys.need(&ranges::NUM_ATTENTION_HEADS)?;
        let hidden_size = keys.need(&ranges::HIDDEN_SIZE)?;
        let kv_heads = keys.get_or(&ranges::NUM_KEY_VALUE_HEADS, defaults.kv_heads.unwrap_or(heads))?;
        let head_dim = match (keys.get(&ranges::HEAD_DIM)?, defaults.head_dim) {
            (Some(width), _) | (None, Some(width)) => width,
            (None, None) if !hidden_size.is_multiple_of(heads) => {
                return Err(keys.invalid(
                    &ranges::HIDDEN_SIZE,
                    format!("{hidden_size} is not a multiple of num_attention_heads, {heads}, and head_dim is missing"),
                ));
            }
            (None, None) => hidden_size / heads,
        };
        let (tied, eos) = (&ranges::TIE_WORD_EMBEDDINGS, &ranges::EOS_TOKEN_ID);
        let (dtype, torch_dtype) = (&ranges::DTYPE, &ranges::TORCH_DTYPE);
        let names = [top.get(dtype)?, top.get(torch_dtype)?, keys.get(dtype)?, keys.get(torch_dtype)?];
        keys.get(&ranges::HIDDEN_ACT)?;
        let config = Self {
            vocab_size: keys.need(&ranges::VOCAB_SIZE)?,
            hidden_size,
            layers: keys.need(&ranges::NUM_HIDDEN_LAYERS)?,
            heads,
            kv_heads,
            head_dim,
            max_context: keys.get_or(&ranges::MAX_POSITION_EMBEDDINGS, defaults.max_position_embeddings)?,
            rms_norm_eps: keys.get_or(&ranges::RMS_NORM_EPS, 1e-6)? as f32,
            tied: top.get(tied)?.or(keys.get(tied)?).unwrap_or(false),
            eos_token_id: top.get(eos)?.or(keys.get(eos)?),
            dtype: match names.into_iter().flatten().next() {
                // The default type of torch.
                None => WeightType::F32,
                Some(name) => parse_dtype(&name).ok_or_else(|| {
                    let supported = "supported: float32, float16, bfloat16";
                    keys.invalid(dtype, format!("{name:?} is not supported; {supported}"))
                })?,
            },
        };
        config.check().map_err(|problem| keys.in_file(problem))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let Self { heads, kv_heads, head_dim, hidden_size, .. } = *self;
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_attention_heads: {heads} is not a multiple of num_key_value_heads, {kv_heads}"
            ));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim: {head_dim} is odd, but rotation needs pairs"));
        }
        let of_heads = product([("num_attention_heads", heads), ("head_dim", head_dim)], ranges::MAX_WIDTH)?;
        let of_kv =
            [("num_hidden_layers", self.layers), ("num_key_value_heads", kv_heads), ("head_dim", head_dim)];
        product(of_kv, ranges::MAX_KV_OF_A_TOKEN)?;
        let hidden = ("hidden_size", hidden_size);
        product([("vocab_size", self.vocab_size), hidden], ranges::MAX_TENSOR)?;
        product([("num_attention_heads x head_dim", of_heads), hidden], ranges::MAX_TENSOR).map(|_| ())
    }

    /// Returns the shape of one rank's shard: its share of the heads and the vocabulary. Refuses a number of ranks
    /// among which heads and vocabulary cannot be divided equally.
    pub fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        let Self { heads, kv_heads, vocab_size, .. } = *self;
        divides("num_attention_heads", heads, group_rank)?;
        divides("vocab_size", vocab_size, group_rank)?;
        divides_or_repeats("num_key_value_heads", kv_heads, group_rank)?;
        let of = |units| share(units, group_rank).len();
        Ok(Self { heads: of(heads), kv_heads: of(kv_heads), vocab_size: of(vocab_size), ..self.clone() })
    }

    /// Returns the limits of this model, whose checkpoint is in `dir`.
    pub fn limits(&self, dir: &Path, max_step_tokens: usize) -> Result<Limits, LoadError> {
        Ok(Limits {
            vocab_size: self.vocab_size,
            max_context_tokens: self.max_context,
            eos_token_ids: eos_token_ids(dir, self.eos_token_id.clone(), self.vocab_size)?,
            max_step_tokens,
            steps_in_flight: 1,
        })
    }

    /// Returns the plane of the keys and values of `layers` layers.
    pub fn kv_plane(&self, layers: usize) -> KvPlane {
        KvPlane { layers, heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Returns the shape of the attention of a layer with this window.
    pub fn attention(&self, window: Option<usize>) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: (self.head_dim as f32).sqrt().recip(),
            window,
        }
    }
}

/// Refuses a number of ranks that does not divide `number`, the value of `key`.
pub(crate) fn divides(key: &str, number: usize, group_rank: GroupRank) -> Result<(), String> {
    let tp = group_rank.world_size;
    match number.is_multiple_of(tp) {
        true => Ok(()),
        false => Err(format!("{key}: {number} is not a multiple of tp, which is {tp}")),
    }
}

/// Refuses a number of ranks unless it divides `number`, the value of `key`, or is a multiple of it. With a multiple,
/// several ranks hold the same unit.
pub(crate) fn divides_or_repeats(key: &str, number: usize, group_rank: GroupRank) -> Result<(), String> {
    let tp = group_rank.world_size;
    match number.is_multiple_of(tp) || tp.is_multiple_of(number) {
        true => Ok(()),
        false => Err(format!("{key}: {number} is neither a multiple nor a divisor of tp, which is {tp}")),
    }
}

/// Refuses `layer_types` unless it has one entry per layer.
pub(crate) fn types_of_layers(types: &[String], layers: usize) -> Result<(), String> {
    match types.len() {
        found if found == layers => Ok(()),
        found => Err(format!("layer_types: names {found} layers, but num_hidden_layers is {layers}")),
    }
}
