//! The keys of a Qwen3.5 `config.json`, checked. The text model's keys are at the top, or under `text_config` beside a
//! vision encoder's.

use std::path::Path;

use serde::Deserialize;
use tutti_kernels::{
    AttentionShape, DeltaShape, RopeFrequencies, Routing, WeightType, collective::GroupRank,
};

use super::Family;
use crate::{
    LoadError,
    config::{ConfigFile, TokenIds, eos_token_ids, parse_dtype},
    decoder::{KvPlane, SlotPlane, TextShape},
    experts::{Division, ExpertShape, NO_EXPERTS},
    model::Limits,
    rope::{RopeKeys, RopeTables},
    weights::{Values, share},
};

/// Share of a head's elements that are rotated in a config without `partial_rotary_factor`.
const ROTATED: f64 = 0.25;

/// The keys of a text model. Any key may be missing or null. [`Config::parse`] refuses a config that lacks a required
/// key.
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
    attention_bias: Option<bool>,
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<usize>,
    linear_conv_kernel_dim: Option<usize>,
    linear_key_head_dim: Option<usize>,
    linear_value_head_dim: Option<usize>,
    linear_num_key_heads: Option<usize>,
    linear_num_value_heads: Option<usize>,
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    #[serde(flatten)]
    shared: SharedKeys,
    #[serde(flatten)]
    rope: RopeKeys,
}

/// The keys that a config with a vision encoder may have at the top, under `text_config`, or in both.
#[derive(Clone, Default, Deserialize)]
struct SharedKeys {
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<TokenIds>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
}

/// The sublayer of a layer that mixes tokens.
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
    pub family: &'static Family,
    /// First part of the names of the text model's tensors.
    pub prefix: &'static str,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Intermediate width of the dense MLP or of the shared expert.
    pub intermediate_size: usize,
    /// The routed experts; `None` in a dense model.
    pub experts: Option<ExpertShape>,
    pub layers: Vec<LayerKind>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Heads of the delta nets.
    pub delta: DeltaShape,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    /// True if the embedding matrix serves as LM head.
    pub tied: bool,
    /// Rotation of the layers with attention.
    pub rope: RopeTables,
    pub eos_token_id: Option<TokenIds>,
    /// Type of dummy weights.
    pub dtype: WeightType,
}

impl Config {
    /// Reads and checks the keys. Defaults are those of transformers' `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig`.
    pub fn parse(file: &ConfigFile, family: &'static Family) -> Result<Self, LoadError> {
        let nested = file.section("text_config");
        let prefix = if nested.is_some() { "model.language_model." } else { "model." };
        let keys: Keys = nested.as_ref().unwrap_or(file).parse()?;
        let top: SharedKeys = file.parse()?;
        let at_least_one = |name: &str, value: Option<usize>| match value {
            Some(0) => Err(file.invalid(format!("{name}: must be at least 1, not 0"))),
            Some(value) => Ok(value),
            None => Err(file.invalid(format!("{name}: is missing"))),
        };
        let or = |name: &str, value: Option<usize>, default| at_least_one(name, value.or(Some(default)));
        let max_position_embeddings = or("max_position_embeddings", keys.max_position_embeddings, 32_768)?;
        let rope = keys.rope.clone().rotating(ROTATED);
        let rope = RopeTables::resolve(&rope, &["full_attention"], max_position_embeddings);
        let layers = at_least_one("num_hidden_layers", keys.num_hidden_layers)?;
        let dtype = [&top, &keys.shared]
            .into_iter()
            .find_map(|keys| keys.dtype.as_deref().or(keys.torch_dtype.as_deref()));
        let heads = at_least_one("num_attention_heads", keys.num_attention_heads)?;
        let hidden_size = at_least_one("hidden_size", keys.hidden_size)?;
        let experts = match family.experts {
            true => Some(ExpertShape {
                hidden_size,
                intermediate_size: or("moe_intermediate_size", keys.moe_intermediate_size, 512)?,
                experts: or("num_experts", keys.num_experts, 256)?,
                routing: Routing {
                    top_k: or("num_experts_per_tok", keys.num_experts_per_tok, 8)?,
                    renormalise: true,
                },
                division: Division::Width,
            }),
            false => None,
        };
        let intermediate_size = match family.experts {
            true => or("shared_expert_intermediate_size", keys.shared_expert_intermediate_size, 512)?,
            false => at_least_one("intermediate_size", keys.intermediate_size)?,
        };
        let config = Self {
            family,
            prefix,
            vocab_size: at_least_one("vocab_size", keys.vocab_size)?,
            hidden_size,
            intermediate_size,
            experts,
            layers: keys.layers(layers).map_err(|problem| file.invalid(problem))?,
            heads,
            kv_heads: or("num_key_value_heads", keys.num_key_value_heads, 4)?,
            head_dim: or("head_dim", keys.head_dim, 256)?,
            delta: DeltaShape {
                key_heads: or("linear_num_key_heads", keys.linear_num_key_heads, 16)?,
                value_heads: or("linear_num_value_heads", keys.linear_num_value_heads, 32)?,
                key_dim: or("linear_key_head_dim", keys.linear_key_head_dim, 128)?,
                value_dim: or("linear_value_head_dim", keys.linear_value_head_dim, 128)?,
                taps: or("linear_conv_kernel_dim", keys.linear_conv_kernel_dim, 4)?,
            },
            max_position_embeddings,
            rms_norm_eps: keys.rms_norm_eps.unwrap_or(1e-6),
            tied: top.tie_word_embeddings.or(keys.shared.tie_word_embeddings).unwrap_or(false),
            rope: rope.map_err(|problem| file.invalid(problem))?,
            dtype: weight_type(dtype).map_err(|problem| file.invalid(problem))?,
            eos_token_id: top.eos_token_id.or(keys.shared.eos_token_id.clone()),
        };
        config.check(&keys).map_err(|problem| file.invalid(problem))?;
        Ok(config)
    }

