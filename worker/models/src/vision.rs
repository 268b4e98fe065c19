//! The vision encoder of Qwen3-Omni, Qwen3-VL and Qwen3.5: a pre-norm transformer over patches, from pictures or frames
//! to the embeddings of their tokens.
//!
//! Patches are mapped to rows and get learned positions, which are interpolated to the picture's grid. Heads are
//! rotated by the line and the column of a patch. Attention sees one frame. Mergers join neighbouring patches to
//! tokens: one behind the last layer gives the embeddings, and one behind each tapped layer gives the features that the
//! thinker adds behind its first layers (*deepstack*).
//!
//! Paper: "Qwen3-VL Technical Report", arXiv:2511.21631. Reference: transformers
//! `models/qwen3_omni_moe/modeling_qwen3_omni_moe.py` and `vision_utils.py`.

mod config;
mod grid;
mod patches;
mod weights;

use std::{borrow::Cow, ops::Range};

use tutti_kernels::{Dense, Device, DeviceError, Encoder, EncoderHeads, Gelu, SegmentAttention};

pub(crate) use self::{
    config::VisionConfig,
    grid::PatchGrid,
    patches::{Channel, PatchSizes, patches},
    weights::{OMNI, VL, VisionNames},
};
use self::{
    grid::{PositionTable, angles},
    weights::{Layer, Merger, Weights},
};
use crate::{LoadError, LoadOptions, weights::Source};

/// Value that all layer norms add to the variance.
const EPS: f32 = 1e-6;

/// A vision encoder on a device, with buffers for one call.
pub(crate) struct VisionEncoder<D: Device> {
    config: VisionConfig,
    weights: Weights<D>,
    /// The learned positions.
    positions: PositionTable,
    buffers: Buffers<D>,
    weight_bytes: u64,
}

/// Buffers for `P` patches, the most of a call, and for the `M` tokens that these are merged to.
struct Buffers<D: Device> {
    patches: usize,
    /// Pixels of the patches, `[P, pixels of a patch]`.
    input: D::Tensor,
    /// Cosines and sines of each patch, `[P, head_dim]`.
    angles: D::Tensor,
    /// The residual stream, `[P, hidden]`.
    hidden: D::Tensor,
    /// Output of a norm, `[P, hidden]`.
    normed: D::Tensor,
    /// q, k and v, `[P, 3 * hidden]`.
    qkv: D::Tensor,
    /// Output of the attention, `[P, hidden]`.
    attended: D::Tensor,
    /// Input of the down projection, `[P, intermediate]`.
    activated: D::Tensor,
    /// Neighbouring patches end to end, `[M, hidden * patches of a token]`.
    joined: [D::Tensor; 2],
    /// Output of the merger's first map, of the same shape.
    mapped: D::Tensor,
    /// Embeddings or features of the tokens, `[M, out]`.
    out: D::Tensor,
}

impl<D: Encoder + Dense> VisionEncoder<D> {
    /// Loads the encoder of the checkpoint of `options`, for calls of up to `tokens` tokens.
    pub fn load(
        config: VisionConfig,
        names: &VisionNames,
        options: &LoadOptions,
        tokens: usize,
        device: &mut D,
    ) -> Result<Self, LoadError> {
        let source = Source::open(&options.dir, options, config.dtype)?;
        let (weights, positions, weight_bytes) = Weights::load(&config, names, source, device)?;
        let buffers = Buffers::allocate(&config, tokens, device)?;
        let positions = PositionTable { side: config.side, width: config.hidden, values: positions };
        Ok(Self { config, weights, positions, buffers, weight_bytes })
    }

    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Encodes pictures. `patches` holds the pixels of the patches of all pictures, in the order of [`PatchGrid`].
    /// Appends one row per token to `out`: its embedding, and its features level by level. A picture's rows do not
    /// depend on the other pictures. `shape` is the number of tokens to compute, of which the last are padding; `None`
    /// for no padding.
    pub fn run(
        &mut self,
        device: &mut D,
        patches: &[f32],
        pictures: &[PatchGrid],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let merge = self.config.merge;
        let count = pictures.iter().map(PatchGrid::patches).fold(0, usize::saturating_add);
        let whole = pictures.iter().all(|grid| grid.is_divisible_by(merge));
        if count == 0 || !whole || patches.len() != count.saturating_mul(self.config.pixels_of_patch()) {
            let values = patches.len();
            return Err(DeviceError::Misuse(format!("{values} values for the patches of {pictures:?}")));
        }
        let per_token = merge * merge;
        let padded = shape.map_or(count, |tokens| tokens.saturating_mul(per_token));
        if padded < count || padded > self.buffers.patches {
            let most = self.buffers.patches;
            let problem = format!("{count} patches in one call that computes {padded}, the limit is {most}");
            return Err(DeviceError::Misuse(problem));
        }
        let Self { config, weights, positions, buffers, .. } = self;
        let heads = EncoderHeads { heads: config.heads, head_dim: config.head_dim() };
        device.upload(&with_padding(patches, padded * config.pixels_of_patch()), &mut buffers.input)?;
        device.linear(weights.patch.operands(&buffers.input), &mut buffers.hidden)?;
        device.add_rows(&mut buffers.hidden, 0, &positions.of(pictures, merge))?;
        let angles = angles(pictures, merge, heads.head_dim, config.theta);
        device.upload(&with_padding(&angles, padded * heads.head_dim), &mut buffers.angles)?;
        let mut segments = frames(pictures);
        // Each token of padding sees itself alone, which costs least.
        segments.extend((count..padded).step_by(per_token).map(|first| first..first + per_token));
        let mut levels = Vec::with_capacity(config.taps.len() + 1);
        for (index, layer) in weights.layers.iter().enumerate() {
            buffers.run_layer(device, layer, heads, &segments)?;
            if let Some(level) = config.taps.iter().position(|tap| *tap == index) {
                levels.push(buffers.merge(device, &weights.features[level], MergerNorm::Behind)?);
            }
        }
        levels.insert(0, buffers.merge(device, &weights.merger, MergerNorm::Before)?);
        let tokens = count / per_token;
        out.reserve(levels.iter().map(Vec::len).sum());
        for token in 0..tokens {
            for level in &levels {
                out.extend_from_slice(&level[token * config.out..][..config.out]);
            }
        }
        Ok(())
    }
}

