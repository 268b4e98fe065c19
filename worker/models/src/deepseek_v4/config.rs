//! The checked keys of a DeepSeek-V4 `config.json`, in the published spelling and in that of transformers.

use tutti_kernels::{
    CompressorShape, HyperShape, IndexerShape, RopeFrequencies, Routing, Score, WindowShape,
    collective::GroupRank,
};

use crate::{
    LoadError,
    config::{
        ConfigFile,
        keys::{Key, Keys},
        ranges::{self, product},
        text::{TextConfig, TextDefaults, divides, types_of_layers},
    },
    experts::{ExpertNames, ExpertShape, ExpertSizes},
    rope::{RopeDefaults, RopeTables},
    weights::share,
};

/// Tokens per page. Each page boundary closes all windows, because every ratio divides this number.
pub(super) const PAGE_TOKENS: usize = 128;

/// Defaults of keys that a config may lack. All defaults in this file come from transformers' `DeepseekV4Config`.
const DEFAULTS: TextDefaults =
    TextDefaults { kv_heads: Some(1), head_dim: Some(512), max_position_embeddings: 1 << 20 };
/// Share of a head's elements that are rotated.
const DEFAULT_ROTATED: f64 = 64.0 / 512.0;
const DEFAULT_COMPRESS_THETA: f64 = 160_000.0;
const DEFAULT_HASH_LAYERS: usize = 3;

const NAMES: ExpertNames = ExpertNames { count: "n_routed_experts", projections: ["w1", "w3", "w2"] };

/// The kind of a layer: the tokens that its attention sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerKind {
    /// A window of recent tokens.
    Sliding,
    /// The window, and those entries of a few tokens each that an indexer chooses (CSA).
    Sparse,
    /// The window, and all entries of many tokens each (HCA).
    Heavy,
}

/// The checked shape of a DeepSeek-V4. In the config of a rank's shard, heads, groups and widths of MLPs are the rank's
/// share.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    pub text: TextConfig,
    /// The kind of each layer.
    pub layers: Vec<LayerKind>,
    /// Per layer: true if a table chooses the experts of a token.
    pub by_token: Vec<bool>,
    /// Width of the latent vector that queries are computed from.
    pub q_rank: usize,
    /// Number of tokens that a query sees in its window.
    pub window: usize,
    /// Number of groups of heads in the output projection.
    pub groups: usize,
    /// Width of a group's output.
    pub group_width: usize,
    /// Number of tokens per entry of layers of the kinds [`LayerKind::Sparse`] and [`LayerKind::Heavy`].
    pub ratios: [usize; 2],
    pub indexer: IndexerShape,
    pub experts: ExpertShape,
    /// Intermediate width of the shared expert.
    pub shared_width: usize,
    pub hyper: HyperShape,
    /// Rotation of sliding layers, and of layers with entries.
    pub ropes: [RopeFrequencies; 2],
}

