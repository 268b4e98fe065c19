//! Packing of activations before a matrix product, into tiles of rows and the type that the micro-kernel multiplies.

use std::marker::PhantomData;

use super::micro_kernel::{Layout, MicroKernel};
use crate::DeviceError;
use crate::cpu::gemm::groups::{Group, GroupTasks};
use crate::cpu::gemm::input::{Input, InputRow};
use crate::cpu::gemm::tile::{TileLimits, Tiling, for_tile};
use crate::cpu::memory::Shared;
use crate::cpu::quant::block_float::{BFP_BLOCK, BFP_BLOCK_STEPS, BfpBlock};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;

/// Minimum number of elements per task, below which waking another thread costs more than it saves.
const TASK_ELEMENTS: usize = 8 << 10;

/// Prefetch distance within a row, in elements. Prefetches are needed because a tile has more rows than a hardware
/// prefetcher can follow.
const AHEAD: usize = 128;

/// Packs the activations of all rows.
#[derive(Clone, Copy)]
pub(super) struct PackActivations<'a> {
    pub(super) x: Input<'a>,
    pub(super) inputs: usize,
    pub(super) groups: &'a [Group],
    pub(super) limits: TileLimits,
}

impl PackActivations<'_> {
    /// Fills `to` tile by tile. Within a tile, the elements of all rows for one input, or one pair of inputs, are
    /// adjacent. In block floating point, the second half of a tile's memory holds the powers of two of its BFP blocks.
    /// If the number of inputs is odd, one zero pads each row.
    pub(super) fn run<K: MicroKernel>(
        self,
        path: Path,
        (pool, tasks): (&mut ThreadPool, &mut GroupTasks),
        to: &Shared<'_, f32>,
    ) -> Result<(), DeviceError> {
        // Returns the tiles of a group, and the number of inputs that a task packs. A task packs inputs of one tile.
        let divided = |group: Group| {
            let tiling = self.limits.divide(group.rows);
            (tiling, (TASK_ELEMENTS / tiling.tile(0).1.max(1)).next_multiple_of(BFP_BLOCK))
        };
        let count = |group: Group| {
            let (tiling, share) = divided(group);
            tiling.tiles * self.inputs.div_ceil(share)
        };
        tasks.run(pool, self.groups, count, |group, task, _| {
            let (tiling, share) = divided(group);
            let shares = self.inputs.div_ceil(share);
            let first = task % shares * share;
            let inputs = (first, self.inputs.min(first + share));
            let tile = tiling.tile(task / shares);
            K::run(path, PackInputs::<K::Packing> { all: self, tile, inputs, to, layout: PhantomData });
        })
    }

    /// Fills `to` as [`Self::run`] does, on the calling thread. The rows are one tile, and the first of them is row 0.
    pub(super) fn only_tile<K: MicroKernel>(self, path: Path, tiling: Tiling, to: &mut [f32]) {
        let (tile, inputs, to) = (tiling.tile(0), (0, self.inputs), &Shared::new(to));
        K::run(path, PackInputs::<K::Packing> { all: self, tile, inputs, to, layout: PhantomData });
    }
}

/// A task that packs inputs `inputs.0..inputs.1` of one tile's rows.
struct PackInputs<'a, 'b, L> {
    all: PackActivations<'a>,
    /// The tile's first row and number of rows.
    tile: (usize, usize),
    inputs: (usize, usize),
    to: &'b Shared<'b, f32>,
    layout: PhantomData<L>,
}

impl<L: PackRows> Op for PackInputs<'_, '_, L> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for_tile!(single S, self.tile.1, self.pack::<S, R, P>(s));
    }
}

impl<L: PackRows> PackInputs<'_, '_, L> {
    /// Packs a tile of `R` rows. `_P` is the number of panels that [`for_tile`] assigns to `R`.
    #[inline(always)]
    fn pack<S: Simd, const R: usize, const _P: usize>(&self, s: S) {
        let (PackActivations { x, inputs, .. }, first_row) = (self.all, self.tile.0);
        let padded = inputs.next_multiple_of(2);
        let (first, end) = self.inputs;
        let end = if end == inputs { padded } else { end };
        let start = first_row * padded + first / 2 * R * L::LAYOUT.step_words();
        let len = (end - first) / 2 * R * L::LAYOUT.step_words();
        // SAFETY: tasks write disjoint ranges of words.
        let to = unsafe { self.to.slice_mut(start, len) };
        let rows = x.rows::<S, R>(s, first_row, inputs);
        let powers = if const { matches!(L::LAYOUT, Layout::BlockFloat) } {
            let start = first_row * padded + (padded / 2 + first / BFP_BLOCK) * R;
            // SAFETY: tasks write disjoint ranges of powers. The second half of the tile's memory has room for one
            // power per two inputs, and only one power per BFP block is written.
            unsafe { self.to.slice_mut(start, (end - first).div_ceil(BFP_BLOCK) * R) }
        } else {
            &mut []
        };
        L::pack(s, &rows, first, to, powers);
    }
}

