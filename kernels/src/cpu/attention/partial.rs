//! Partial results: attention over a subset of the keys, and the merge of two such results.

use super::softmax::exp2;
use crate::cpu::simd::{LANES, Simd};

/// The softmax state and the unnormalised weighted sum of values of some queries over a subset of their keys.
pub(super) struct Partial<'a> {
    /// Weighted sums of values, `[queries, head_dim]`.
    pub(super) sums: &'a mut [f32],
    /// The largest score of each query, followed by sixteen floats of padding.
    pub(super) largest: &'a mut [f32],
    /// The sum of exponentials of each query: at least 1, or 0 if the query has seen no key.
    pub(super) total: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// Number of floats of a partial result.
    pub(super) fn floats(queries: usize, head_dim: usize) -> usize {
        queries * (head_dim + 2) + LANES
    }

    /// Divides a slice of [`floats`](Self::floats) floats into the arrays of a partial result.
    pub(super) fn new(floats: &'a mut [f32], queries: usize, head_dim: usize) -> Self {
        let (sums, rest) = floats.split_at_mut(queries * head_dim);
        let (largest, total) = rest.split_at_mut(queries + LANES);
        Self { sums, largest, total }
    }

    /// Resets this to the result of queries that have seen no keys.
    pub(super) fn clear(&mut self) {
        self.sums.fill(0.0);
        self.largest.fill(f32::NEG_INFINITY);
        self.total.fill(0.0);
    }

    /// Merges the result of later keys into this one. If a query has seen no key in one of the two results, the merged
    /// result is the query's other result, bit by bit. Without this rule, -infinity would be subtracted from itself if
    /// a query has seen no key at all, and a query's bits would depend on its batch-mates.
    #[inline(always)]
    pub(super) fn merge<S: Simd>(&mut self, s: S, later: &Partial<'_>) {
        let head_dim = self.sums.len() / self.total.len().max(1);
        for query in 0..self.total.len() {
            let sums = &mut self.sums[query * head_dim..(query + 1) * head_dim];
            let later_sums = &later.sums[query * head_dim..(query + 1) * head_dim];
            if later.total[query] == 0.0 {
                continue;
            }
            if self.total[query] == 0.0 {
                sums.copy_from_slice(later_sums);
                (self.largest[query], self.total[query]) = (later.largest[query], later.total[query]);
                continue;
            }
            let (before, after) = (s.splat(self.largest[query]), s.splat(later.largest[query]));
            let largest = s.max(before, after);
            let (decay, share) = (exp2(s, s.sub(before, largest)), exp2(s, s.sub(after, largest)));
            for (sum, later) in sums.chunks_exact_mut(LANES).zip(later_sums.chunks_exact(LANES)) {
                let scaled = s.mul(s.load_some(sum, 0.0), decay);
                s.store_some(sum, s.fma(s.load_some(later, 0.0), share, scaled));
            }
            let scaled = s.mul(s.splat(self.total[query]), decay);
            let total = s.fma(s.splat(later.total[query]), share, scaled);
            self.total[query] = s.largest(total);
            self.largest[query] = s.largest(largest);
        }
    }
}

#[cfg(test)]
mod tests;
