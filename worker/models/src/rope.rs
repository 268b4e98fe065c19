//! Rotary position embedding: tables of frequencies (plain, YaRN, Llama 3, or divided one by one), from the older or
//! the newer keys of a config.
//!
//! A model may have several tables, one per type of its layers. A table may rotate only the first elements of a head,
//! and it may take its positions from three axes (M-RoPE: time, height and width; Wang et al., arXiv:2409.12191, §2.1).
//! Text has equal positions on all axes.
//!
//! RoPE: Su et al., "RoFormer", arXiv:2104.09864. YaRN: Peng et al., arXiv:2309.00071, §3.2 and §3.4. Reference:
//! transformers `modeling_rope_utils.py`. The rule of Llama 3 ("The Llama 3 Herd of Models", arXiv:2407.21783) is only
//! in the reference: `_compute_llama3_parameters`.

mod parameters;

use std::f64::consts::PI;

use tutti_kernels::RopeFrequencies;

use self::parameters::RopeKeys;
use crate::{
    LoadError,
    config::{keys::Keys, ranges},
};

/// Values of keys that a config lacks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RopeDefaults {
    /// Default of `rope_theta`.
    pub theta: f64,
    /// Default of `partial_rotary_factor`, the share of a head's elements that are rotated.
    pub rotated: f64,
    /// Default of YaRN's `attention_factor`; `None` means the one that follows from `factor`.
    pub attention_factor: Option<f64>,
}

impl RopeDefaults {
    /// The defaults of most families in transformers.
    pub const PLAIN: Self = Self { theta: 10_000.0, rotated: 1.0, attention_factor: None };
}

/// The rotary tables of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeTables {
    /// The different tables, in the order in which layers first use them.
    pub tables: Vec<Rope>,
    /// For each layer, the index of its table in `tables`.
    pub of_layer: Vec<usize>,
}

/// A rotary table: the map from positions to angles.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rope {
    theta: f64,
    /// Share of a head's elements that are rotated, from the first on; 1 rotates the whole head.
    rotated: f64,
    scaling: Scaling,
    /// The division of the frequencies among three axes; `None` if all frequencies use the first axis.
    sections: Option<Sections>,
}

/// The division of frequencies among the three axes of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sections {
    /// Number of frequencies of each axis.
    lengths: [usize; 3],
    /// False if the frequencies of each axis are consecutive. True if the axes take turns. When height or width has all
    /// its frequencies, its turns go to time.
    interleaved: bool,
}

/// The rule that extends the context beyond the context of training.
#[derive(Clone, Debug, PartialEq)]
enum Scaling {
    None,
    Yarn(Yarn),
    Llama3(Llama3),
    /// Each frequency is divided by a number of its own. GGUF files state the rule of Llama 3 in this form.
    Divisors(Vec<f64>),
}

/// The parameters of Llama 3's rule.
#[derive(Clone, Debug, PartialEq)]
struct Llama3 {
    factor: f64,
    original_context: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
}

impl Llama3 {
    /// Scales the frequency `plain`, depending on its number of turns over the original context. A frequency of few
    /// turns is divided by `factor`, and a frequency of many turns stays as trained. In between, the two values are
    /// blended.
    fn scaled(&self, plain: f64) -> f64 {
        let turns = self.original_context * plain / (2.0 * PI);
        let Self { factor, low_freq_factor: low, high_freq_factor: high, .. } = *self;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 - kept) * plain / factor + kept * plain
    }
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

impl RopeTables {
    /// Reads the table of each layer, which depends on the layer's type. `max_context` is the config's
    /// `max_position_embeddings`. The error names the key at fault.
    pub fn read(
        keys: &Keys<'_>,
        layer_types: &[&str],
        max_context: usize,
        defaults: RopeDefaults,
    ) -> Result<Self, LoadError> {
        let keys = RopeKeys::read(keys)?;
        let (mut tables, mut seen): (Vec<Rope>, Vec<(&str, usize)>) = Default::default();
        let mut of_layer = Vec::with_capacity(layer_types.len());
        for layer_type in layer_types {
            let known = seen.iter().find(|(seen, _)| seen == layer_type);
            let index = match known {
                Some(&(_, index)) => index,
                None => {
                    let rope = keys.resolve(layer_type, max_context, defaults)?;
                    let index = tables.iter().position(|table| *table == rope).unwrap_or(tables.len());
                    if index == tables.len() {
                        tables.push(rope);
                    }
                    seen.push((layer_type, index));
                    index
                }
            };
            of_layer.push(index);
        }
        Ok(Self { tables, of_layer })
    }

    /// Reads two tables, by which a model rotates with compressed entries and without them. The table `main` is the
    /// first, and the table `compress` the second. Configs saved by transformers have a set of parameters for each.
    /// Others have one set: `main` takes its base alone, and `compress` all but the base, whose default is
    /// `compress_theta`. `max_context` is the config's `max_position_embeddings`. The error names the key at fault.
    pub fn with_compressed(
        keys: &Keys<'_>,
        max_context: usize,
        defaults: RopeDefaults,
        compress_theta: f64,
    ) -> Result<Self, LoadError> {
        let compress_theta = keys.get_or(&ranges::COMPRESS_ROPE_THETA, compress_theta)?;
        let sets = RopeKeys::read(keys)?;
        let (mut main, mut compress) =
            (sets.resolve("main", max_context, defaults)?, sets.resolve("compress", max_context, defaults)?);
        if !sets.are_named() {
            main.scaling = Scaling::None;
            compress.theta = compress_theta;
        }
        for table in [&main, &compress] {
            if table.sections.is_some() {
                return Err(keys.invalid(&ranges::MROPE_SECTION, "is not supported with compressed entries"));
            }
        }
        Ok(Self { tables: vec![main, compress], of_layer: Vec::new() })
    }

