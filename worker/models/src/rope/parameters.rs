//! Reads the keys of a config that describe rotation, in the older or the newer form.

use super::{Llama3, Rope, RopeDefaults, Scaling, Sections, Yarn};
use crate::{
    LoadError,
    config::{
        keys::{Key, Keys},
        ranges::{self, MAX_CONTEXT},
    },
};

/// The keys of a config that describe rotation. Older configs have `rope_theta` and `rope_scaling`. Configs saved by
/// transformers 5 have `rope_parameters` instead, possibly one set per type of layer.
pub(super) struct RopeKeys<'a> {
    theta: Option<f64>,
    rotated: Option<f64>,
    /// The object with the parameters, or with one set of parameters per type of layer. Empty if the config has neither
    /// `rope_scaling` nor `rope_parameters`.
    sets: Keys<'a>,
}

/// One set of RoPE parameters.
struct Parameters<'a> {
    keys: Keys<'a>,
    theta: Option<f64>,
    kind: Option<String>,
    rotated: Option<f64>,
    factor: Option<f64>,
    original_context: Option<usize>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    truncate: Option<bool>,
    divisors: Option<Vec<f64>>,
    mrope_section: Option<Vec<usize>>,
    mrope_interleaved: Option<bool>,
}

impl<'a> RopeKeys<'a> {
    /// Reads the keys. `rope_scaling` wins over `rope_parameters`, as in transformers.
    pub fn read(keys: &Keys<'a>) -> Result<Self, LoadError> {
        let (older, newer) = (keys.section(ranges::ROPE_SCALING)?, keys.section(ranges::ROPE_PARAMETERS)?);
        Ok(Self {
            theta: keys.get(&ranges::ROPE_THETA)?,
            rotated: keys.get(&ranges::PARTIAL_ROTARY_FACTOR)?,
            sets: if older.is_empty() { newer } else { older },
        })
    }

    /// Resolves the keys for layers of the type `layer_type`. `max_context` is the config's `max_position_embeddings`.
    /// The error names the key at fault.
    pub fn resolve(
        &self,
        layer_type: &str,
        max_context: usize,
        defaults: RopeDefaults,
    ) -> Result<Rope, LoadError> {
        let parameters = Parameters::read(self.set_of(layer_type)?)?;
        Ok(Rope {
            theta: parameters.theta.or(self.theta).unwrap_or(defaults.theta),
            rotated: parameters.rotated.or(self.rotated).unwrap_or(defaults.rotated),
            scaling: match parameters.kind.as_deref() {
                Some("yarn") => Scaling::Yarn(parameters.yarn(max_context, defaults.attention_factor)?),
                Some("llama3") => Scaling::Llama3(parameters.llama3(max_context)?),
                Some("divisors") => Scaling::Divisors(parameters.divisors()?),
                _ => Scaling::None,
            },
            sections: parameters.sections(),
        })
    }

    /// True if there is one set of parameters per type of layer.
    pub fn are_named(&self) -> bool {
        !self.sets.objects().is_empty()
    }

    /// Returns the set of parameters of a type of layer.
    fn set_of(&self, layer_type: &str) -> Result<Keys<'a>, LoadError> {
        match self.sets.objects() {
            _ if self.sets.holds(layer_type) => self.sets.section(layer_type),
            sets if sets.is_empty() => Ok(self.sets.clone()),
            sets => {
                // A parameter that is wrongly an object looks like a set. `read` then returns the error about that
                // parameter.
                Parameters::read(self.sets.clone())?;
                let name = self.sets.name();
                let problem = format!("{name}: has sets for {sets:?}, but none for {layer_type:?}");
                Err(self.sets.in_file(problem))
            }
        }
    }
}

