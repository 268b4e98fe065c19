//! The checked keys of a `vision_config`.

use tutti_kernels::WeightType;

use super::patches::PatchSizes;
use crate::{
    LoadError,
    config::{
        keys::Keys,
        ranges::{self, product},
    },
};

/// Default of `deepstack_visual_indexes` in a family that has it.
const DEFAULT_TAPS: [usize; 3] = [8, 16, 24];

/// The checked shape of a vision encoder. Defaults are those of transformers' `Qwen3OmniMoeVisionEncoderConfig`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VisionConfig {
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    /// Pixels per side of a patch.
    pub patch: usize,
    /// Frames per patch.
    pub temporal: usize,
    /// Patches per side of a token.
    pub merge: usize,
    /// Elements per embedding.
    pub out: usize,
    /// Entries per side of the square table of learned positions.
    pub side: usize,
    /// Layers whose output gives features, ascending.
    pub taps: Vec<usize>,
    /// For each tap, its index in `deepstack_visual_indexes`, by which the checkpoint names the merger.
    pub mergers: Vec<usize>,
    /// Base of the frequencies of rotation.
    pub theta: f64,
    /// Type of dummy weights.
    pub dtype: WeightType,
}

/// Colours of a pixel.
pub(crate) const CHANNELS: usize = 3;

impl VisionConfig {
    /// Reads and checks the keys. `has_features` is true in a family with deepstack. Embeddings must be as wide as the
    /// thinker's residual stream, `hidden_size`.
    pub fn read(
        keys: &Keys<'_>,
        has_features: bool,
        hidden_size: usize,
        dtype: WeightType,
    ) -> Result<Self, LoadError> {
        let positions = keys.get_or(&ranges::NUM_POSITION_EMBEDDINGS, 2304)?;
        let side = positions.isqrt();
        if side * side != positions {
            let problem = format!("{positions} is not the square of an integer");
            return Err(keys.invalid(&ranges::NUM_POSITION_EMBEDDINGS, problem));
        }
        let channels = keys.get_or(&ranges::IN_CHANNELS, CHANNELS)?;
        if channels != CHANNELS {
            return Err(keys.invalid(&ranges::IN_CHANNELS, format!("must be {CHANNELS}, not {channels}")));
        }
        keys.get(&ranges::VISION_HIDDEN_ACT)?;
        let indexes = match has_features {
            true => keys.get_or(&ranges::DEEPSTACK_VISUAL_INDEXES, DEFAULT_TAPS.to_vec())?,
            false => Vec::new(),
        };
        // The reference collects features in the order of the layers, whatever the order of the key's entries.
        let mut order: Vec<usize> = (0..indexes.len()).collect();
        order.sort_by_key(|&entry| indexes[entry]);
        let rope = keys.section(ranges::ROPE_PARAMETERS)?;
        let config = Self {
            layers: keys.get_or(&ranges::DEPTH, 27)?,
            hidden: keys.get_or(&ranges::HIDDEN_SIZE, 1152)?,
            intermediate: keys.get_or(&ranges::INTERMEDIATE_SIZE, 4304)?,
            heads: keys.get_or(&ranges::NUM_HEADS, 16)?,
            patch: keys.get_or(&ranges::PATCH_SIZE, 16)?,
            temporal: keys.get_or(&ranges::TEMPORAL_PATCH_SIZE, 2)?,
            merge: keys.get_or(&ranges::SPATIAL_MERGE_SIZE, 2)?,
            out: keys.get_or(&ranges::OUT_HIDDEN_SIZE, 3584)?,
            side,
            taps: order.iter().map(|&entry| indexes[entry]).collect(),
            mergers: order,
            theta: rope.get_or(&ranges::ROPE_THETA, 10_000.0)?,
            dtype,
        };
        config.check(keys, hidden_size)?;
        Ok(config)
    }

    fn check(&self, keys: &Keys<'_>, hidden_size: usize) -> Result<(), LoadError> {
        let Self { hidden, heads, layers, out, .. } = *self;
        // Each half of a head is rotated by lines and by columns.
        if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(4) {
            let problem =
                format!("{heads} do not divide hidden_size, {hidden}, into heads of multiples of 4");
            return Err(keys.invalid(&ranges::NUM_HEADS, problem));
        }
        if out != hidden_size {
            let problem = format!("must be the text model's hidden_size, {hidden_size}, not {out}");
            return Err(keys.invalid(&ranges::OUT_HIDDEN_SIZE, problem));
        }
        let is_bad = |pair: &[usize]| pair[0] == pair[1];
        if self.taps.last().is_some_and(|&last| last >= layers) || self.taps.windows(2).any(is_bad) {
            let problem = format!("{:?} are not different layers of {layers} (depth)", self.taps);
            return Err(keys.invalid(&ranges::DEEPSTACK_VISUAL_INDEXES, problem));
        }
        let merge = ("spatial_merge_size", self.merge);
        let (width, hidden) = (("intermediate_size", self.intermediate), ("hidden_size", hidden));
        let patch = ("patch_size", self.patch);
        let sizes = [
            product([hidden, width], ranges::MAX_TENSOR).map(drop),
            product(
                [patch, patch, ("temporal_patch_size", self.temporal), ("in_channels", CHANNELS)],
                ranges::MAX_WIDTH,
            )
            .and_then(|pixels| product([("pixels of a patch", pixels), hidden], ranges::MAX_TENSOR))
            .map(drop),
            product([hidden, merge, merge], ranges::MAX_WIDTH)
                .and_then(|joined| {
                    product([("hidden_size of a token", joined), ("hidden_size", joined)], ranges::MAX_TENSOR)
                })
                .map(drop),
            product([("num_position_embeddings", self.side * self.side), hidden], ranges::MAX_TENSOR)
                .map(drop),
            product(
                [("deepstack_visual_indexes", self.taps.len() + 1), ("out_hidden_size", out)],
                ranges::MAX_WIDTH,
            )
            .map(drop),
        ];
        sizes.into_iter().collect::<Result<(), _>>().map_err(|problem| keys.in_file(problem))
    }

    pub fn patch_sizes(&self) -> PatchSizes {
        PatchSizes { patch: self.patch, temporal: self.temporal, merge: self.merge }
    }

    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Number of values of a patch: its pixels in all colours and frames.
    pub fn pixels_of_patch(&self) -> usize {
        CHANNELS * self.temporal * self.patch * self.patch
    }

    /// Elements per row of a token: its embedding and its features.
    pub fn row_width(&self) -> usize {
        self.out * (1 + self.taps.len())
    }
}
