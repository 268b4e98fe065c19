//! The checked keys of a Qwen3.5 `config.json`. The text model's keys are top-level keys or, in a config with a vision
//! encoder, keys of `text_config`.

use tutti_kernels::{DeltaShape, RopeFrequencies, collective::GroupRank};

use super::Variant;
use crate::{
    LoadError,
    config::{
        ConfigFile,
        keys::Keys,
        ranges::{self, product},
        refuse_quantization,
        text::{TextConfig, TextDefaults, divides, divides_or_repeats, types_of_layers},
    },
    experts::{ExpertShape, ExpertSizes},
    rope::{RopeDefaults, RopeTables},
    weights::share,
};

/// Defaults of keys about rotation.
const ROPE: RopeDefaults = RopeDefaults { rotated: 0.25, ..RopeDefaults::PLAIN };
/// Defaults of keys that a config may lack. All defaults in this file come from transformers' `Qwen3_5TextConfig` and
/// `Qwen3_5MoeTextConfig`.
const DEFAULTS: TextDefaults =
    TextDefaults { kv_heads: Some(4), head_dim: Some(256), max_position_embeddings: 32_768 };
const DEFAULT_EXPERTS: ExpertSizes = ExpertSizes { experts: 256, top_k: 8, intermediate_size: 512 };
/// Minimum number of taps of a convolution. With one tap, a convolution would have no state.
const MIN_TAPS: usize = 2;

/// The kind of a layer: the sublayer by which it mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerKind {
    /// Gated attention.
    Full,
    /// A gated delta net.
    Delta,
}

/// The checked shape of a Qwen3.5 text model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub variant: &'static Variant,
    /// Prefix of the names of the text model's tensors.
    pub prefix: &'static str,
    pub text: TextConfig,
    /// Intermediate width of the dense MLP or of the shared expert.
    pub intermediate_size: usize,
    /// The routed experts; `None` in a dense model.
    pub experts: Option<ExpertShape>,
    pub layers: Vec<LayerKind>,
    /// Numbers and sizes of the delta nets' heads.
    pub delta: DeltaShape,
    /// Rotation of the layers with attention.
    pub rope: RopeFrequencies,
}

