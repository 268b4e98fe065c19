//! Rotation of queries and keys by position (RoPE).
//!
//! Paper: "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.

/// Rotary frequencies: `angle[i] = position[axes[i]] * inverse[i]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RopeFrequencies {
    /// Inverse frequencies, `[rotated elements of a head / 2]`.
    pub inverse: Vec<f32>,
    /// Factor by which cosine and sine are multiplied (YaRN's attention factor); 1 without YaRN.
    pub scale: f32,
    /// Axis of [`StepInputs::positions`](crate::StepInputs::positions) of each frequency, 0 to 2, in order of `inverse`
    /// (M-RoPE, arXiv:2409.12191). Empty if all frequencies use the first axis.
    pub axes: Vec<u8>,
}

/// The rotation of the first `rotated` elements of each head of q and k: element `i` is rotated with element `i +
/// rotated / 2`. The other elements of the head do not change.
pub struct Rotary<'a, T> {
    /// Angles of the step's tokens, from [`PagedAttention::rope_angles`](super::PagedAttention::rope_angles):
    /// `[tokens, rotated]`.
    pub angles: &'a T,
}