impl Config {
    /// Reads and checks the keys.
    pub fn parse(file: &ConfigFile) -> Result<Self, LoadError> {
        let keys = file.keys();
        let mut text = TextConfig::read(&keys, &keys, DEFAULTS)?;
        if text.kv_heads != 1 {
            let problem = format!("{} is not supported; supported: 1", text.kv_heads);
            return Err(keys.invalid(&ranges::NUM_KEY_VALUE_HEADS, problem));
        }
        keys.refuse(&ranges::ATTENTION_BIAS)?;
        keys.refuse(&ranges::MLP_BIAS)?;
        keys.get(&ranges::N_SHARED_EXPERTS)?;
        keys.get(&ranges::SCORING_FUNC)?;
        let layers = layers(&keys, text.layers)?;
        let by_token = by_token(&keys, text.layers)?;
        let ropes = ropes(&keys, &mut text)?;
        let rates = keys.section(ranges::COMPRESS_RATES)?;
        let ratios = [
            ratio([&keys, &rates], [&ranges::COMPRESS_RATE_CSA, &ranges::COMPRESSED_SPARSE], 4)?,
            ratio([&keys, &rates], [&ranges::COMPRESS_RATE_HCA, &ranges::HEAVILY_COMPRESSED], 128)?,
        ];
        let sizes = ExpertSizes {
            experts: keys.get_or(&ranges::N_ROUTED_EXPERTS, 256)?,
            top_k: keys.get_or(&ranges::NUM_EXPERTS_PER_TOK, 6)?,
            intermediate_size: keys.get_or(&ranges::MOE_INTERMEDIATE_SIZE, 2048)?,
        };
        let routing = Routing {
            top_k: sizes.top_k,
            score: Score::SqrtSoftplus,
            // transformers always normalises the weights of a token's experts, whatever `norm_topk_prob` says.
            renormalise: true,
            scale: keys.get_or(&ranges::ROUTED_SCALING_FACTOR, 1.5)? as f32,
        };
        let experts = sizes.shape(&text, &NAMES, routing).map_err(|problem| file.invalid(problem))?;
        let limit = Some(keys.get_or(&ranges::SWIGLU_LIMIT, 10.0)? as f32);
        let config = Self {
            layers,
            by_token,
            q_rank: keys.get_or(&ranges::Q_LORA_RANK, 1024)?,
            window: keys.get_or(&ranges::WINDOW, 128)?,
            groups: keys.get_or(&ranges::O_GROUPS, 8)?,
            group_width: keys.get_or(&ranges::O_LORA_RANK, 1024)?,
            ratios,
            indexer: IndexerShape {
                heads: keys.get_or(&ranges::INDEX_N_HEADS, 64)?,
                head_dim: keys.get_or(&ranges::INDEX_HEAD_DIM, 128)?,
                top_k: keys.get_or(&ranges::INDEX_TOPK, 512)?,
            },
            shared_width: experts.intermediate_size,
            experts: ExpertShape { limit, ..experts },
            hyper: HyperShape {
                streams: keys.get_or(&ranges::HC_MULT, 4)?,
                width: text.hidden_size,
                norm_eps: text.rms_norm_eps,
                eps: keys.get_or(&ranges::HC_EPS, 1e-6)? as f32,
                iterations: keys.get_or(&ranges::HC_SINKHORN_ITERS, 20)?,
            },
            ropes,
            text,
        };
        config.check().map_err(|problem| file.invalid(problem))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let TextConfig { heads, head_dim, hidden_size, layers, vocab_size, .. } = self.text;
        if !heads.is_multiple_of(self.groups) {
            return Err(format!("o_groups: {} does not divide num_attention_heads, {heads}", self.groups));
        }
        let rotated = self.rotated();
        if self.indexer.head_dim < rotated {
            let width = self.indexer.head_dim;
            return Err(format!("index_head_dim: {width} is less than qk_rope_head_dim, {rotated}"));
        }
        let (layers, hidden) = (("num_hidden_layers", layers), ("hidden_size", hidden_size));
        let (heads, head_dim) = (("num_attention_heads", heads), ("head_dim", head_dim));
        let (groups, group_width) = (("o_groups", self.groups), ("o_lora_rank", self.group_width));
        let q_rank = ("q_lora_rank", self.q_rank);
        let index_heads = ("index_n_heads", self.indexer.heads);
        let index_dim = ("index_head_dim", self.indexer.head_dim);
        let streams = ("hc_mult", self.hyper.streams);
        product([groups, group_width], ranges::MAX_WIDTH)?;
        product([index_heads, index_dim], ranges::MAX_WIDTH)?;
        product([streams, hidden], ranges::MAX_WIDTH)?;
        product([q_rank, hidden], ranges::MAX_TENSOR)?;
        product([q_rank, heads, head_dim], ranges::MAX_TENSOR)?;
        product([q_rank, index_heads, index_dim], ranges::MAX_TENSOR)?;
        product([groups, group_width, hidden], ranges::MAX_TENSOR)?;
        product([group_width, heads, head_dim], ranges::MAX_TENSOR)?;
        // A compressor has up to two parts.
        product([head_dim, hidden], ranges::MAX_TENSOR / 2)?;
        product([index_dim, hidden], ranges::MAX_TENSOR / 2)?;
        product([index_heads, hidden], ranges::MAX_TENSOR)?;
        product([streams, streams, streams, hidden], ranges::MAX_TENSOR / 2)?;
        let per_token = ("num_experts_per_tok", self.experts.routing.top_k);
        product([("vocab_size", vocab_size), per_token], ranges::MAX_TENSOR)?;
        product([layers, ("sliding_window", self.window), head_dim], ranges::MAX_STATE).map(|_| ())
    }

