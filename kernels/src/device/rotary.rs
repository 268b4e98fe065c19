//! Rotation of queries and keys by position (RoPE).
//!
//! Paper: "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.

/// Rotary frequencies: `angle[i] = position * inverse[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// Inverse frequencies, `[rotated elements of a head / 2]`.
    pub inverse: Vec<f32>,
    /// Factor by which cosine and sine are multiplied (YaRN's attention factor); 1 without YaRN.
    pub scale: f32,
}

/// The rotation of each head of q and k: element `i` is rotated with element `i + head_dim / 2`.
pub struct Rotary<'a, T> {
    /// Angles of the step's tokens, from [`PagedAttention::rope_angles`](super::PagedAttention::rope_angles):
    /// `[tokens, head_dim]`.
    pub angles: &'a T,
}
