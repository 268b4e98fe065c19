//! The keys of a `config.json` of this architecture, checked.

use std::path::Path;

use serde::Deserialize;
use tutti_kernels::{AttentionShape, WeightType, collective::GroupRank};

use super::{
    family::{Biases, Family, HeadDim, Windows},
    moe::{Moe, MoeKeys},
};
use crate::{
    LoadError,
    config::{ConfigFile, TokenIds, eos_token_ids, parse_dtype},
    decoder::{KvPlane, TextShape},
    experts::{Division, NO_EXPERTS},
    model::Limits,
    rope::{RopeKeys, RopeTables},
    weights::{Values, share},
};

/// Maximum number of layers of a config. A checkpoint's files are not checked against its config until much later.
const MAX_LAYERS: usize = 4096;
/// Maximum width of a head.
const MAX_HEAD_DIM: usize = 1 << 16;

/// The keys of a published config. Any key may be missing or null. [`Config::parse`] refuses a config that lacks a
/// required key.
#[derive(Deserialize)]
struct Keys {
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f32>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    // A missing key means a window of 4096; null means no window.
    #[serde(default = "default_window")]
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    eos_token_id: Option<TokenIds>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: MoeKeys,
}

fn default_window() -> Option<usize> {
    Some(4096)
}

/// The checked shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub family: &'static Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    /// True if the embedding matrix serves as LM head.
    pub tied: bool,
    /// True if q, k and v have biases.
    pub qkv_bias: bool,
    /// True if o has a bias.
    pub o_bias: bool,
    /// Sliding window of each layer: the number of keys that a query sees, that of its own position included. `None`
    /// means all keys.
    pub windows: Vec<Option<usize>>,
    /// `None` if all layers have a dense MLP.
    pub moe: Option<Moe>,
    /// Rotation of each layer.
    pub rope: RopeTables,
    pub eos_token_id: Option<TokenIds>,
    /// Type in which the weights were saved. Only dummy weights use this type, because a checkpoint file states the
    /// type of each of its tensors.
    pub dtype: WeightType,
}

