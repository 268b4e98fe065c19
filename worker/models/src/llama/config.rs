//! The checked keys of a `config.json` of this architecture.

use tutti_kernels::{RopeFrequencies, collective::GroupRank};

use super::{
    moe::Moe,
    variant::{Biases, Variant, Windows},
};
use crate::{
    LoadError,
    config::{
        ConfigFile,
        keys::Keys,
        ranges::{self, product},
        refuse_quantization,
        text::{TextConfig, divides, types_of_layers},
    },
    rope::{RopeDefaults, RopeTables},
    weights::share,
};

/// Default of `sliding_window`.
const DEFAULT_WINDOW: usize = 4096;
/// Default of `max_window_layers`.
const DEFAULT_FIRST_WINDOW: usize = 28;
/// Length of the default of `deepstack_visual_indexes`.
const DEFAULT_LEVELS: usize = 3;

/// The checked shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub variant: &'static Variant,
    pub text: TextConfig,
    /// Intermediate width of a dense MLP.
    pub intermediate_size: usize,
    /// True if q, k and v have biases.
    pub qkv_bias: bool,
    /// True if the output projection o has a bias.
    pub o_bias: bool,
    /// Sliding window of each layer: the number of keys that a query sees, including the key of its own position.
    /// `None` means all keys.
    pub windows: Vec<Option<usize>>,
    /// The layers with experts; `None` if all layers have a dense MLP.
    pub moe: Option<Moe>,
    /// Frequencies of each rotary table.
    pub rope: Vec<RopeFrequencies>,
    /// Index of the rotary table of each layer.
    pub table_of: Vec<usize>,
    /// Number of sets of features that a vision encoder gives for the first layers.
    pub levels: usize,
}

impl Config {
    /// Reads and checks the keys. Defaults are those of the family's config class in transformers.
    pub fn parse(file: &ConfigFile, variant: &'static Variant) -> Result<Self, LoadError> {
        let top = nested(file.keys(), variant.names.top)?;
        let keys = nested(top.clone(), variant.names.text)?;
        let mut text = TextConfig::read(&keys, &top, variant.defaults)?;
        let windows = windows(&keys, variant.windows, text.layers)?;
        let layer_type = |window: &Option<usize>| match window {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        let layer_types: Vec<_> = windows.iter().map(layer_type).collect();
        let rope = RopeDefaults { theta: variant.theta, ..RopeDefaults::PLAIN };
        let rope = RopeTables::read(&keys, &layer_types, text.max_context, rope)?;
        let rope = if variant.pictures { rope.on_three_axes(&keys)? } else { rope };
        // In these families, transformers rotates whole heads and ignores `partial_rotary_factor`. So a config that
        // rotates only a part of each head is refused.
        let head_dim = text.head_dim;
        if let Some(rope) = rope.tables.iter().find(|rope| rope.rotated(head_dim) != head_dim) {
            let (rotated, name) = (rope.rotated(head_dim), variant.name);
            let problem = format!("rotates {rotated} of {head_dim} elements, but {name} rotates all");
            return Err(keys.invalid(&ranges::PARTIAL_ROTARY_FACTOR, problem));
        }
        text.max_context = rope.max_context(text.max_context);
        let by_key = keys.get_or(&ranges::ATTENTION_BIAS, false)?;
        let (qkv_bias, o_bias) = match variant.biases {
            Biases::Never => (false, false),
            Biases::Qkv => (true, false),
            Biases::ByKey => (by_key, by_key),
        };
        keys.refuse(&ranges::MLP_BIAS)?;
        let intermediate_size = keys.need(&ranges::INTERMEDIATE_SIZE)?;
        let of_mlp = [("intermediate_size", intermediate_size), ("hidden_size", text.hidden_size)];
        product(of_mlp, ranges::MAX_TENSOR).map_err(|problem| file.invalid(problem))?;
        Ok(Self {
            variant,
            intermediate_size,
            qkv_bias,
            o_bias,
            windows,
            moe: variant.experts.map(|rules| Moe::read(&keys, &text, rules)).transpose()?.flatten(),
            rope: rope.frequencies(head_dim).map_err(|problem| file.invalid(problem))?,
            table_of: rope.of_layer,
            levels: if variant.pictures { levels(&top, text.layers)? } else { 0 },
            text,
        })
    }

    /// Returns the keys that hold the objects of the family's encoders.
    pub fn encoder_keys<'a>(&self, file: &'a ConfigFile) -> Result<Keys<'a>, LoadError> {
        nested(file.keys(), self.variant.names.top)
    }

    /// Returns the shape of one rank's shard: its share of the heads, the intermediate width and the vocabulary.
    /// Refuses a number of ranks that does not divide these sizes.
    pub fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        if let Some(moe) = &self.moe {
            moe.shape.check(group_rank)?;
        }
        let text = self.text.shard(group_rank)?;
        if self.has_dense_mlps() {
            divides("intermediate_size", self.intermediate_size, group_rank)?;
        }
        Ok(Self { text, intermediate_size: share(self.intermediate_size, group_rank).len(), ..self.clone() })
    }

    /// True if this layer has experts instead of a dense MLP.
    pub fn is_sparse(&self, layer: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.sparse[layer])
    }

    /// True if any layer has a dense MLP.
    pub fn has_dense_mlps(&self) -> bool {
        (0..self.text.layers).any(|layer| !self.is_sparse(layer))
    }
}

