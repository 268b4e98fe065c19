//! Attention by dot products of bfloat16. Queries and weights are rounded to bfloat16, like the keys and values in
//! their pages. Sums and the softmax are in f32.
//!
//! A score is one chain of dot products over pairs of the head's elements in order. Each element of a weighted sum is
//! first multiplied by the block's decay. Then pairs of keys (an even position and the odd one after it) are added in
//! order. If a query sees only one key of a pair, the other key counts as zero, because its value may never have been
//! written. A query's bits therefore depend on its own position and not on its tile.

mod values;

use self::values::{AddOwn, AddShared};
use super::kernel::{Block, Kernel, MOST_PANELS, Values, prefetch};
use super::sight::{Seen, Visible};
use super::softmax::weights_of_panel;
use crate::cpu::gemm::tile::{dot_product_on, for_tile};
use crate::cpu::memory::format::{FromFp8, STEP};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Attention over bfloat16 pages, computed with bfloat16 dot products.
#[derive(Clone, Copy)]
pub(super) struct Dots;

impl Kernel for Dots {
    type Raw = u16;
    const BLOCK: usize = 128;
    const MOST_HEADS: usize = 2;
    const FROM_FP8: Option<FromFp8> = Some(FromFp8::Bf16);

    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run_dots(op)
    }

    #[inline(always)]
    fn lay_out_queries<S: Simd, const R: usize>(s: S, queries: &[&[f32]; R], scale: f32, q: &mut [f32]) {
        s.call(LayOutQueries { queries, scale, q });
    }

    #[inline(always)]
    fn scores<S: Simd, const R: usize, const P: usize>(
        s: S,
        q: &[f32],
        block: &Block<u16>,
        panels: (usize, usize),
        scores: &mut [f32],
    ) {
        s.call(Scores::<R, P> { q, block, panels, scores });
    }

    #[inline(always)]
    fn weights<S: Simd>(s: S, scores: &mut [f32], visible: Visible, any: Visible, largest: f32) -> S::F {
        let (mut sum, largest) = (s.splat(0.0), s.splat(largest));
        // Usually the query sees the whole block. This case has its own loop, because the compiler can unroll it.
        if (visible.first, visible.end) == (0, Self::BLOCK) {
            for pair in 0..Self::BLOCK / (2 * LANES) {
                let low = weights_of_panel(s, &scores[2 * pair * LANES..], largest);
                let high = weights_of_panel(s, &scores[(2 * pair + 1) * LANES..], largest);
                sum = s.add(s.add(sum, low), high);
                store_pairs(s, scores, pair, low, high);
            }
            return sum;
        }
        let seen = visible.first / LANES..visible.end.div_ceil(LANES);
        for pair in any.first / (2 * LANES)..any.end.div_ceil(2 * LANES) {
            let mut weights = [s.splat(0.0); 2];
            for (half, weights) in weights.iter_mut().enumerate() {
                if seen.contains(&(2 * pair + half)) {
                    *weights = weights_of_panel(s, &scores[(2 * pair + half) * LANES..], largest);
                    sum = s.add(sum, *weights);
                }
            }
            store_pairs(s, scores, pair, weights[0], weights[1]);
        }
        sum
    }

    #[inline(always)]
    fn add_values<S: Simd>(s: S, mut values: Values<'_, u16>) {
        const ONES: [f32; LANES] = [1.0; LANES];
        let rows = values.decay.len();
        let mut decay = ONES;
        decay[..rows].copy_from_slice(values.decay);
        let Pairs { any, shared } = Pairs::of(values.seen);
        if any.0 < shared.0 {
            s.call(AddOwn { values: &mut values, pairs: (any.0, shared.0), decay: &decay });
            decay = ONES;
        }
        if shared.0 < shared.1 {
            let (values, pairs, decay) = (&mut values, shared, &decay);
            for_tile!(S, rows, s.call(AddShared::<R, P> { values, pairs, decay }));
        }
        if shared.1 < any.1 {
            if shared.0 < shared.1 {
                decay = ONES;
            }
            s.call(AddOwn { values: &mut values, pairs: (shared.1, any.1), decay: &decay });
        }
    }
}

/// Stores the weights of two panels as pairs of bfloat16, packed from the start of `scores` on. The pairs overwrite
/// scores that have been read already.
#[inline(always)]
fn store_pairs<S: Simd>(s: S, scores: &mut [f32], pair: usize, low: S::F, high: S::F) {
    let words = &mut scores[pair * LANES..(pair + 1) * LANES];
    // SAFETY: `words` has room for sixteen words.
    unsafe { s.store_i(words.as_mut_ptr().cast(), s.pairs_bf16(low, high)) }
}

/// Lays out `R` queries as pairs of bfloat16, `[head_dim / 2][R]`.
struct LayOutQueries<'t, const R: usize> {
    queries: &'t [&'t [f32]; R],
    scale: f32,
    q: &'t mut [f32],
}

