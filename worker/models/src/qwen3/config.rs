//! The keys of a Qwen3 `config.json`, checked.

use std::path::Path;

use serde::Deserialize;
use tutti_kernels::{AttentionShape, WeightType, collective::GroupRank};

use crate::{
    LoadError,
    config::{ConfigFile, TokenIds, eos_token_ids, parse_dtype},
    model::Limits,
    rope::{Rope, RopeKeys},
    weights::share,
};

/// The keys as published; any may be null, and those with a default may be missing.
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
    use_sliding_window: Option<bool>,
    // Missing means 4096, null means none.
    #[serde(default = "default_window")]
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    eos_token_id: Option<TokenIds>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
    #[serde(flatten)]
    rope: RopeKeys,
}

fn default_window() -> Option<usize> {
    Some(4096)
}

/// A Qwen3 model's shape, in which every number is known to make sense.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    /// The LM head is the embedding.
    pub tied: bool,
    /// q, k, v and o have biases.
    pub attention_bias: bool,
    /// Of each layer, how many keys a query sees, itself included; `None` sees all.
    pub windows: Vec<Option<usize>>,
    pub rope: Rope,
    pub eos_token_id: Option<TokenIds>,
    /// The type the weights were saved in; only dummy weights follow it.
    pub dtype: WeightType,
}

impl Config {
    /// Reads and checks the keys. Defaults are those of transformers' `Qwen3Config`.
    pub fn parse(file: &ConfigFile) -> Result<Self, LoadError> {
        let keys: Keys = file.parse()?;
        let needed = |name: &str, value: Option<usize>| match value {
            Some(0) => Err(file.invalid(format!("{name}: must be at least 1, not 0"))),
            Some(value) => Ok(value),
            None => Err(file.invalid(format!("{name}: is missing"))),
        };
        let heads = needed("num_attention_heads", keys.num_attention_heads)?;
        let layers = needed("num_hidden_layers", keys.num_hidden_layers)?;
        let max_position_embeddings =
            needed("max_position_embeddings", keys.max_position_embeddings.or(Some(32_768)))?;
        let config = Self {
            vocab_size: needed("vocab_size", keys.vocab_size)?,
            hidden_size: needed("hidden_size", keys.hidden_size)?,
            intermediate_size: needed("intermediate_size", keys.intermediate_size)?,
            layers,
            heads,
            kv_heads: needed("num_key_value_heads", keys.num_key_value_heads.or(Some(heads)))?,
            head_dim: needed("head_dim", keys.head_dim.or(Some(128)))?,
            max_position_embeddings,
            rms_norm_eps: keys.rms_norm_eps.unwrap_or(1e-6),
            tied: keys.tie_word_embeddings.unwrap_or(false),
            attention_bias: keys.attention_bias.unwrap_or(false),
            windows: keys.windows(layers).map_err(|problem| file.invalid(problem))?,
            rope: keys.rope.resolve(max_position_embeddings).map_err(|problem| file.invalid(problem))?,
            dtype: keys.weight_type().map_err(|problem| file.invalid(problem))?,
            eos_token_id: keys.eos_token_id,
        };
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
        if let Some(other) = hidden_act.filter(|act| *act != "silu") {
            return Err(format!("hidden_act: {other:?} is not supported, only \"silu\""));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(format!("rms_norm_eps: must not be negative, but is {}", self.rms_norm_eps));
        }
        Ok(())
    }