impl Config {
    /// Reads and checks the keys. Defaults are those of the family's config class in transformers.
    pub fn parse(file: &ConfigFile, family: &'static Family) -> Result<Self, LoadError> {
        let keys: Keys = file.parse()?;
        let needed = |name: &str, value: Option<usize>| match value {
            Some(0) => Err(file.invalid(format!("{name}: must be at least 1, not 0"))),
            Some(value) => Ok(value),
            None => Err(file.invalid(format!("{name}: is missing"))),
        };
        let few = |name: &str, value: usize, limit: usize| match value {
            value if value <= limit => Ok(value),
            value => Err(file.invalid(format!("{name}: is {value}, the limit is {limit}"))),
        };
        let heads = needed("num_attention_heads", keys.num_attention_heads)?;
        let layers =
            few("num_hidden_layers", needed("num_hidden_layers", keys.num_hidden_layers)?, MAX_LAYERS)?;
        let hidden_size = needed("hidden_size", keys.hidden_size)?;
        let default_context = Some(family.max_position_embeddings);
        let max_position_embeddings =
            needed("max_position_embeddings", keys.max_position_embeddings.or(default_context))?;
        let head_dim = match (keys.head_dim, family.head_dim) {
            (None, HeadDim::ShareOfHidden) if hidden_size % heads != 0 => {
                return Err(file.invalid(format!(
                    "hidden_size: {hidden_size} is not a multiple of num_attention_heads, {heads}, and head_dim is missing"
                )));
            }
            (None, HeadDim::ShareOfHidden) => hidden_size / heads,
            (None, HeadDim::Fixed(width)) => width,
            (Some(_), _) => needed("head_dim", keys.head_dim)?,
        };
        let head_dim = few("head_dim", head_dim, MAX_HEAD_DIM)?;
        let by_key = keys.attention_bias == Some(true);
        let (qkv_bias, o_bias) = match family.biases {
            Biases::Never => (false, false),
            Biases::Qkv => (true, false),
            Biases::ByKey => (by_key, by_key),
        };
        let moe = match family.experts {
            true => keys.moe.resolve(layers, hidden_size).map_err(|problem| file.invalid(problem))?,
            false => None,
        };
        let windows = keys.windows(family.windows, layers).map_err(|problem| file.invalid(problem))?;
        let layer_type = |window: &Option<usize>| match window {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        let layer_types: Vec<_> = windows.iter().map(layer_type).collect();
        let rope = RopeTables::resolve(&keys.rope, &layer_types, max_position_embeddings);
        let config = Self {
            family,
            vocab_size: needed("vocab_size", keys.vocab_size)?,
            hidden_size,
            intermediate_size: needed("intermediate_size", keys.intermediate_size)?,
            layers,
            heads,
            kv_heads: needed("num_key_value_heads", keys.num_key_value_heads.or(Some(heads)))?,
            head_dim,
            max_position_embeddings,
            rms_norm_eps: keys.rms_norm_eps.unwrap_or(1e-6),
            tied: keys.tie_word_embeddings.unwrap_or(false),
            qkv_bias,
            o_bias,
            windows,
            moe,
            rope: rope.map_err(|problem| file.invalid(problem))?,
            dtype: keys.weight_type().map_err(|problem| file.invalid(problem))?,
            eos_token_id: keys.eos_token_id,
        };
        if keys.mlp_bias == Some(true) {
            return Err(file.invalid("mlp_bias: true is not supported"));
        }
        config.check(keys.hidden_act.as_deref()).map_err(|problem| file.invalid(problem))?;
        Ok(config)
    }

    fn check(&self, hidden_act: Option<&str>) -> Result<(), String> {
        let Self { heads, kv_heads, head_dim, .. } = self;
        if heads % kv_heads != 0 {
            return Err(format!(
                "num_attention_heads: {heads} is not a multiple of num_key_value_heads, {kv_heads}"
            ));
        }
        if head_dim % 2 != 0 {
            return Err(format!("head_dim: {head_dim} is odd, but rotation needs pairs"));
        }
        // transformers rotates whole heads in these families, whatever this key says.
        if let Some(rope) = self.rope.tables.iter().find(|rope| rope.rotated(*head_dim) != *head_dim) {
            let rotated = rope.rotated(*head_dim);
            return Err(format!(
                "partial_rotary_factor: rotates {rotated} of {head_dim} elements, but {} rotates all",
                self.family.name
            ));
        }
        if let Some(other) = hidden_act.filter(|act| *act != "silu") {
            return Err(format!("hidden_act: {other:?} is not supported, only \"silu\""));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(format!("rms_norm_eps: must not be negative, but is {}", self.rms_norm_eps));
        }
        Ok(())
    }

    /// Returns the shape of one rank's shard: its share of the heads, the intermediate width and the vocabulary.
    /// Refuses a number of ranks among which these cannot be divided equally.
    pub fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        let Self { heads, kv_heads, intermediate_size, vocab_size, .. } = *self;
        if let Some(moe) = &self.moe {
            moe.shape.check(group_rank)?;
        }
        for (key, number) in [
            ("num_attention_heads", heads),
            ("intermediate_size", if self.has_dense_mlps() { intermediate_size } else { 0 }),
            ("vocab_size", vocab_size),
        ] {
            if !number.is_multiple_of(group_rank.world_size) {
                return Err(format!(
                    "{key}: {number} is not a multiple of tp, which is {}",
                    group_rank.world_size
                ));
            }
        }
        if !kv_heads.is_multiple_of(group_rank.world_size) && !group_rank.world_size.is_multiple_of(kv_heads)
        {
            let tp = group_rank.world_size;
            return Err(format!(
                "num_key_value_heads: {kv_heads} is neither a multiple nor a divisor of tp, which is {tp}"
            ));
        }
        Ok(Self {
            heads: share(heads, group_rank).len(),
            kv_heads: share(kv_heads, group_rank).len(),
            intermediate_size: share(intermediate_size, group_rank).len(),
            vocab_size: share(vocab_size, group_rank).len(),
            ..self.clone()
        })
    }

