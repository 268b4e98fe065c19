//! The arithmetic of attention: what differs between f32 and dot products of bfloat16.

use super::{Seen, Visible};
use crate::cpu::memory::Element;
use crate::cpu::memory::format::STEP;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Panels of sixteen keys in the largest block.
pub(super) const MOST_PANELS: usize = 8;

/// The arithmetic of attention over pages of one type.
pub(super) trait Kernel: Copy + Send + Sync + 'static {
    /// An element of a page.
    type Raw: Element;
    /// Keys of a block: at most `16 * MOST_PANELS`, and a divisor of [`super::RANGE`].
    const BLOCK: usize;

    /// Heads that a piece of few queries takes together, at most. One where arithmetic binds and not memory.
    const MOST_HEADS: usize;

    /// Runs `op` with all instructions that the kernel needs.
    fn run<O: Op>(path: Path, op: O) -> O::Output;

    /// Lays out the queries of a tile, multiplied by `scale`. `q` is as long as all of them together.
    fn lay_out_queries<S: Simd, const R: usize>(s: S, queries: &[&[f32]; R], scale: f32, q: &mut [f32]);

    /// Computes the scores of `R` queries with the keys of panels `panels.0 .. panels.1`, `P` panels at a time. `scores` is
    /// `[R, BLOCK]`.
    fn scores<S: Simd, const R: usize, const P: usize>(
        s: S,
        q: &[f32],
        block: &Block<Self::Raw>,
        panels: (usize, usize),
        scores: &mut [f32],
    );

    /// Turns a query's scores into weights, `2^(score - largest)`, and gives their sum, lane by lane. `scores` is as long as
    /// a block; those in panels that the query sees in part are -infinity where it does not. `any` is what some query of the
    /// tile sees.
    fn weights<S: Simd>(s: S, scores: &mut [f32], visible: Visible, any: Visible, largest: f32) -> S::F;

    /// Adds the values of a block, weighted, to the sums of a tile's queries.
    fn add_values<S: Simd>(s: S, values: Values<'_, Self::Raw>);
}

/// Addresses of a block's panels, as far as the tile sees them, and of the next block's, to prefetch: after a piece's last
/// block that is the first of the next piece, and the same block again where there is none.
pub(super) struct Block<T> {
    pub(super) keys: [*const T; MOST_PANELS],
    pub(super) values: [*const T; MOST_PANELS],
    pub(super) next_keys: [*const T; MOST_PANELS],
    pub(super) next_values: [*const T; MOST_PANELS],
    pub(super) ask: Ask,
}

/// The memory to prefetch while a step of a panel's scores is computed.
#[derive(Clone, Copy)]
pub(super) enum Ask {
    /// The step of the next panel of keys.
    Keys,
    /// Keys and values of the next panel, one after the other as they lie in memory: two steps.
    Both,
    /// The step of the next panel of keys, and of that of values, which begins so many elements after it.
    Apart(usize),
}

impl Ask {
    /// Prefetches what belongs to step `step`; the next panel of keys begins at `keys`.
    #[inline(always)]
    pub(super) fn step<S: Simd, T>(self, s: S, keys: *const T, step: usize) {
        match self {
            Self::Keys => prefetch(s, keys.wrapping_add(step * STEP)),
            Self::Both => {
                prefetch(s, keys.wrapping_add(2 * step * STEP));
                prefetch(s, keys.wrapping_add((2 * step + 1) * STEP));
            }
            Self::Apart(values) => {
                prefetch(s, keys.wrapping_add(step * STEP));
                prefetch(s, keys.wrapping_add(values + step * STEP));
            }
        }
    }
}

/// The operands of [`Kernel::add_values`].
pub(super) struct Values<'t, T> {
    pub(super) block: &'t Block<T>,
    pub(super) seen: Seen,
    /// The keys that each query sees.
    pub(super) visible: &'t [Visible; LANES],
    pub(super) head_dim: usize,
    /// `[queries, BLOCK]`, as [`Kernel::weights`] left them.
    pub(super) weights: &'t [f32],
    /// Factors of each query's earlier sums.
    pub(super) decay: &'t [f32],
    /// `[queries, head_dim]`.
    pub(super) sums: &'t mut [f32],
}

/// Prefetches one step of a panel. It is only a hint, so any address will do.
#[inline(always)]
pub(super) fn prefetch<S: Simd, T>(s: S, step: *const T) {
    const LINE: usize = 64;
    for line in 0..(STEP * size_of::<T>()).div_ceil(LINE) {
        s.prefetch(step.cast::<u8>().wrapping_add(line * LINE));
    }
}