/// Returns the object at a path inside `keys`. A section about the weights is a top-level one, so an object on the path
/// must have none.
fn nested<'a>(keys: Keys<'a>, path: &[&str]) -> Result<Keys<'a>, LoadError> {
    path.iter().try_fold(keys, |keys, name| {
        let inner = keys.section(name)?;
        refuse_quantization(&inner)?;
        Ok(inner)
    })
}

/// Returns the number of sets of features that the vision encoder of a config gives. Refuses as many sets as there are
/// layers, because only logit rows are left behind the last layer.
fn levels(top: &Keys<'_>, layers: usize) -> Result<usize, LoadError> {
    let vision = top.section(ranges::VISION_CONFIG)?;
    if vision.is_missing() {
        return Ok(0);
    }
    let indexes = vision.get(&ranges::DEEPSTACK_VISUAL_INDEXES)?;
    let levels = indexes.map_or(DEFAULT_LEVELS, |indexes| indexes.len());
    if levels >= layers {
        let problem =
            format!("has {levels} entries, but only fewer than num_hidden_layers, {layers}, are supported");
        return Err(vision.invalid(&ranges::DEEPSTACK_VISUAL_INDEXES, problem));
    }
    Ok(levels)
}

/// Returns the sliding window of each layer; `None` for a layer without one.
fn windows(keys: &Keys<'_>, rule: Windows, layers: usize) -> Result<Vec<Option<usize>>, LoadError> {
    if rule == Windows::Never {
        return Ok(vec![None; layers]);
    }
    // A missing key means the default. A null means no window.
    let given = keys.get(&ranges::SLIDING_WINDOW)?;
    let given = if keys.has(&ranges::SLIDING_WINDOW) { given } else { Some(DEFAULT_WINDOW) };
    let is_used = rule == Windows::All || keys.get_or(&ranges::USE_SLIDING_WINDOW, false)?;
    let window = given.filter(|_| is_used);
    if window == Some(0) {
        return Err(keys.invalid(&ranges::SLIDING_WINDOW, "must be at least 1, not 0"));
    }
    if rule != Windows::ByLayer {
        return Ok(vec![window; layers]);
    }
    let first = keys.get_or(&ranges::MAX_WINDOW_LAYERS, DEFAULT_FIRST_WINDOW)?;
    let Some(types) = keys.get(&ranges::LAYER_TYPES)? else {
        return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
    };
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
    types_of_layers(&types, layers)
        .and_then(|()| types.iter().map(of_type).collect())
        .map_err(|problem| keys.in_file(problem))
}

#[cfg(test)]
mod tests;