    fn check(&self, keys: &Keys) -> Result<(), String> {
        let Self { heads, kv_heads, head_dim, delta, .. } = self;
        if let Some(ExpertShape { experts, routing, .. }) = self.experts
            && routing.top_k > experts
        {
            return Err(format!("num_experts_per_tok: {} of num_experts, {experts}", routing.top_k));
        }
        if heads % kv_heads != 0 {
            return Err(format!(
                "num_attention_heads: {heads} is not a multiple of num_key_value_heads, {kv_heads}"
            ));
        }
        if head_dim % 2 != 0 {
            return Err(format!("head_dim: {head_dim} is odd, but rotation needs pairs"));
        }
        let DeltaShape { key_heads, value_heads, taps, .. } = delta;
        if value_heads % key_heads != 0 {
            return Err(format!(
                "linear_num_value_heads: {value_heads} is not a multiple of linear_num_key_heads, {key_heads}"
            ));
        }
        if *taps < 2 {
            return Err(format!("linear_conv_kernel_dim: must be at least 2, not {taps}"));
        }
        if keys.attention_bias == Some(true) {
            return Err("attention_bias: true is not supported".into());
        }
        if let Some(other) = keys.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(format!("hidden_act: {other:?} is not supported, only \"silu\""));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(format!("rms_norm_eps: must not be negative, but is {}", self.rms_norm_eps));
        }
        Ok(())
    }

    /// Returns the shape of one rank's shard. Refuses a number of ranks among which it cannot be divided.
    pub fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        let (tp, delta) = (group_rank.world_size, self.delta);
        let intermediate = match &self.experts {
            Some(experts) => {
                experts.check(group_rank)?;
                "shared_expert_intermediate_size"
            }
            None => "intermediate_size",
        };
        for (key, number) in [
            ("num_attention_heads", self.heads),
            ("linear_num_value_heads", delta.value_heads),
            (intermediate, self.intermediate_size),
            ("vocab_size", self.vocab_size),
        ] {
            if !number.is_multiple_of(tp) {
                return Err(format!("{key}: {number} is not a multiple of tp, which is {tp}"));
            }
        }
        for (key, number) in
            [("num_key_value_heads", self.kv_heads), ("linear_num_key_heads", delta.key_heads)]
        {
            if !number.is_multiple_of(tp) && !tp.is_multiple_of(number) {
                return Err(format!(
                    "{key}: {number} is neither a multiple nor a divisor of tp, which is {tp}"
                ));
            }
        }
        let of = |units| share(units, group_rank).len();
        Ok(Self {
            heads: of(self.heads),
            kv_heads: of(self.kv_heads),
            delta: DeltaShape { key_heads: of(delta.key_heads), value_heads: of(delta.value_heads), ..delta },
            intermediate_size: of(self.intermediate_size),
            vocab_size: of(self.vocab_size),
            ..self.clone()
        })
    }

    /// Makes ranks divide whole experts among themselves. Refuses a model without experts.
    pub fn divide_whole_experts(&mut self) -> Result<(), String> {
        let experts = self.experts.as_mut().ok_or(NO_EXPERTS)?;
        experts.division = Division::Experts;
        Ok(())
    }

    /// Number of layers of a kind.
    fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|layer| **layer == kind).count()
    }

    /// Returns the decoder around the layers.
    pub fn text(&self, dir: &Path, max_step_tokens: usize) -> Result<TextShape, LoadError> {
        let Self { heads, kv_heads, head_dim, hidden_size, vocab_size, delta, .. } = *self;
        let (attentions, deltas) = (self.count(LayerKind::Full), self.count(LayerKind::Delta));
        let plane = |name, units, unit_bytes| SlotPlane { name, layers: deltas, units, unit_bytes };
        let planes = [
            plane("conv_keys", delta.key_heads, delta.key_conv_bytes()),
            plane("conv_values", delta.value_heads, delta.value_conv_bytes()),
            plane("delta", delta.value_heads, delta.memory_bytes()),
        ];
        let experts = self.experts.as_ref().map_or(String::new(), |shape| format!(", {shape}"));
        Ok(TextShape {
            summary: format!(
                "{}{experts}, {} layers of width {hidden_size}, {attentions} with {heads} + {kv_heads} heads of \
                 {head_dim}, vocabulary {vocab_size}",
                self.family.name,
                self.layers.len()
            ),
            prefix: self.prefix,
            hidden_size,
            norm_eps: self.rms_norm_eps,
            norm_values: Values::PlusOne,
            tied: self.tied,
            dtype: self.dtype,
            limits: Limits {
                vocab_size,
                max_context_tokens: self.max_context(),
                eos_token_ids: eos_token_ids(dir, self.eos_token_id.clone())?,
                max_step_tokens,
                steps_in_flight: 1,
            },
            kv: Some(KvPlane { layers: attentions, heads: kv_heads, head_dim }),
            slots: if deltas > 0 { planes.to_vec() } else { Vec::new() },
            expert_layers: if self.experts.is_some() { (0..self.layers.len()).collect() } else { Vec::new() },
        })
    }

    /// Maximum number of positions of a request.
    fn max_context(&self) -> usize {
        self.max_position_embeddings.max(self.rope.extended_context().unwrap_or(0))
    }

    /// Returns the rotary frequencies. The error names the key at fault.
    pub fn rope_frequencies(&self) -> Result<RopeFrequencies, String> {
        Ok(self.rope.frequencies(self.head_dim)?.remove(0))
    }

    /// Returns the shape of the layers with attention.
    pub fn attention(&self) -> AttentionShape {
        let Self { heads, kv_heads, head_dim, .. } = *self;
        let scale = (head_dim as f32).sqrt().recip();
        AttentionShape { heads, kv_heads, head_dim, scale, window: None }
    }
}

