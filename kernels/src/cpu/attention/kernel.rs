//! The arithmetic of attention, which differs between f32 and dot products of bfloat16.

use super::sight::{Seen, Visible};
use crate::cpu::memory::Element;
use crate::cpu::memory::format::{FromFp8, STEP};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Number of panels of sixteen keys in the largest block.
pub(super) const MOST_PANELS: usize = 8;

/// The arithmetic of attention over pages of one type.
pub(super) trait Kernel: Copy + Send + Sync + 'static {
    /// The type of a page's elements in memory.
    type Raw: Element;
    /// Number of keys per block: at most `16 * MOST_PANELS`, and a divisor of [`RANGE`](super::plan::RANGE).
    const BLOCK: usize;

    /// Maximum number of kv heads per piece (a task of the [`Plan`](super::plan::Plan)) if the piece has few queries.
    /// The number is 1 if the kernel is bound by arithmetic. The second-level cache must hold two blocks of each of
    /// these heads: the current block and the next one, which is prefetched.
    const MOST_HEADS: usize;

    /// Elements to which the kernel's pages in fp8 are converted; `None` if it computes over no such pages.
    const FROM_FP8: Option<FromFp8>;

    /// Runs `op` with all instructions that the kernel needs.
    fn run<O: Op>(path: Path, op: O) -> O::Output;

    /// Writes the queries of a tile, multiplied by `scale`, to `q`, which is as long as all queries together.
    fn lay_out_queries<S: Simd, const R: usize>(s: S, queries: &[&[f32]; R], scale: f32, q: &mut [f32]);

    /// Computes the scores of `R` queries with the keys of panels `panels.0 .. panels.1`, `P` panels at a time.
    /// `scores` is `[R, BLOCK]`.
    fn scores<S: Simd, const R: usize, const P: usize>(
        s: S,
        q: &[f32],
        block: &Block<Self::Raw>,
        panels: (usize, usize),
        scores: &mut [f32],
    );

    /// Turns a query's scores into weights, `2^(score - largest)`, and returns the sum of the weights, lane by lane.
    /// `scores` has one score per key of a block of panels. `visible` is the range of keys that this query sees, and
    /// `any` the range that at least one query of the tile sees. In a panel that this query sees only in part, the
    /// caller has set the scores of the hidden keys to -infinity.
    fn weights<S: Simd>(s: S, scores: &mut [f32], visible: Visible, any: Visible, largest: f32) -> S::F;

    /// Adds the weighted values of a block to the sums of a tile's queries.
    fn add_values<S: Simd>(s: S, values: Values<'_, Self::Raw>);
}

/// Addresses of a block's panels for one kv head, and addresses to prefetch for later blocks. Only the panels that the
/// tile sees are read.
pub(super) struct Block<T> {
    pub(super) keys: [*const T; MOST_PANELS],
    pub(super) values: [*const T; MOST_PANELS],
    /// Per panel, the address to prefetch while the panel's scores are computed. A prefetch is as long as a panel of
    /// keys.
    pub(super) next_keys: [*const T; MOST_PANELS],
    /// Per panel, the address to prefetch while the panel's values are added. A prefetch is as long as a panel of keys.
    pub(super) next_values: [*const T; MOST_PANELS],
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
    /// Per query, the factor by which the sums of earlier blocks are multiplied.
    pub(super) decay: &'t [f32],
    /// `[queries, head_dim]`.
    pub(super) sums: &'t mut [f32],
}

/// Prefetches one step of a panel. The address may be out of range.
#[inline(always)]
pub(super) fn prefetch<S: Simd, T>(s: S, step: *const T) {
    const LINE: usize = 64;
    for line in 0..(STEP * size_of::<T>()).div_ceil(LINE) {
        s.prefetch_far(step.cast::<u8>().wrapping_add(line * LINE));
    }
}