    /// What one rank computes of the model: its heads, its share of the intermediate width and of the vocabulary.
    /// Refuses a number of ranks that leaves remainders.
    pub fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        let Self { heads, kv_heads, intermediate_size, vocab_size, .. } = *self;
        for (key, number) in [
            ("num_attention_heads", heads),
            ("intermediate_size", intermediate_size),
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

    /// The bounds of a model of this config in `dir`, whose steps have so many tokens at most.
    pub fn limits(&self, dir: &Path, max_step_tokens: usize) -> Result<Limits, LoadError> {
        Ok(Limits {
            vocab_size: self.vocab_size,
            max_context_tokens: self.max_context(),
            eos_token_ids: eos_token_ids(dir, self.eos_token_id.clone())?,
            max_step_tokens,
        })
    }

    /// The longest request that positions reach. YaRN stretches a short original context; where the config was not
    /// lengthened to match, the stretched one counts.
    pub fn max_context(&self) -> usize {
        self.max_position_embeddings.max(self.rope.stretched_context().unwrap_or(0))
    }

    /// The heads of a layer with this window.
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
    /// Each layer's window, by `layer_types` where given, else by `max_window_layers`.
    fn windows(&self, layers: usize) -> Result<Vec<Option<usize>>, String> {
        let window = self.sliding_window.filter(|_| self.use_sliding_window == Some(true));
        if window == Some(0) {
            return Err("sliding_window: must be at least 1, not 0".into());
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

    /// The type named by `dtype` or `torch_dtype`; f32 where neither is given, as in torch.
    fn weight_type(&self) -> Result<WeightType, String> {
        let Some(name) = self.dtype.as_deref().or(self.torch_dtype.as_deref()) else {
            return Ok(WeightType::F32);
        };
        parse_dtype(name)
            .ok_or_else(|| format!("dtype: {name:?} is not supported; supported: float32, float16, bfloat16"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A config of three layers with these keys changed; null stays null, it does not remove.
    fn parse(changes: &Value) -> Result<Config, LoadError> {
        let mut value = json!({
            "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 4096, "rope_theta": 1e6, "torch_dtype": "bfloat16",
        });
        for (key, change) in changes.as_object().unwrap() {
            value[key] = change.clone();
        }
        let path = "config.json".into();
        Config::parse(&ConfigFile { path, architectures: Vec::new(), model_type: None, value })
    }

    #[test]
    fn both_spellings_and_null_keys_mean_the_same() {
        let published = parse(&json!({
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1,
        }));
        let saved = parse(&json!({
            "rope_theta": null,
            "rope_scaling": null,
            "rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                "original_max_position_embeddings": 64},
            "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "torch_dtype": null, "dtype": "bfloat16",
        }));
        let published = published.unwrap();
        assert_eq!(published, saved.unwrap());
        assert_eq!(published.windows, [None, Some(16), Some(16)]);
        assert_eq!(published.max_context(), 4096);
        assert_eq!(published.dtype, WeightType::Bf16);
    }

    #[test]
    fn a_value_of_the_wrong_type_is_told_by_its_key() {
        for value in [json!("many"), json!(-1), json!(1.5)] {
            let error = parse(&json!({"num_hidden_layers": value})).unwrap_err().to_string();
            assert!(error.contains("num_hidden_layers"), "{error}");
        }
    }

    #[test]
    fn windows_need_to_be_switched_on() {
        let windows = |changes: Value| parse(&changes).unwrap().windows;
        assert_eq!(windows(json!({"sliding_window": 16, "max_window_layers": 0})), [None; 3]);
        assert_eq!(
            windows(json!({"use_sliding_window": true, "max_window_layers": 2})),
            [None, None, Some(4096)]
        );
        let null = json!({"use_sliding_window": true, "max_window_layers": 0, "sliding_window": null});
        assert_eq!(windows(null), [None; 3]);
    }

    #[test]
    fn yarn_lengthens_the_context_that_the_config_forgot_to() {
        let scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        let config = parse(&json!({"max_position_embeddings": 40960, "rope_scaling": scaling})).unwrap();
        assert_eq!(config.max_context(), 131_072);
    }

    #[test]
    fn a_value_that_cannot_be_honoured_names_its_key() {
        for (changes, key, value) in [
            (json!({"vocab_size": null}), "vocab_size", "missing"),
            (json!({"num_hidden_layers": 0}), "num_hidden_layers", "not 0"),
            (json!({"num_key_value_heads": 3}), "num_attention_heads", "not a multiple"),
            (json!({"head_dim": 31}), "head_dim", "31"),
            (json!({"hidden_act": "gelu"}), "hidden_act", "gelu"),
            (json!({"rms_norm_eps": -1e-6}), "rms_norm_eps", "-"),
            (json!({"hidden_size": -64}), "hidden_size", "-64"),
            (json!({"torch_dtype": "float8_e4m3fn"}), "dtype", "float8_e4m3fn"),
            (json!({"layer_types": ["full_attention"]}), "layer_types", "1 layers"),
            (json!({"layer_types": ["full_attention", "x", "y"]}), "layer_types", "\"x\""),
            (json!({"layer_types": vec!["sliding_attention"; 3]}), "layer_types", "use_sliding_window"),
            (json!({"rope_scaling": {"rope_type": "longrope"}}), "rope_type", "longrope"),
            (json!({"rope_scaling": {"rope_type": "yarn", "factor": 0}}), "factor", "not 0"),
            (json!({"rope_theta": 0}), "rope_theta", "not 0"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor", "0.5"),
        ] {
            let error = parse(&changes).unwrap_err().to_string();
            for part in ["config.json", key, value] {
                assert!(error.contains(part), "{part:?} is not in {error:?}");
            }
        }
    }
}