    /// Returns the shape of one rank's shard. Refuses a number of ranks among which the model cannot be divided.
    pub fn shard(&self, group_rank: GroupRank) -> Result<Self, String> {
        divides("o_groups", self.groups, group_rank)?;
        self.experts.check(group_rank)?;
        divides("moe_intermediate_size", self.shared_width, group_rank)?;
        let of = |units| share(units, group_rank).len();
        Ok(Self {
            text: self.text.shard(group_rank)?,
            groups: of(self.groups),
            shared_width: of(self.shared_width),
            ..self.clone()
        })
    }

    /// Number of layers of a kind.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|layer| **layer == kind).count()
    }

    /// Number of the last elements of a head that are rotated.
    pub fn rotated(&self) -> usize {
        2 * self.ropes[0].inverse.len()
    }

    /// Returns the compressor of the entries that a layer attends to; `None` in a sliding layer.
    pub fn compressor(&self, kind: LayerKind) -> Option<CompressorShape> {
        let ([sparse, heavy], width) = (self.ratios, self.text.head_dim);
        match kind {
            LayerKind::Sliding => None,
            LayerKind::Sparse => Some(CompressorShape { ratio: sparse, width, parts: 2 }),
            LayerKind::Heavy => Some(CompressorShape { ratio: heavy, width, parts: 1 }),
        }
    }

    /// Returns the compressor of an indexer's entries.
    pub fn index_compressor(&self) -> CompressorShape {
        CompressorShape { ratio: self.ratios[0], width: self.indexer.head_dim, parts: 2 }
    }

    /// Returns the shape of a layer's attention.
    pub fn window_shape(&self) -> WindowShape {
        let TextConfig { heads, head_dim, dtype, .. } = self.text;
        let scale = (head_dim as f32).sqrt().recip();
        WindowShape { heads, head_dim, scale, window: self.window, dtype }
    }
}

/// Returns the kind of each layer, from `layer_types` or from `compress_ratios`, which may also name the kinds of
/// layers of a draft model behind those of the model.
fn layers(keys: &Keys<'_>, count: usize) -> Result<Vec<LayerKind>, LoadError> {
    let (types, ratios) = (keys.get(&ranges::LAYER_TYPES)?, keys.get(&ranges::COMPRESS_RATIOS)?);
    let kinds: Result<Vec<_>, String> = match (types, ratios) {
        (Some(types), _) => {
            let of_type = |kind: &String| match kind.as_str() {
                "sliding_attention" => Ok(LayerKind::Sliding),
                "compressed_sparse_attention" => Ok(LayerKind::Sparse),
                "heavily_compressed_attention" => Ok(LayerKind::Heavy),
                other => Err(format!(
                    "layer_types: {other:?} is none of sliding_attention, compressed_sparse_attention, \
                     heavily_compressed_attention"
                )),
            };
            types_of_layers(&types, count).and_then(|()| types.iter().map(of_type).collect())
        }
        (None, Some(ratios)) if ratios.len() < count => {
            let found = ratios.len();
            Err(format!("compress_ratios: names {found} layers, but num_hidden_layers is {count}"))
        }
        (None, Some(ratios)) => {
            let of_ratio = |ratio: &usize| match ratio {
                0 => Ok(LayerKind::Sliding),
                4 => Ok(LayerKind::Sparse),
                128 => Ok(LayerKind::Heavy),
                other => Err(format!("compress_ratios: {other} is none of 0, 4, 128")),
            };
            ratios[..count].iter().map(of_ratio).collect()
        }
        (None, None) => {
            let is_sparse = |layer: usize| layer > 2 && !layer.is_multiple_of(2);
            let kind = |layer| if is_sparse(layer) { LayerKind::Sparse } else { LayerKind::Heavy };
            Ok((0..count).map(kind).collect())
        }
    };
    kinds.map_err(|problem| keys.in_file(problem))
}

