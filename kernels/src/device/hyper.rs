//! Hyper-connections: a residual stream that consists of several streams, which each sublayer mixes.
//!
//! Paper: Zhu et al., "Hyper-Connections", arXiv:2409.19606; with doubly stochastic mixes: Xie et al., "mHC",
//! arXiv:2512.24880. Reference: transformers `models/deepseek_v4/modular_deepseek_v4.py`.

use super::family::family;
use crate::{Device, DeviceError};

/// The sizes of a model's hyper-connections. A row of streams is `[streams, width]`. A row of mixes is `[pre | post |
/// combination]` with `streams`, `streams` and `streams²` elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HyperShape {
    /// Number of streams.
    pub streams: usize,
    /// Elements per stream.
    pub width: usize,
    /// Epsilon that is added to the mean square of a row of streams.
    pub norm_eps: f32,
    /// Epsilon that is added to weights, and to the sums that they are divided by.
    pub eps: f32,
    /// Number of times that the columns of a combination are divided by their sums. Its rows are divided once less.
    pub iterations: usize,
}

impl HyperShape {
    /// Maximum number of streams, whose elements of the same indices a device holds in registers together.
    pub const MAX_STREAMS: usize = 8;

    /// Number of elements of a row of streams.
    pub fn stream_elements(&self) -> usize {
        self.streams * self.width
    }

    /// Number of elements of a row of mixes.
    pub fn mix_elements(&self) -> usize {
        (2 + self.streams) * self.streams
    }
}

/// Weights of a projection of the streams, all in f32.
pub struct StreamProjection<'a, V> {
    /// Projection, `[outputs, streams * width]`.
    pub weight: &'a V,
    /// Factor of each part of the outputs: of pre, post and combination, or of the one part of a head.
    pub scale: &'a V,
    /// Term of each output.
    pub base: &'a V,
}

family! {
    /// Hyper-connections. Each row is computed alone, in an order that depends only on the shape.
    pub trait HyperConnections {
        /// Computes `out[t, i] = x[t]` for every stream `i`.
        fn spread(&mut self, x: &Self::Tensor, shape: HyperShape, out: &mut Self::Tensor)
            => |recorder| recorder.by_row(x);
        /// Computes the mixes of a sublayer from the streams, with `m = weight · x / sqrt(mean(x²) + norm_eps)`:
        /// `pre = sigmoid(m * scale[0] + base) + eps`, `post = 2 sigmoid(m * scale[1] + base)`, and the combination is
        /// `softmax(m * scale[2] + base) + eps` over each row of `[streams, streams]`, whose columns are then divided
        /// by their sums plus `eps`, followed by `iterations - 1` times the same for rows and for columns.
        fn mix_streams(
            &mut self,
            streams: &Self::Tensor,
            projection: StreamProjection<'_, Self::Vector>,
            shape: HyperShape,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.by_row(streams);
        /// Computes the input of a sublayer, `out = Σ pre[i] * streams[i]`.
        fn collapse_streams(
            &mut self,
            streams: &Self::Tensor,
            mixes: &Self::Tensor,
            shape: HyperShape,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.by_row(streams);
        /// Computes the streams behind a sublayer with output `y`:
        /// `streams'[k] = post[k] * y + Σ_j combination[j, k] * streams[j]`.
        fn combine_streams(
            &mut self,
            y: &Self::Tensor,
            mixes: &Self::Tensor,
            shape: HyperShape,
            streams: &mut Self::Tensor,
        ) => |recorder| recorder.by_row(y);
        /// Computes the input of the final norm, `out = Σ w[i] * streams[i]`, with
        /// `w = sigmoid(m * scale[0] + base) + eps` and `m` as in [`mix_streams`](Self::mix_streams).
        fn head_streams(
            &mut self,
            streams: &Self::Tensor,
            projection: StreamProjection<'_, Self::Vector>,
            shape: HyperShape,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.by_row(streams);
    }
}