impl Keys {
    /// Returns the kind of each layer: from `layer_types` if given, else from `full_attention_interval`.
    fn layers(&self, layers: usize) -> Result<Vec<LayerKind>, String> {
        let kinds: Vec<_> = match &self.layer_types {
            Some(types) if types.len() != layers => {
                let found = types.len();
                return Err(format!("layer_types: names {found} layers, but num_hidden_layers is {layers}"));
            }
            Some(types) => {
                let of_type = |kind: &String| match kind.as_str() {
                    "full_attention" => Ok(LayerKind::Full),
                    "linear_attention" => Ok(LayerKind::Delta),
                    other => {
                        Err(format!("layer_types: {other:?} is none of full_attention, linear_attention"))
                    }
                };
                types.iter().map(of_type).collect::<Result<_, _>>()?
            }
            None => {
                let interval = self.full_attention_interval.unwrap_or(4);
                if interval == 0 {
                    return Err("full_attention_interval: must be at least 1, not 0".into());
                }
                let kind = |layer: usize| match (layer + 1).is_multiple_of(interval) {
                    true => LayerKind::Full,
                    false => LayerKind::Delta,
                };
                (0..layers).map(kind).collect()
            }
        };
        match kinds.contains(&LayerKind::Full) {
            true => Ok(kinds),
            false => Err("layer_types: none of the layers is full_attention".into()),
        }
    }
}

/// Returns the type that a config names. The default is f32, as in torch.
fn weight_type(name: Option<&str>) -> Result<WeightType, String> {
    let Some(name) = name else { return Ok(WeightType::F32) };
    parse_dtype(name)
        .ok_or_else(|| format!("dtype: {name:?} is not supported; supported: float32, float16, bfloat16"))
}

#[cfg(test)]
mod tests;