    /// Makes ranks divide whole experts among themselves. Refuses a model without experts.
    pub fn divide_whole_experts(&mut self) -> Result<(), String> {
        let moe = self.moe.as_mut().ok_or(NO_EXPERTS)?;
        moe.shape.division = Division::Experts;
        Ok(())
    }

    /// True if the MLP of this layer is experts.
    pub fn is_sparse(&self, layer: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.sparse[layer])
    }

    /// True if any layer has a dense MLP.
    pub fn has_dense_mlps(&self) -> bool {
        (0..self.layers).any(|layer| !self.is_sparse(layer))
    }

    /// Returns the limits of this model, whose checkpoint is in `dir`.
    pub fn limits(&self, dir: &Path, max_step_tokens: usize) -> Result<Limits, LoadError> {
        Ok(Limits {
            vocab_size: self.vocab_size,
            max_context_tokens: self.max_context(),
            eos_token_ids: eos_token_ids(dir, self.eos_token_id.clone())?,
            max_step_tokens,
            steps_in_flight: 1,
        })
    }

    /// Returns the decoder around the layers.
    pub fn text(&self, dir: &Path, max_step_tokens: usize) -> Result<TextShape, LoadError> {
        let Self { layers, heads, kv_heads, head_dim, hidden_size, vocab_size, .. } = *self;
        let experts = self.moe.as_ref().map_or(String::new(), |moe| format!(", {}", moe.shape));
        Ok(TextShape {
            summary: format!(
                "{}{experts}, {layers} layers of width {hidden_size}, {heads} + {kv_heads} heads of {head_dim}, \
                 vocabulary {vocab_size}",
                self.family.name
            ),
            prefix: "model.",
            hidden_size,
            norm_eps: self.rms_norm_eps,
            norm_values: Values::AsStored,
            tied: self.tied,
            dtype: self.dtype,
            limits: self.limits(dir, max_step_tokens)?,
            kv: Some(KvPlane { layers, heads: kv_heads, head_dim }),
            slots: Vec::new(),
            expert_layers: (0..layers).filter(|&layer| self.is_sparse(layer)).collect(),
        })
    }

    /// Maximum number of positions of a request: `max_position_embeddings`, or the context that YaRN extends to if that
    /// is longer.
    pub fn max_context(&self) -> usize {
        self.max_position_embeddings.max(self.rope.extended_context().unwrap_or(0))
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

impl Keys {
    /// Returns the window of each layer.
    fn windows(&self, rule: Windows, layers: usize) -> Result<Vec<Option<usize>>, String> {
        let window = match rule {
            Windows::Never => None,
            Windows::All => self.sliding_window,
            Windows::AllIfUsed | Windows::ByLayer => {
                self.sliding_window.filter(|_| self.use_sliding_window == Some(true))
            }
        };
        if window == Some(0) {
            return Err("sliding_window: must be at least 1, not 0".into());
        }
        if rule != Windows::ByLayer {
            return Ok(vec![window; layers]);
        }
        let Some(types) = &self.layer_types else {
            let first = self.max_window_layers.unwrap_or(28);
            return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
        };
        if types.len() != layers {
            let found = types.len();
            return Err(format!("layer_types: names {found} layers, but num_hidden_layers is {layers}"));
        }
        let of_type = |kind: &String| match (kind.as_str(), window) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(window)) => Ok(Some(window)),
            ("sliding_attention", None) => {
                Err("layer_types: asks for sliding_attention, but use_sliding_window is not true or \
                     sliding_window is null"
                    .into())
            }
            (other, _) => Err(format!("layer_types: {other:?} is none of full_attention, sliding_attention")),
        };
        types.iter().map(of_type).collect()
    }

    /// Returns the type that `dtype` or `torch_dtype` names. The default is f32, as in torch.
    fn weight_type(&self) -> Result<WeightType, String> {
        let Some(name) = self.dtype.as_deref().or(self.torch_dtype.as_deref()) else {
            return Ok(WeightType::F32);
        };
        parse_dtype(name)
            .ok_or_else(|| format!("dtype: {name:?} is not supported; supported: float32, float16, bfloat16"))
    }
}

#[cfg(test)]
mod tests;
