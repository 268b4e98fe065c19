//! Rotation of queries and keys by position (RoPE).
//!
//! Paper: "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.

/// Rotary frequencies: `angle[i] = positions[axes[i]] * inverse[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// Inverse frequencies, `[rotated elements of a head / 2]`.
    pub inverse: Vec<f32>,
    /// Axis of positions of each frequency, 0 to 2. Text has equal positions on all axes.
    pub axes: Vec<u8>,
    /// Factor by which cosine and sine are multiplied (YaRN's attention factor); 1 without YaRN.
    pub scale: f32,
}

/// The rotation of the first `rotated` elements of each head of q and k: element `i` is rotated with element
/// `i + rotated / 2`.
pub struct Rotary<'a, T> {
    /// Angles of the step's tokens, from [`PagedAttention::rope_angles`](super::PagedAttention::rope_angles):
    /// `[tokens, rotated]`. Their width, which is even and at most `head_dim`, decides how much of a head is rotated.
    pub angles: &'a T,
}
