//! Attention in f32. Keys and values are widened as they are read.

mod panel;
mod scores;
mod values;

use std::marker::PhantomData;

use self::scores::Scores;
use self::values::AddValues;
use super::kernel::{Block, Kernel, Values};
use super::sight::Visible;
use super::softmax::weights_of_panel;
use crate::cpu::gemm::tile::for_tile;
use crate::cpu::memory::format::{Format, FromFp8};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Attention in f32 over pages of format `W`.
#[derive(Clone, Copy)]
pub(super) struct Widened<W: Format>(PhantomData<W>);

/// Number of keys per block.
const BLOCK: usize = 64;

impl<W: Format> Kernel for Widened<W> {
    type Raw = W::Raw;
    const BLOCK: usize = BLOCK;
    const MOST_HEADS: usize = 1;
    const FROM_FP8: Option<FromFp8> = W::FROM_FP8;

    #[inline(always)]
    fn run<O: Op>(path: Path, op: O) -> O::Output {
        path.run(op)
    }

    #[inline(always)]
    fn lay_out_queries<S: Simd, const R: usize>(_: S, queries: &[&[f32]; R], scale: f32, q: &mut [f32]) {
        for (to, query) in q.chunks_exact_mut(q.len() / R).zip(queries) {
            to.iter_mut().zip(*query).for_each(|(to, q)| *to = q * scale);
        }
    }

    #[inline(always)]
    fn scores<S: Simd, const R: usize, const P: usize>(
        s: S,
        q: &[f32],
        block: &Block<W::Raw>,
        panels: (usize, usize),
        scores: &mut [f32],
    ) {
        s.call(Scores::<W, R, P> { q, block, panels, scores });
    }

    #[inline(always)]
    fn weights<S: Simd>(s: S, scores: &mut [f32], visible: Visible, _: Visible, largest: f32) -> S::F {
        let (mut sum, largest) = (s.splat(0.0), s.splat(largest));
        // Usually the query sees the whole block. This case has its own loop, because the compiler can unroll it.
        if (visible.first, visible.end) == (0, BLOCK) {
            for panel in 0..BLOCK / LANES {
                weights_in_place(s, &mut scores[panel * LANES..], largest, &mut sum);
            }
            return sum;
        }
        for panel in visible.first / LANES..visible.end.div_ceil(LANES) {
            weights_in_place(s, &mut scores[panel * LANES..], largest, &mut sum);
        }
        sum
    }

    /// Keys that all queries see (`common`) are read once for all queries. Each query first adds its own keys before
    /// `common`, then all queries add `common`, and last each query adds its own keys after `common`. If `common` is
    /// empty, each query adds all its keys alone.
    #[inline(always)]
    fn add_values<S: Simd>(s: S, values: Values<'_, W::Raw>) {
        let Values { block, seen, visible, head_dim, weights, decay, sums } = values;
        let (any, common) = (seen.any, seen.common);
        let shared = common.first < common.end;
        let mut decays = [1.0; LANES];
        decays[..decay.len()].copy_from_slice(decay);
        if !shared || any.first < common.first {
            for (query, own) in visible[..decay.len()].iter().enumerate() {
                let end = if shared { common.first } else { own.end };
                if own.first < end {
                    let tile = Tile::<W> { block, head_dim, visible: Visible { first: own.first, end } };
                    tile.add::<S, 1, 4>(s, query, weights, &decays, sums);
                    decays[query] = 1.0;
                }
            }
        }
        if !shared {
            return;
        }
        let rows = decay.len();
        let tile = Tile::<W> { block, head_dim, visible: common };
        for_tile!(S, rows, tile.add::<S, R, P>(s, 0, weights, &decays, sums));
        if common.end < any.end {
            for (query, own) in visible[..rows].iter().enumerate() {
                let end = own.end;
                if common.end < end {
                    let tile = Tile::<W> { block, head_dim, visible: Visible { first: common.end, end } };
                    tile.add::<S, 1, 4>(s, query, weights, &[1.0; LANES], sums);
                }
            }
        }
    }
}

/// Replaces the first sixteen scores with weights, and adds the weights to `sum`.
#[inline(always)]
fn weights_in_place<S: Simd>(s: S, scores: &mut [f32], largest: S::F, sum: &mut S::F) {
    let weights = weights_of_panel(s, scores, largest);
    s.store_some(&mut scores[..LANES], weights);
    *sum = s.add(*sum, weights);
}

/// A range of keys of a block, all of which are visible to the queries that add them.
struct Tile<'t, W: Format> {
    block: &'t Block<W::Raw>,
    head_dim: usize,
    visible: Visible,
}

impl<W: Format> Tile<'_, W> {
    /// Adds the weighted values of the keys to the sums of `R` queries from `first` on.
    #[inline(always)]
    fn add<S: Simd, const R: usize, const P: usize>(
        &self,
        s: S,
        first: usize,
        weights: &[f32],
        decay: &[f32; LANES],
        sums: &mut [f32],
    ) {
        let Self { block, head_dim, visible } = *self;
        let weights = &weights[first * BLOCK..(first + R) * BLOCK];
        let decay = &decay[first..first + R];
        let sums = &mut sums[first * head_dim..(first + R) * head_dim];
        s.call(AddValues::<W, R, P> { block, visible, head_dim, weights, decay, sums });
    }
}
