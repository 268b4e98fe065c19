//! The working memory of a task of attention.

use super::partial::Partial;
use crate::cpu::simd::LANES;

/// The working memory of a task. All arrays are ordered by query.
pub(super) struct State<'a> {
    /// Queries, `head_dim` elements each, in the kernel's layout.
    pub(super) q: &'a mut [f32],
    /// Scores of a block, which the softmax replaces with weights, `[queries, block]`.
    pub(super) scores: &'a mut [f32],
    /// Per query, the factor by which the sums of earlier blocks are multiplied. Sixteen floats of padding follow.
    pub(super) decay: &'a mut [f32],
    /// The result of the current range.
    pub(super) range: Partial<'a>,
    /// The merged result of the ranges before the current one.
    pub(super) whole: Partial<'a>,
}

impl<'a> State<'a> {
    /// Number of floats of a task's working memory.
    pub(super) fn floats(queries: usize, head_dim: usize, block: usize) -> usize {
        queries * (head_dim + block + 1) + LANES + 2 * Partial::floats(queries, head_dim)
    }

    /// Divides a slice of at least [`floats`](Self::floats) floats into the arrays of a state.
    pub(super) fn new(floats: &'a mut [f32], queries: usize, head_dim: usize, block: usize) -> Self {
        let (q, rest) = floats.split_at_mut(queries * head_dim);
        let (scores, rest) = rest.split_at_mut(queries * block);
        let (decay, rest) = rest.split_at_mut(queries + LANES);
        let (range, rest) = rest.split_at_mut(Partial::floats(queries, head_dim));
        let (whole, _) = rest.split_at_mut(Partial::floats(queries, head_dim));
        let (range, whole) = (Partial::new(range, queries, head_dim), Partial::new(whole, queries, head_dim));
        Self { q, scores, decay, range, whole }
    }
}