impl Config {
    /// Reads and checks the keys.
    pub fn parse(file: &ConfigFile, variant: &'static Variant) -> Result<Self, LoadError> {
        let (top, nested) = (file.keys(), file.keys().section(ranges::TEXT_CONFIG)?);
        let (keys, prefix) = match nested.is_missing() {
            false => {
                // The section about all weights is a top-level one.
                refuse_quantization(&nested)?;
                (nested, "model.language_model.")
            }
            true => (top.clone(), "model."),
        };
        let mut text = TextConfig::read(&keys, &top, DEFAULTS)?;
        let layers = layers(&keys, text.layers)?;
        let rope = RopeTables::read(&keys, &["full_attention"], text.max_context, ROPE)?;
        let rope = match top.section(ranges::VISION_CONFIG)?.is_missing() {
            true => rope,
            false => rope.on_three_axes(&keys)?,
        };
        text.max_context = rope.max_context(text.max_context);
        let rope = rope.frequencies(text.head_dim).map_err(|problem| file.invalid(problem))?.remove(0);
        keys.refuse(&ranges::ATTENTION_BIAS)?;
        let (experts, intermediate_size) = match variant.experts {
            true => {
                let sizes = ExpertSizes::read(&keys, DEFAULT_EXPERTS)?;
                // transformers always normalises the weights of a token's experts to the sum 1.
                let shape = sizes.check(&text, true).map_err(|problem| file.invalid(problem))?;
                (Some(shape), keys.get_or(&ranges::SHARED_EXPERT_INTERMEDIATE_SIZE, 512)?)
            }
            false => (None, keys.need(&ranges::INTERMEDIATE_SIZE)?),
        };
        let delta = DeltaShape {
            key_heads: keys.get_or(&ranges::LINEAR_NUM_KEY_HEADS, 16)?,
            value_heads: keys.get_or(&ranges::LINEAR_NUM_VALUE_HEADS, 32)?,
            key_dim: keys.get_or(&ranges::LINEAR_KEY_HEAD_DIM, 128)?,
            value_dim: keys.get_or(&ranges::LINEAR_VALUE_HEAD_DIM, 128)?,
            taps: keys.get_or(&ranges::LINEAR_CONV_KERNEL_DIM, 4)?,
        };
        let config = Self { variant, prefix, text, intermediate_size, experts, layers, delta, rope };
        config.check().map_err(|problem| file.invalid(problem))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, taps } = self.delta;
        if !value_heads.is_multiple_of(key_heads) {
            return Err(format!(
                "linear_num_value_heads: {value_heads} is not a multiple of linear_num_key_heads, {key_heads}"
            ));
        }
        if taps < MIN_TAPS {
            return Err(format!("linear_conv_kernel_dim: must be at least {MIN_TAPS}, not {taps}"));
        }
        let (values, keys) = (("linear_num_value_heads", value_heads), ("linear_num_key_heads", key_heads));
        let (value_dim, key_dim) = (("linear_value_head_dim", value_dim), ("linear_key_head_dim", key_dim));
        product([keys, key_dim], ranges::MAX_WIDTH)?;
        product([values, value_dim], ranges::MAX_WIDTH)?;
        let layers = ("num_hidden_layers", self.layers.len());
        product([layers, values, key_dim, value_dim], ranges::MAX_STATE)?;
        let taps = ("linear_conv_kernel_dim", taps);
        product([layers, taps, keys, key_dim], ranges::MAX_STATE)?;
        product([layers, taps, values, value_dim], ranges::MAX_STATE)?;
        let hidden = ("hidden_size", self.text.hidden_size);
        product([("intermediate_size", self.intermediate_size), hidden], ranges::MAX_TENSOR).map(|_| ())
    }

    /// Returns the shape of one rank's shard. Refuses a number of ranks among which the model cannot be divided.
    pub fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        let delta = self.delta;
        let intermediate = match &self.experts {
            Some(experts) => {
                experts.check(group_rank)?;
                "shared_expert_intermediate_size"
            }
            None => "intermediate_size",
        };
        let text = self.text.shard(group_rank)?;
        divides("linear_num_value_heads", delta.value_heads, group_rank)?;
        divides(intermediate, self.intermediate_size, group_rank)?;
        divides_or_repeats("linear_num_key_heads", delta.key_heads, group_rank)?;
        let of = |units| share(units, group_rank).len();
        Ok(Self {
            text,
            delta: DeltaShape { key_heads: of(delta.key_heads), value_heads: of(delta.value_heads), ..delta },
            intermediate_size: of(self.intermediate_size),
            ..self.clone()
        })
    }

    /// Names in the checkpoint of the attention modules, in order of their layers.
    pub fn attention_modules(&self) -> Vec<String> {
        let full = self.layers.iter().enumerate().filter(|(_, kind)| **kind == LayerKind::Full);
        full.map(|(layer, _)| format!("{}layers.{layer}.self_attn", self.prefix)).collect()
    }

    /// Number of layers of a kind.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|layer| **layer == kind).count()
    }
}

/// Returns the kind of each layer: from `layer_types` if given, else from `full_attention_interval`.
fn layers(keys: &Keys<'_>, layers: usize) -> Result<Vec<LayerKind>, LoadError> {
    let interval = keys.get_or(&ranges::FULL_ATTENTION_INTERVAL, 4)?;
    let types = keys.get(&ranges::LAYER_TYPES)?;
    let kinds: Result<Vec<_>, _> = match &types {
        Some(types) => {
            let of_type = |kind: &String| match kind.as_str() {
                "full_attention" => Ok(LayerKind::Full),
                "linear_attention" => Ok(LayerKind::Delta),
                other => Err(format!("layer_types: {other:?} is none of full_attention, linear_attention")),
            };
            types_of_layers(types, layers).and_then(|()| types.iter().map(of_type).collect())
        }
        None => {
            let kind = |layer: usize| match layer.is_multiple_of(interval) {
                true => LayerKind::Full,
                false => LayerKind::Delta,
            };
            Ok((1..=layers).map(kind).collect())
        }
    };
    match kinds {
        Ok(kinds) if kinds.contains(&LayerKind::Full) => Ok(kinds),
        Ok(_) => Err(match types {
            Some(_) => keys.invalid(&ranges::LAYER_TYPES, "none of the layers is full_attention"),
            None => {
                let problem = format!("{interval} leaves none of {layers} layers with attention");
                keys.invalid(&ranges::FULL_ATTENTION_INTERVAL, problem)
            }
        }),
        Err(problem) => Err(keys.in_file(problem)),
    }
}

#[cfg(test)]
mod tests;
