//! Rotary position embedding: frequencies, plain or YaRN, from the keys of a config in either spelling.
//!
//! RoPE: Su et al., "RoFormer", arXiv:2104.09864. YaRN: Peng et al., arXiv:2309.00071, §3.2 and §3.4. Reference:
//! transformers `modeling_rope_utils.py`.

use std::f64::consts::PI;

use serde::Deserialize;
use serde_json::Value;
use tutti_kernels::RopeFrequencies;

/// `rope_theta` of a config without that key: the default of transformers.
const DEFAULT_THETA: f64 = 10_000.0;

/// The keys of a config that describe rotation. Older configs have `rope_theta` and `rope_scaling`. Configs saved by
/// transformers 5 have `rope_parameters` instead, possibly one set per kind of layer. Any key may be missing or null.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RopeKeys {
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    partial_rotary_factor: Option<f64>,
}

/// One set of parameters, from `rope_scaling` or `rope_parameters`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
struct Parameters {
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
    truncate: Option<bool>,
}

/// The map from positions to angles.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rope {
    theta: f64,
    yarn: Option<Yarn>,
}

/// The parameters of YaRN, with defaults filled in.
#[derive(Clone, Debug, PartialEq)]
struct Yarn {
    factor: f64,
    original_context: f64,
    attention_factor: f64,
    beta_fast: f64,
    beta_slow: f64,
    truncate: bool,
}

impl RopeKeys {
    /// Resolves the keys. `max_context` is the config's `max_position_embeddings`. The error names the key at fault.
    pub fn resolve(&self, max_context: usize) -> Result<Rope, String> {
        let parameters = self.parameters()?;
        let partial = parameters.partial_rotary_factor.or(self.partial_rotary_factor).unwrap_or(1.0);
        if partial != 1.0 {
            return Err(format!("partial_rotary_factor: {partial} is not supported, only 1"));
        }
        let theta = parameters.rope_theta.or(self.rope_theta).unwrap_or(DEFAULT_THETA);
        if !(theta.is_finite() && theta > 1.0) {
            return Err(format!("rope_theta: must be a number above 1, not {theta}"));
        }
        let kind = parameters.rope_type.as_deref().or(parameters.kind.as_deref());
        let yarn = match kind.unwrap_or("default") {
            "default" => None,
            "yarn" => Some(Yarn::resolve(&parameters, max_context)?),
            other => return Err(format!("rope_type: {other:?} is not supported; supported: default, yarn")),
        };
        Ok(Rope { theta, yarn })
    }

    /// Returns the set of parameters in use. `rope_scaling` wins over `rope_parameters`, as in transformers.
    fn parameters(&self) -> Result<Parameters, String> {
        let given =
            |value: &Option<Value>| value.clone().filter(|v| !v.is_null() && *v != serde_json::json!({}));
        let Some(value) = given(&self.rope_scaling).or_else(|| given(&self.rope_parameters)) else {
            return Ok(Parameters::default());
        };
        let parse = |value: Value| {
            serde_json::from_value::<Parameters>(value).map_err(|e| format!("rope_parameters: {e}"))
        };
        let Value::Object(keys) = &value else {
            return Err(format!("rope_parameters: must be an object, not {value}"));
        };
        if !keys.values().any(Value::is_object) {
            return parse(value);
        }
        let mut sets = keys.values().filter(|v| v.is_object()).cloned().map(parse);
        let first = sets.next().unwrap_or_else(|| Ok(Parameters::default()))?;
        for other in sets {
            if other? != first {
                return Err(
                    "rope_parameters: kinds of layers that rotate differently are not supported".into()
                );
            }
        }
        Ok(first)
    }
}

impl Yarn {
    fn resolve(parameters: &Parameters, max_context: usize) -> Result<Self, String> {
        let original_context = parameters.original_max_position_embeddings.unwrap_or(max_context as f64);
        let factor = parameters.factor.unwrap_or(max_context as f64 / original_context);
        for (name, value) in [("original_max_position_embeddings", original_context), ("factor", factor)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("{name}: must be a positive number, not {value}"));
            }
        }
        // YaRN's attention temperature t (§3.4): sqrt(1/t) = 0.1 ln(s) + 1, where s is `factor`. transformers also
        // multiplies the logarithm by `mscale`. Both q and k are multiplied by the result. It is folded into the
        // cosines and sines that rotate them.
        let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let attention_factor = parameters.attention_factor.unwrap_or_else(|| {
            match (parameters.mscale, parameters.mscale_all_dim) {
                (Some(m), Some(all)) if m != 0.0 && all != 0.0 => scale(m) / scale(all),
                _ => scale(1.0),
            }
        });
        Ok(Self {
            factor,
            original_context,
            attention_factor,
            beta_fast: parameters.beta_fast.filter(|b| *b != 0.0).unwrap_or(32.0),
            beta_slow: parameters.beta_slow.filter(|b| *b != 0.0).unwrap_or(1.0),
            truncate: parameters.truncate.unwrap_or(true),
        })
    }
}

impl Rope {
    /// Number of positions that YaRN extends the context to; `None` without YaRN.
    pub fn extended_context(&self) -> Option<usize> {
        self.yarn.as_ref().map(|yarn| (yarn.factor * yarn.original_context) as usize)
    }

    /// Returns the frequencies for heads of `head_dim` elements, computed in f64 and rounded once.
    pub fn frequencies(&self, head_dim: usize) -> RopeFrequencies {
        let half = head_dim / 2;
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / head_dim as f64);
        let Some(yarn) = &self.yarn else {
            return RopeFrequencies {
                inverse: (0..half).map(|i| plain(i) as f32).collect(),
                scale: 1.0,
                axes: Vec::new(),
            };
        };
        // Returns the index, not rounded, of the frequency that makes this number of turns over the original context.
        let index_of = |turns: f64| {
            head_dim as f64 * (yarn.original_context / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (index_of(yarn.beta_fast), index_of(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min((head_dim - 1) as f64));
        if low == high {
            high += 0.001;
        }
        // Fast frequencies (index up to `low`) stay as trained, slow ones (from `high` on) are interpolated, and those
        // between are blended.
        let inverse = |i: usize| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (plain(i) / yarn.factor * ramp + plain(i) * (1.0 - ramp)) as f32
        };
        RopeFrequencies {
            inverse: (0..half).map(inverse).collect(),
            scale: yarn.attention_factor as f32,
            axes: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
