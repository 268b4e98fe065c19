//! Attention over paged keys and values.

use super::family::family;
use super::rotary::{RopeFrequencies, Rotary};
use crate::{Device, DeviceError};

/// The heads of one attention layer. A token's fused `qkv` is `[q heads | k heads | v heads] × head_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor by which q·k is multiplied.
    pub scale: f32,
    /// Number of keys that a query sees, including its own; `None` if it sees all keys up to its own.
    pub window: Option<usize>,
}

/// RMS norms that are applied to each head of q and k before rotation (Qwen3).
pub struct HeadNorms<'a, V> {
    /// Weight for every query head, `[head_dim]`.
    pub q: &'a V,
    /// Weight for every key head, `[head_dim]`.
    pub k: &'a V,
    /// Epsilon that is added to the mean square.
    pub eps: f32,
}

/// The operands of [`PagedAttention::rotate_and_store`].
pub struct RotateAndStore<'a, T, V, P> {
    /// q, k and v of the step's tokens, `[tokens, (heads + 2 * kv_heads) * head_dim]`. Receives the rotated q.
    pub qkv: &'a mut T,
    /// The layer's heads.
    pub shape: AttentionShape,
    /// Norms of the heads of q and k.
    pub norms: Option<HeadNorms<'a, V>>,
    /// Rotation of q and k.
    pub rotary: Rotary<'a, T>,
    /// Planes whose pages receive k and v.
    pub planes: &'a mut P,
    /// Index of the layer among the layers of the plane of keys and values.
    pub layer: usize,
}

/// The operands of [`PagedAttention::attention`].
pub struct Attention<'a, T, P> {
    /// Fused rows that [`PagedAttention::rotate_and_store`] has rotated. Only q is read.
    pub qkv: &'a T,
    /// The layer's heads.
    pub shape: AttentionShape,
    /// Planes whose pages hold k and v.
    pub planes: &'a P,
    /// Index of the layer among the layers of the plane of keys and values.
    pub layer: usize,
}

family! {
    /// Rotation, storing of keys and values in pages, and causal attention over them.
    pub trait PagedAttention {
        /// Computes `out[t] = [cos | sin](angle) * scale` with the angles of [`RopeFrequencies`]. The shape of `out` is
        /// `[tokens, 2 * inverse.len()]`. One call per step serves all layers with these frequencies.
        fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut Self::Tensor) => |recorder| recorder.by_token();
        /// Normalises q and k of each token if there are norms, and rotates them. q stays in `qkv`; k and v are written
        /// to the request's pages.
        fn rotate_and_store(
            &mut self,
            operands: RotateAndStore<'_, Self::Tensor, Self::Vector, Self::Planes>,
        ) => |recorder| recorder.by_token();
        /// Computes causal attention of each token over its request's pages. A query at position p sees keys at
        /// positions `max(0, p + 1 - window) ..= p`. `out` is `[tokens, heads * head_dim]`.
        fn attention(&mut self, attention: Attention<'_, Self::Tensor, Self::Planes>, out: &mut Self::Tensor)
            => |recorder| recorder.attention(&attention.shape);
    }
}