impl<'a> Parameters<'a> {
    fn read(keys: Keys<'a>) -> Result<Self, LoadError> {
        let (newer, older) = (keys.get(&ranges::ROPE_TYPE)?, keys.get(&ranges::OLDER_ROPE_TYPE)?);
        Ok(Self {
            theta: keys.get(&ranges::ROPE_THETA)?,
            kind: newer.or(older),
            rotated: keys.get(&ranges::PARTIAL_ROTARY_FACTOR)?,
            factor: keys.get(&ranges::FACTOR)?,
            original_context: keys.get(&ranges::ORIGINAL_MAX_POSITION_EMBEDDINGS)?,
            attention_factor: keys.get(&ranges::ATTENTION_FACTOR)?,
            mscale: keys.get(&ranges::MSCALE)?,
            mscale_all_dim: keys.get(&ranges::MSCALE_ALL_DIM)?,
            beta_fast: keys.get(&ranges::BETA_FAST)?,
            beta_slow: keys.get(&ranges::BETA_SLOW)?,
            low_freq_factor: keys.get(&ranges::LOW_FREQ_FACTOR)?,
            high_freq_factor: keys.get(&ranges::HIGH_FREQ_FACTOR)?,
            truncate: keys.get(&ranges::TRUNCATE)?,
            divisors: keys.get(&ranges::DIVISORS)?,
            mrope_section: keys.get(&ranges::MROPE_SECTION)?,
            mrope_interleaved: keys.get(&ranges::MROPE_INTERLEAVED)?,
            keys,
        })
    }

    /// Returns the division of the frequencies among the axes, if the config has one.
    fn sections(&self) -> Option<Sections> {
        let lengths = self.mrope_section.as_deref()?.try_into().ok()?;
        Some(Sections { lengths, interleaved: self.mrope_interleaved.unwrap_or(false) })
    }

    /// Returns the parameters of Llama 3's rule. Only `original_max_position_embeddings` has a default.
    fn llama3(&self, max_context: usize) -> Result<Llama3, LoadError> {
        let needed = |key: &Key<f64>, value: Option<f64>| {
            let missing = || self.keys.invalid(key, "is missing, but rope_type \"llama3\" needs it");
            value.ok_or_else(missing)
        };
        let rule = Llama3 {
            factor: needed(&ranges::FACTOR, self.factor)?,
            original_context: self.original_context.unwrap_or(max_context) as f64,
            low_freq_factor: needed(&ranges::LOW_FREQ_FACTOR, self.low_freq_factor)?,
            high_freq_factor: needed(&ranges::HIGH_FREQ_FACTOR, self.high_freq_factor)?,
        };
        let Llama3 { low_freq_factor: low, high_freq_factor: high, .. } = rule;
        match high > low {
            true => Ok(rule),
            false => {
                let problem = format!("must be above low_freq_factor, {low}, but is {high}");
                Err(self.keys.invalid(&ranges::HIGH_FREQ_FACTOR, problem))
            }
        }
    }

    /// Returns what each frequency is divided by.
    fn divisors(&self) -> Result<Vec<f64>, LoadError> {
        let missing = "is missing, but rope_type \"divisors\" needs it";
        self.divisors.clone().ok_or_else(|| self.keys.invalid(&ranges::DIVISORS, missing))
    }

    /// Returns the parameters of YaRN, with defaults filled in.
    fn yarn(&self, max_context: usize, attention_factor: Option<f64>) -> Result<Yarn, LoadError> {
        let original_context = self.original_context.unwrap_or(max_context) as f64;
        let factor = self.factor.unwrap_or(max_context as f64 / original_context);
        let context = factor * original_context;
        if context > MAX_CONTEXT as f64 {
            let problem = format!(
                "{factor} times original_max_position_embeddings, {original_context}, is {context}, \
                 the limit is {MAX_CONTEXT}"
            );
            return Err(self.keys.invalid(&ranges::FACTOR, problem));
        }
        // YaRN's attention temperature t (§3.4): sqrt(1/t) = 0.1 ln(s) + 1, where s is `factor`. transformers also
        // multiplies the logarithm by `mscale`. The result multiplies both q and k, so it is folded into the cosines
        // and sines of the rotation.
        let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let attention_factor = self.attention_factor.or(attention_factor).unwrap_or_else(|| {
            match (self.mscale, self.mscale_all_dim) {
                (Some(m), Some(all)) if m != 0.0 && all != 0.0 => scale(m) / scale(all),
                _ => scale(1.0),
            }
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
