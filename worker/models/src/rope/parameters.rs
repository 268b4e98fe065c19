//! The keys of a config that describe rotation, in either spelling.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{DEFAULT_THETA, Llama3, Rope, Scaling, Sections, Yarn};

/// The keys of a config that describe rotation. Older configs have `rope_theta` and `rope_scaling`. Configs saved by
/// transformers 5 have `rope_parameters` instead, possibly one set per type of layer. Any key may be missing or null.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RopeKeys {
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    partial_rotary_factor: Option<f64>,
}

/// One set of parameters, from `rope_scaling` or `rope_parameters`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(super) struct Parameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    // The older spelling of `rope_type`; some files have both.
    #[serde(rename = "type")]
    kind: Option<String>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    truncate: Option<bool>,
    mrope_section: Option<[usize; 3]>,
    mrope_interleaved: Option<bool>,
}

impl RopeKeys {
    /// Sets the share of a head's elements that is rotated if no key says it.
    pub fn rotating(self, share: f64) -> Self {
        Self { partial_rotary_factor: self.partial_rotary_factor.or(Some(share)), ..self }
    }

    /// Resolves the keys for layers of the type `layer_type`. `max_context` is the config's `max_position_embeddings`.
    /// The error names the key at fault.
    pub fn resolve(&self, layer_type: &str, max_context: usize) -> Result<Rope, String> {
        let parameters = self.parameters(layer_type)?;
        let rotated = parameters.partial_rotary_factor.or(self.partial_rotary_factor).unwrap_or(1.0);
        if !(rotated > 0.0 && rotated <= 1.0) {
            return Err(format!("partial_rotary_factor: must be above 0 and at most 1, not {rotated}"));
        }
        let theta = parameters.rope_theta.or(self.rope_theta).unwrap_or(DEFAULT_THETA);
        if !(theta.is_finite() && theta > 1.0) {
            return Err(format!("rope_theta: must be a number above 1, not {theta}"));
        }
        let kind = parameters.rope_type.as_deref().or(parameters.kind.as_deref());
        let scaling = match kind.unwrap_or("default") {
            // The first vision models called plain frequencies with three axes a type of its own.
            "default" | "mrope" => Scaling::None,
            "yarn" => Scaling::Yarn(parameters.yarn(max_context)?),
            "llama3" => Scaling::Llama3(parameters.llama3(max_context)?),
            other => {
                return Err(format!(
                    "rope_type: {other:?} is not supported; supported: default, yarn, llama3"
                ));
            }
        };
        let interleaved = parameters.mrope_interleaved.unwrap_or(false);
        let sections = parameters.mrope_section.map(|lengths| Sections { lengths, interleaved });
        Ok(Rope { theta, rotated, scaling, sections })
    }

    /// Returns the set of parameters of a type of layer. `rope_scaling` wins over `rope_parameters`, as in
    /// transformers.
    fn parameters(&self, layer_type: &str) -> Result<Parameters, String> {
        let given =
            |value: &Option<Value>| value.clone().filter(|v| !v.is_null() && *v != Value::Object(Map::new()));
        let Some(value) = given(&self.rope_scaling).or_else(|| given(&self.rope_parameters)) else {
            return Ok(Parameters::default());
        };
        let Value::Object(keys) = &value else {
            return Err(format!("rope_parameters: must be an object, not {value}"));
        };
        let value = match keys.get(layer_type) {
            Some(set) => set.clone(),
            None if keys.values().any(Value::is_object) => {
                let sets: Vec<_> = keys.keys().collect();
                return Err(format!("rope_parameters: has sets for {sets:?}, but none for {layer_type:?}"));
            }
            None => value,
        };
        serde_json::from_value(value).map_err(|e| format!("rope_parameters: {e}"))
    }
}

impl Parameters {
    /// Returns the parameters of Llama 3's rule. Only `original_max_position_embeddings` has a default.
    fn llama3(&self, max_context: usize) -> Result<Llama3, String> {
        let positive = |name: &str, value: Option<f64>| match value {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => Err(format!("{name}: must be a positive number, not {value}")),
            None => Err(format!("{name}: is missing, but rope_type \"llama3\" needs it")),
        };
        let original = self.original_max_position_embeddings.unwrap_or(max_context as f64);
        let rule = Llama3 {
            factor: positive("factor", self.factor)?,
            original_context: positive("original_max_position_embeddings", Some(original))?,
            low_freq_factor: positive("low_freq_factor", self.low_freq_factor)?,
            high_freq_factor: positive("high_freq_factor", self.high_freq_factor)?,
        };
        if rule.high_freq_factor <= rule.low_freq_factor {
            let Llama3 { low_freq_factor: low, high_freq_factor: high, .. } = rule;
            return Err(format!("high_freq_factor: must be above low_freq_factor, {low}, but is {high}"));
        }
        Ok(rule)
    }

    /// Fills in YaRN's defaults.
    fn yarn(&self, max_context: usize) -> Result<Yarn, String> {
        let original_context = self.original_max_position_embeddings.unwrap_or(max_context as f64);
        let factor = self.factor.unwrap_or(max_context as f64 / original_context);
        for (name, value) in [("original_max_position_embeddings", original_context), ("factor", factor)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("{name}: must be a positive number, not {value}"));
            }
        }
        // YaRN's attention temperature t (§3.4): sqrt(1/t) = 0.1 ln(s) + 1, where s is `factor`. transformers also
        // multiplies the logarithm by `mscale`. Both q and k are multiplied by the result. It is folded into the
        // cosines and sines that rotate them.
        let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let attention_factor =
            self.attention_factor.unwrap_or_else(|| match (self.mscale, self.mscale_all_dim) {
                (Some(m), Some(all)) if m != 0.0 && all != 0.0 => scale(m) / scale(all),
                _ => scale(1.0),
            });
        Ok(Yarn {
            factor,
            original_context,
            attention_factor,
            beta_fast: self.beta_fast.filter(|b| *b != 0.0).unwrap_or(32.0),
            beta_slow: self.beta_slow.filter(|b| *b != 0.0).unwrap_or(1.0),
            truncate: self.truncate.unwrap_or(true),
        })
    }
}