impl<const R: usize> Op for LayOutQueries<'_, R> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { queries, scale, q } = self;
        let (head_dim, scale) = (q.len() / R, s.splat(scale));
        for (block, to) in q[..head_dim / 2 * R].chunks_mut(LANES * R).enumerate() {
            let mut words = [s.splat_i(0); R];
            for (query, words) in queries.iter().zip(&mut words) {
                let from = &query[block * 2 * LANES..head_dim.min((block + 1) * 2 * LANES)];
                let low = s.mul(s.load_some(from, 0.0), scale);
                let high = s.mul(s.load_some(from.get(LANES..).unwrap_or(&[]), 0.0), scale);
                *words = s.pairs_bf16(low, high);
            }
            if to.len() == LANES * R {
                // SAFETY: `to` has room for sixteen words of each query.
                unsafe { s.store_transposed(&words, to.as_mut_ptr().cast()) };
                continue;
            }
            // This is the last block of a head whose size is an odd multiple of sixteen, so the block is half as long
            // as others.
            let mut whole = [[0u32; R]; LANES];
            // SAFETY: `whole` has room for sixteen words of each query.
            unsafe { s.store_transposed(&words, whole.as_mut_ptr().cast()) };
            to.iter_mut().zip(whole.as_flattened()).for_each(|(to, word)| *to = f32::from_bits(*word));
        }
    }
}

/// The operands for the scores of `R` queries with the keys of a block, computed `P` panels at a time.
struct Scores<'t, const R: usize, const P: usize> {
    /// `[head_dim / 2][R]` pairs.
    q: &'t [f32],
    block: &'t Block<u16>,
    panels: (usize, usize),
    /// `[R, BLOCK]`.
    scores: &'t mut [f32],
}

impl<const R: usize, const P: usize> Op for Scores<'_, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (mut panel, end) = self.panels;
        // One or two queries need eight panels at a time for enough independent chains of dot products.
        while const { R <= 2 } && panel + MOST_PANELS <= end {
            self.panels::<S, MOST_PANELS>(s, panel);
            panel += MOST_PANELS;
        }
        while panel + P <= end {
            self.panels::<S, P>(s, panel);
            panel += P;
        }
        while const { P > 2 } && panel + 2 <= end {
            self.panels::<S, 2>(s, panel);
            panel += 2;
        }
        while panel < end {
            self.panels::<S, 1>(s, panel);
            panel += 1;
        }
    }
}

impl<const R: usize, const P: usize> Scores<'_, R, P> {
    #[inline(always)]
    fn panels<S: Simd, const N: usize>(&mut self, s: S, panel: usize) {
        let head_dim = self.q.len() / R;
        assert!(panel + N <= MOST_PANELS && head_dim * R == self.q.len());
        let (mut keys, mut next) = ([self.block.keys[0]; N], [self.block.next_keys[0]; N]);
        keys.copy_from_slice(&self.block.keys[panel..panel + N]);
        next.copy_from_slice(&self.block.next_keys[panel..panel + N]);
        let ask = |p: usize, step: usize| prefetch(s, next[p].wrapping_add(step * STEP));
        let zeros = [[s.splat(0.0); N]; R];
        // SAFETY: `Panels::of_head` has checked that the visible panels are in bounds for all elements of a head. `q`
        // holds all pairs of elements of the `R` queries.
        let sums =
            unsafe { dot_product_on::<S, R, N>(s, zeros, self.q.as_ptr().cast(), keys, head_dim / 2, ask) };
        for (sums, scores) in sums.iter().zip(self.scores.chunks_exact_mut(Dots::BLOCK)) {
            for (p, &sum) in sums.iter().enumerate() {
                s.store_some(&mut scores[(panel + p) * LANES..(panel + p + 1) * LANES], sum);
            }
        }
    }
}

/// Two ranges of pairs of keys in a block. In each pair of `any`, at least one query of the tile sees a key. In each
/// pair of `shared`, all queries see both keys.
#[derive(Clone, Copy)]
struct Pairs {
    any: (usize, usize),
    shared: (usize, usize),
}

impl Pairs {
    #[inline(always)]
    fn of(seen: Seen) -> Self {
        let any = (seen.any.first / 2, seen.any.end.div_ceil(2));
        let first = seen.common.first.div_ceil(2).clamp(any.0, any.1);
        Self { any, shared: (first, (seen.common.end / 2).clamp(first, any.1)) }
    }
}

/// Returns a 32-bit mask for a pair of keys. The low half is all ones if the query sees the even key, and the high half
/// if it sees the odd key.
#[inline(always)]
fn mask(visible: Visible, pair: usize) -> u32 {
    let sees = |key: usize| visible.first <= key && key < visible.end;
    let half = |key: usize, bits: u32| if sees(key) { bits } else { 0 };
    half(2 * pair, 0xffff) | half(2 * pair + 1, 0xffff_0000)
}