/// Returns rows of values with zeros behind them, up to `length` values.
pub(crate) fn with_padding(values: &[f32], length: usize) -> Cow<'_, [f32]> {
    match length.checked_sub(values.len()) {
        None | Some(0) => Cow::Borrowed(values),
        Some(zeros) => Cow::Owned([values, &vec![0.0; zeros]].concat()),
    }
}

/// Returns the ranges of patches that see each other: each frame of each picture.
fn frames(pictures: &[PatchGrid]) -> Vec<Range<usize>> {
    let mut end = 0;
    let sizes = pictures.iter().flat_map(|grid| std::iter::repeat_n(grid.height * grid.width, grid.frames));
    let frame = |patches: usize| {
        end += patches;
        end - patches..end
    };
    sizes.map(frame).collect()
}

/// The place of a merger's norm.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MergerNorm {
    /// Over each patch, before patches are joined.
    Before,
    /// Over the joined patches.
    Behind,
}

impl<D: Encoder + Dense> Buffers<D> {
    fn allocate(config: &VisionConfig, tokens: usize, device: &mut D) -> Result<Self, DeviceError> {
        let of_token = config.merge * config.merge;
        let patches = tokens.saturating_mul(of_token);
        let (hidden, joined) = (config.hidden, config.hidden * of_token);
        let mut tensor = |rows, width| device.tensor(rows, width);
        Ok(Self {
            patches,
            input: tensor(patches, config.pixels_of_patch())?,
            angles: tensor(patches, config.head_dim())?,
            hidden: tensor(patches, hidden)?,
            normed: tensor(patches, hidden)?,
            qkv: tensor(patches, 3 * hidden)?,
            attended: tensor(patches, hidden)?,
            activated: tensor(patches, config.intermediate)?,
            joined: [tensor(tokens, joined)?, tensor(tokens, joined)?],
            mapped: tensor(tokens, joined)?,
            out: tensor(tokens, config.out)?,
        })
    }

    fn run_layer(
        &mut self,
        device: &mut D,
        layer: &Layer<D>,
        shape: EncoderHeads,
        segments: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        let Self { angles, hidden, normed, qkv, attended, activated, .. } = self;
        device.layer_norm(hidden, layer.attention_norm.operands(EPS), normed)?;
        device.linear(layer.qkv.operands(normed), qkv)?;
        device.rotate_heads(shape, angles, qkv)?;
        device.segment_attention(SegmentAttention { qkv, shape, segments }, attended)?;
        device.linear_add(layer.out.operands(attended), hidden)?;
        device.layer_norm(hidden, layer.mlp_norm.operands(EPS), normed)?;
        device.linear(layer.up.operands(normed), activated)?;
        device.gelu(Gelu::Tanh, activated)?;
        device.linear_add(layer.down.operands(activated), hidden)
    }

    /// Merges the residual stream to tokens, and returns their rows.
    fn merge(
        &mut self,
        device: &mut D,
        merger: &Merger<D>,
        norm: MergerNorm,
    ) -> Result<Vec<f32>, DeviceError> {
        let Self { hidden, normed, joined: [joined, normed_behind], mapped, out, .. } = self;
        let input = match norm {
            MergerNorm::Before => {
                device.layer_norm(hidden, merger.norm.operands(EPS), normed)?;
                device.join_rows(normed, joined)?;
                joined
            }
            MergerNorm::Behind => {
                device.join_rows(hidden, joined)?;
                device.layer_norm(joined, merger.norm.operands(EPS), normed_behind)?;
                normed_behind
            }
        };
        device.linear(merger.first.operands(input), mapped)?;
        device.gelu(Gelu::Exact, mapped)?;
        device.linear(merger.second.operands(mapped), out)?;
        let mut rows = Vec::new();
        device.download(out, &mut rows)?;
        Ok(rows)
    }
}

#[cfg(test)]
mod tests;