/// Packs rows in one [`Layout`]. Each layout has a type, so that an instruction path compiles only the layouts that it
/// multiplies.
pub(super) trait PackRows {
    const LAYOUT: Layout;

    /// Packs the inputs of `R` rows from input `first` on. `powers` has room for the powers of two of BFP blocks; in
    /// other layouts it is empty.
    fn pack<S: Simd, const R: usize>(
        s: S,
        rows: &[InputRow<'_>; R],
        first: usize,
        to: &mut [f32],
        powers: &mut [f32],
    );
}

/// Packs f32 elements.
pub(super) struct PackPlain;

impl PackRows for PackPlain {
    const LAYOUT: Layout = Layout::Plain;

    #[inline(always)]
    fn pack<S: Simd, const R: usize>(
        s: S,
        rows: &[InputRow<'_>; R],
        first: usize,
        to: &mut [f32],
        _: &mut [f32],
    ) {
        for (block, to) in to.chunks_mut(LANES * R).enumerate() {
            let mut lanes = [[0.0f32; LANES]; R];
            for (row, lanes) in rows.iter().zip(&mut lanes) {
                s.store_some(lanes, row.load(s, first + block * LANES));
            }
            for (input, to) in to.chunks_exact_mut(R).enumerate() {
                to.iter_mut().zip(&lanes).for_each(|(to, lanes)| *to = lanes[input]);
            }
        }
    }
}

/// Packs pairs of bfloat16.
pub(super) struct PackPairs;

impl PackRows for PackPairs {
    const LAYOUT: Layout = Layout::Pairs;

    #[inline(always)]
    fn pack<S: Simd, const R: usize>(
        s: S,
        rows: &[InputRow<'_>; R],
        first: usize,
        to: &mut [f32],
        _: &mut [f32],
    ) {
        for (block, to) in to.chunks_mut(LANES * R).enumerate() {
            let from = first + block * 2 * LANES;
            let mut pairs = [s.splat_i(0); R];
            for (row, pairs) in rows.iter().zip(&mut pairs) {
                row.prefetch(s, from + AHEAD);
                row.prefetch(s, from + AHEAD + LANES);
                *pairs = s.pairs_bf16(row.load(s, from), row.load(s, from + LANES));
            }
            store_words(s, &pairs, to);
        }
    }
}

/// Packs the integers of BFP blocks, and the blocks' powers of two.
pub(super) struct PackBfpBlocks;

impl PackRows for PackBfpBlocks {
    const LAYOUT: Layout = Layout::BlockFloat;

    #[inline(always)]
    fn pack<S: Simd, const R: usize>(
        s: S,
        rows: &[InputRow<'_>; R],
        first: usize,
        to: &mut [f32],
        powers: &mut [f32],
    ) {
        for (index, (to, powers)) in
            to.chunks_mut(BFP_BLOCK_STEPS * R).zip(powers.chunks_exact_mut(R)).enumerate()
        {
            let from = first + index * BFP_BLOCK;
            let (mut low, mut high) = ([s.splat_i(0); R], [s.splat_i(0); R]);
            for (r, (row, power)) in rows.iter().zip(powers).enumerate() {
                let mut x = [s.splat(0.0); BFP_BLOCK / LANES];
                for (block, x) in x.iter_mut().enumerate() {
                    row.prefetch(s, from + AHEAD + block * LANES);
                    *x = row.load(s, from + block * LANES);
                }
                let block = BfpBlock::new(s, &x);
                *power = block.power;
                (low[r], high[r]) = (block.pairs[0], block.pairs[1]);
            }
            let (to_low, to_high) = to.split_at_mut(to.len().min(LANES * R));
            store_words(s, &low, to_low);
            store_words(s, &high, to_high);
        }
    }
}

/// Stores sixteen words of each of `R` rows as `[16][R]`, truncated to the length of `to`.
#[inline(always)]
fn store_words<S: Simd, const R: usize>(s: S, rows: &[S::I; R], to: &mut [f32]) {
    if to.len() >= LANES * R {
        // SAFETY: `to` has room for `16 * R` words.
        return unsafe { s.store_transposed(rows, to.as_mut_ptr().cast()) };
    }
    let mut words = [[0u32; R]; LANES];
    // SAFETY: `words` has room for `16 * R` words.
    unsafe { s.store_transposed(rows, words.as_mut_ptr().cast()) };
    for (to, word) in to.iter_mut().zip(words.as_flattened()) {
        *to = f32::from_bits(*word);
    }
}
