//! Operations of encoders of pictures and of sound, which run outside of steps, and the addition of their results to
//! the residual stream of a decoder.
//!
//! Papers: Dosovitskiy et al., arXiv:2010.11929 (vision); Radford et al., arXiv:2212.04356 (sound). Reference:
//! transformers `models/qwen3_omni_moe/modeling_qwen3_omni_moe.py`.

use std::ops::Range;

use super::family::family;
use crate::{Device, DeviceError};

/// The operands of [`Encoder::layer_norm`].
pub struct LayerNorm<'a, V> {
    /// Factors, one per element of a row.
    pub weight: &'a V,
    /// Summands, one per element of a row.
    pub bias: &'a V,
    /// Epsilon that is added to the variance.
    pub eps: f32,
}

/// A form of the Gaussian error linear unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// `x * (1 + erf(x / sqrt(2))) / 2`.
    Exact,
    /// `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³))) / 2`.
    Tanh,
}

/// The heads of one attention layer of an encoder. A row's fused `qkv` is `[q heads | k heads | v heads] × head_dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderHeads {
    /// Number of heads of each of q, k and v.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

/// The operands of [`Encoder::segment_attention`].
pub struct SegmentAttention<'a, T> {
    /// q, k and v of all rows, `[rows, 3 * heads * head_dim]`.
    pub qkv: &'a T,
    /// The layer's heads.
    pub shape: EncoderHeads,
    /// Ranges of rows, ascending and without gaps, that cover all rows. A row sees the rows of its own range.
    pub segments: &'a [Range<usize>],
}

/// Pictures that are tensors with one row per pixel: picture by picture, and line by line in a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelGrid {
    /// Number of pictures.
    pub pictures: usize,
    /// Lines per picture.
    pub height: usize,
    /// Pixels per line.
    pub width: usize,
}

impl PixelGrid {
    /// Number of pixels of all pictures.
    pub fn pixels(&self) -> usize {
        self.pictures.saturating_mul(self.height).saturating_mul(self.width)
    }

    /// The grid of the outputs of a convolution of 3 × 3 pixels with stride 2 and a padding of one pixel.
    #[must_use]
    pub fn halved(&self) -> Self {
        Self { height: self.height.div_ceil(2), width: self.width.div_ceil(2), ..*self }
    }
}

family! {
    /// Encoders of pictures and of sound. No result of a row depends on rows of other segments.
    pub trait Encoder {
        /// Computes `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, row by row.
        fn layer_norm(
            &mut self,
            x: &Self::Tensor,
            norm: LayerNorm<'_, Self::Vector>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.by_row(x);
        /// Computes `x = gelu(x)`.
        fn gelu(&mut self, form: Gelu, x: &mut Self::Tensor) => |recorder| recorder.by_row(x);
        /// Rotates the heads of q and k of each row. `angles` holds the cosines and then the sines of each row,
        /// `[rows, head_dim]`. An element of the first half of a head is paired with the same element of the second.
        fn rotate_heads(&mut self, shape: EncoderHeads, angles: &Self::Tensor, qkv: &mut Self::Tensor)
            => |recorder| recorder.by_row(qkv);
        /// Computes attention in both directions inside each segment, with a scale of `1 / sqrt(head_dim)`. `out` is
        /// `[rows, heads * head_dim]`.
        fn segment_attention(&mut self, attention: SegmentAttention<'_, Self::Tensor>, out: &mut Self::Tensor)
            => |recorder| recorder.by_row(attention.qkv);
        /// Gathers the inputs of a convolution of 3 × 3 pixels with stride 2 and a padding of zeros, so that a matrix
        /// product computes it. `x` has one row per pixel of `grid`. `out` has one row per pixel of
        /// [`PixelGrid::halved`], `[channels of x, 3, 3]`.
        fn gather_convolution(&mut self, grid: PixelGrid, x: &Self::Tensor, out: &mut Self::Tensor)
            => |recorder| recorder.by_row(x);
        /// Joins consecutive rows: each row of `out` holds as many rows of `x` as it has room for, end to end.
        fn join_rows(&mut self, x: &Self::Tensor, out: &mut Self::Tensor) => |recorder| recorder.by_row(x);
        /// Adds `values` from the host to the rows of `out` from row `first` on. A decoder adds features of pictures to
        /// its residual stream in this way (*deepstack*).
        fn add_rows(&mut self, out: &mut Self::Tensor, first: usize, values: &[f32])
            => |recorder| recorder.by_row(out);
    }
}