/// Returns for each layer if a table chooses the experts of a token. Refuses such a table in the last layer, which runs
/// its experts on the rows of logits alone.
fn by_token(keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, LoadError> {
    let first = keys.get_or(&ranges::NUM_HASH_LAYERS, DEFAULT_HASH_LAYERS)?;
    let types = keys.get(&ranges::MLP_LAYER_TYPES)?;
    let by_token: Vec<bool> = match &types {
        Some(types) if types.len() != count => {
            let problem = format!("names {} layers, but num_hidden_layers is {count}", types.len());
            return Err(keys.invalid(&ranges::MLP_LAYER_TYPES, problem));
        }
        Some(types) => {
            let of_type = |kind: &String| match kind.as_str() {
                "hash_moe" => Ok(true),
                "moe" => Ok(false),
                other => {
                    let problem = format!("{other:?} is none of hash_moe, moe");
                    Err(keys.invalid(&ranges::MLP_LAYER_TYPES, problem))
                }
            };
            types.iter().map(of_type).collect::<Result<_, _>>()?
        }
        None => (0..count).map(|layer| layer < first).collect(),
    };
    if by_token.last() == Some(&true) {
        let problem = format!("the last of {count} layers may not choose its experts by the token's id");
        return Err(match types {
            Some(_) => keys.invalid(&ranges::MLP_LAYER_TYPES, problem),
            None => keys.invalid(&ranges::NUM_HASH_LAYERS, problem),
        });
    }
    Ok(by_token)
}

/// Returns the rotation of sliding layers and that of layers with entries. Extends the context of `text` to the one
/// that the latter is made for.
fn ropes(keys: &Keys<'_>, text: &mut TextConfig) -> Result<[RopeFrequencies; 2], LoadError> {
    let head_dim = text.head_dim;
    let given = keys.get(&ranges::QK_ROPE_HEAD_DIM)?;
    let refuse = |problem: String| Err(keys.invalid(&ranges::QK_ROPE_HEAD_DIM, problem));
    if let Some(rotated) = given.filter(|rotated| *rotated > head_dim) {
        return refuse(format!("{rotated} of head_dim, {head_dim}"));
    }
    let share = given.map_or(DEFAULT_ROTATED, |rotated| rotated as f64 / head_dim as f64);
    // The reference multiplies sines and cosines by 1, not by YaRN's factor.
    let defaults = RopeDefaults { rotated: share, attention_factor: Some(1.0), ..RopeDefaults::PLAIN };
    let tables = RopeTables::with_compressed(keys, text.max_context, defaults, DEFAULT_COMPRESS_THETA)?;
    let rotated: Vec<usize> = tables.tables.iter().map(|rope| rope.rotated(head_dim)).collect();
    if let [main, compress] = rotated[..]
        && main != compress
    {
        let problem = format!("rotates {main} elements in main and {compress} in compress");
        return Err(keys.invalid(&ranges::PARTIAL_ROTARY_FACTOR, problem));
    }
    if let Some(given) = given.filter(|given| !rotated.contains(given)) {
        return refuse(format!("{given} is odd, or partial_rotary_factor says otherwise: {rotated:?}"));
    }
    text.max_context = tables.max_context(text.max_context);
    let frequencies = tables.frequencies(head_dim).map_err(|problem| keys.in_file(problem))?;
    frequencies.try_into().map_err(|_| keys.in_file("rope_parameters: are not two sets".into()))
}

/// Returns the number of tokens per entry: from an older key of the first `keys`, or from a key of the second.
fn ratio(
    [keys, rates]: [&Keys<'_>; 2],
    [older, newer]: [&Key<usize>; 2],
    default: usize,
) -> Result<usize, LoadError> {
    let (given, by_rate) = (keys.get(older)?, rates.get(newer)?);
    let ratio = given.or(by_rate).unwrap_or(default);
    if PAGE_TOKENS.is_multiple_of(ratio) {
        return Ok(ratio);
    }
    let problem = format!("{ratio} does not divide the {PAGE_TOKENS} tokens of a page");
    Err(if given.is_some() { keys.invalid(older, problem) } else { rates.invalid(newer, problem) })
}

#[cfg(test)]
mod tests;