    /// Makes all tables take their positions from three axes in turns, as the models with pictures do whatever
    /// `mrope_interleaved` says. `keys` are those that the tables were read from.
    pub fn on_three_axes(mut self, keys: &Keys<'_>) -> Result<Self, LoadError> {
        for table in &mut self.tables {
            let Some(sections) = &mut table.sections else {
                return Err(keys.missing(&ranges::MROPE_SECTION));
            };
            sections.interleaved = true;
        }
        Ok(self)
    }

    /// Returns the frequencies of each table for heads of `head_dim` elements. The error names the key at fault.
    pub fn frequencies(&self, head_dim: usize) -> Result<Vec<RopeFrequencies>, String> {
        self.tables.iter().map(|rope| rope.frequencies(head_dim)).collect()
    }

    /// Returns the maximum number of positions of a request. It is the larger of `max_position_embeddings` and the
    /// context that YaRN extends to.
    pub fn max_context(&self, max_position_embeddings: usize) -> usize {
        self.tables.iter().filter_map(Rope::extended_context).fold(max_position_embeddings, usize::max)
    }
}

impl Rope {
    fn extended_context(&self) -> Option<usize> {
        match &self.scaling {
            Scaling::Yarn(yarn) => Some((yarn.factor * yarn.original_context) as usize),
            Scaling::None | Scaling::Llama3(_) | Scaling::Divisors(_) => None,
        }
    }

    /// Returns how many of a head's first elements are rotated, which is an even number.
    pub fn rotated(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.rotated) as usize / 2 * 2
    }

    /// Returns the axis of positions, 0 to 2, of each frequency of a head of `head_dim` elements.
    fn axes(&self, head_dim: usize) -> Result<Vec<u8>, String> {
        let half = self.rotated(head_dim) / 2;
        let Some(Sections { lengths: [time, height, width], interleaved }) = self.sections else {
            return Ok(vec![0; half]);
        };
        if time + height + width != half {
            let sections = [time, height, width];
            return Err(format!(
                "mrope_section: {sections:?} are not the {half} frequencies of head_dim, {head_dim}"
            ));
        }
        let interleaved_axis = |i: usize| match i % 3 {
            1 if i < 3 * height => 1,
            2 if i < 3 * width => 2,
            _ => 0,
        };
        let axis = |i: usize| u8::from(i >= time) + u8::from(i >= time + height);
        Ok((0..half).map(|i| if interleaved { interleaved_axis(i) } else { axis(i) }).collect())
    }

    /// Returns the frequencies for heads of `head_dim` elements, computed in f64 and rounded once. The error names the
    /// key at fault.
    fn frequencies(&self, head_dim: usize) -> Result<RopeFrequencies, String> {
        let rotated = self.rotated(head_dim);
        if rotated == 0 {
            let share = self.rotated;
            return Err(format!(
                "partial_rotary_factor: {share} of head_dim, {head_dim}, is no pair of elements"
            ));
        }
        let axes = self.axes(head_dim)?;
        let half = rotated / 2;
        let plain = |i: usize| self.theta.powf(-((2 * i) as f64) / rotated as f64);
        let yarn = match &self.scaling {
            Scaling::None => {
                let inverse = (0..half).map(|i| plain(i) as f32).collect();
                return Ok(RopeFrequencies { inverse, axes, scale: 1.0 });
            }
            Scaling::Llama3(rule) => {
                let inverse = (0..half).map(|i| rule.scaled(plain(i)) as f32).collect();
                return Ok(RopeFrequencies { inverse, axes, scale: 1.0 });
            }
            Scaling::Divisors(divisors) if divisors.len() != half => {
                let found = divisors.len();
                return Err(format!("divisors: are {found}, but a head has {half} frequencies"));
            }
            Scaling::Divisors(divisors) => {
                let inverse = divisors.iter().enumerate().map(|(i, by)| (plain(i) / by) as f32).collect();
                return Ok(RopeFrequencies { inverse, axes, scale: 1.0 });
            }
            Scaling::Yarn(yarn) => yarn,
        };
        // Returns the fractional index of the frequency that makes `turns` turns over the original context.
        let index_of = |turns: f64| {
            rotated as f64 * (yarn.original_context / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (index_of(yarn.beta_fast), index_of(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(rotated.saturating_sub(1) as f64));
        if low == high {
            high += 0.001;
        }
        // Frequencies with an index up to `low` are fast and stay as trained. Frequencies from the index `high` on are
        // slow and are divided by `factor`. In between, the two values are blended.
        let inverse = |i: usize| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (plain(i) / yarn.factor * ramp + plain(i) * (1.0 - ramp)) as f32
        };
        let inverse = (0..half).map(inverse).collect();
        Ok(RopeFrequencies { inverse, axes, scale: yarn.attention_factor as f32 })
    }
}

#[cfg(test)]
mod tests;
