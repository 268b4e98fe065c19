//! Products of several tiles of rows, in blocks that fit the caches.
//!
//! A *block* is a range of inputs of one or two panels. All tiles of a *band* of rows are multiplied by a block while
//! the block is in the cache. Meanwhile, the next block is prefetched. Sums are kept in memory between blocks, so that
//! each output is still one chain of additions over all inputs in order.

use super::epilogue::Epilogue;
use super::micro_kernel::{Data, MicroKernel};
use super::work::Work;
use crate::cpu::gemm::tile::{Tiling, for_tile};
use crate::cpu::memory::format::STEP;
use crate::cpu::quant::block_float::SUPERBLOCK_STEPS;
use crate::cpu::simd::{LANES, Op, Simd};

/// Number of steps per block. A block exceeds the first-level cache: weights and inputs stream well from the second
/// level, and with shorter blocks each tile would load and store its sums more often.
const BLOCK_STEPS: usize = 512;
const _: () = assert!(BLOCK_STEPS.is_multiple_of(SUPERBLOCK_STEPS));
/// Maximum number of rows per band. More rows mean fewer reads of the weights, but the inputs of a block must fit the
/// second-level cache: 1 MiB or more on machines with AVX-512, half of that on other machines.
const fn band_rows<S: Simd>() -> usize {
    if two_panels::<S>() { MOST_BAND_ROWS } else { 48 }
}
/// The largest value of [`band_rows`].
const MOST_BAND_ROWS: usize = 168;
/// True if the registers can hold the sums of the largest tile with two panels.
const fn two_panels<S: Simd>() -> bool {
    S::TILE_SUMS >= 2 * S::TILE_ROWS
}
/// Maximum number of panels per task. For each of these panels, a thread keeps the sums of a band.
pub(super) const TASK_PANELS: usize = 8;

/// Number of floats per thread for the sums of a band (a range of tiles).
pub(super) const SUMS: usize = TASK_PANELS * MOST_BAND_ROWS * LANES;

/// Computes the number of bands into which the tiles of a tiling are divided.
pub(super) struct Bands(pub(super) Tiling);

impl Op for Bands {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        let whole = const { if two_panels::<S>() { band_rows::<S>() / S::TILE_ROWS } else { usize::MAX } };
        self.0.tiles.div_ceil(whole)
    }
}

/// One task: the matrix product of a range of tiles and a range of panels.
pub(super) struct Blocked<'a, K: MicroKernel> {
    pub(super) work: Work<'a>,
    pub(super) data: Data<'a, K>,
    /// Panels `panels.0 .. panels.1`, at most [`TASK_PANELS`] of them.
    pub(super) panels: (usize, usize),
    /// Tiles `tiles.0 .. tiles.1`.
    pub(super) tiles: (usize, usize),
    /// The thread's scratch memory for sums: [`SUMS`] floats.
    pub(super) sums: &'a mut [f32],
}

impl<K: MicroKernel> Op for Blocked<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let steps = self.work.matrix.shape.steps();
        let tiling = self.work.tiling;
        let mut first = self.tiles.0;
        while first < self.tiles.1 {
            let last = band_end::<S>(tiling, first, self.tiles.1);
            let band = Band {
                tiles: (first, last),
                first_row: tiling.tile(first).0,
                end_row: tiling.end(last),
                stride: const { band_rows::<S>() * LANES },
            };
            for block in (0..steps).step_by(BLOCK_STEPS) {
                let mut panel = self.panels.0;
                while panel < self.panels.1 {
                    if const { two_panels::<S>() } && panel + 2 <= self.panels.1 {
                        self.block::<S, 2>(s, band, panel, block);
                        panel += 2;
                    } else {
                        self.block::<S, 1>(s, band, panel, block);
                        panel += 1;
                    }
                }
            }
            self.finish(s, band);
            first = last;
        }
    }
}

/// A range of tiles whose activations for the inputs of one block fit the second-level cache.
#[derive(Clone, Copy)]
struct Band {
    tiles: (usize, usize),
    first_row: usize,
    end_row: usize,
    /// Number of floats from the sums of one panel to the sums of the next.
    stride: usize,
}

/// Returns the index after the last tile of the band that starts with tile `first`. The index is at most `end`.
#[inline(always)]
fn band_end<S: Simd>(tiling: Tiling, first: usize, end: usize) -> usize {
    let fits = |tile: usize| tiling.end(tile + 1) - tiling.tile(first).0 <= const { band_rows::<S>() };
    (first + 1..end).find(|&tile| !fits(tile)).unwrap_or(end)
}

impl<K: MicroKernel> Blocked<'_, K> {
    /// Multiplies a band by one block. The block is the steps from `block` on of the `N` panels from `panel` on.
    #[inline(always)]
    fn block<S: Simd, const N: usize>(&mut self, s: S, band: Band, panel: usize, block: usize) {
        let Self { work, data, panels, .. } = *self;
        let steps = work.matrix.shape.steps();
        let length = BLOCK_STEPS.min(steps - block);
        let next = if panel + N < panels.1 {
            (panel + N, block)
        } else if block + BLOCK_STEPS < steps {
            (panels.0, block + BLOCK_STEPS)
        } else if band.tiles.1 < self.tiles.1 {
            (panels.0, 0)
        } else {
            // The next block is the first one after this task's panels, because the thread usually runs the next task,
            // too.
            (panels.1, 0)
        };
        let mut weights = [data.elements.as_ptr(); N];
        let mut next_weights = [data.address(next.0, next.1); N];
        for p in 0..N {
            weights[p] = data.steps(panel + p, block, length);
            next_weights[p] = data.address(next.0 + p, next.1);
        }
        let sums = &mut self.sums[(panel - panels.0) * band.stride..];
        for tile in band.tiles.0..band.tiles.1 {
            let (row, rows) = work.tiling.tile(tile);
            let ask = Ask::new::<K>(next_weights, length, (tile - band.tiles.0, band.tiles));
            let sums = &mut sums[(row - band.first_row) * LANES..];
            let stride = band.stride;
            for_tile!(
                S,
                rows,
                s.call(Tile::<K, R, P, N> { work, row, panel, block, length, weights, ask, sums, stride })
            );
        }
    }

    /// Applies the epilogue to the sums of a band, row by row, so that stores cover consecutive cache lines.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, band: Band) {
        let Self { work, panels, sums, .. } = self;
        let sums = |panel: usize, row: usize| {
            let at = (panel - panels.0) * band.stride + (row - band.first_row) * LANES;
            let Some(sums) = sums[at..].first_chunk::<LANES>() else { unreachable!("sums of a band") };
            sums
        };
        for row in band.first_row..band.end_row {
            if let Epilogue::Gated(limit) = work.epilogue {
                for pair in (panels.0..panels.1).step_by(2) {
                    work.gate(s, (row, pair), sums(pair, row), sums(pair + 1, row), limit);
                }
            } else {
                for panel in panels.0..panels.1 {
                    work.finish(s, row, panel, s.load_some(sums(panel, row), 0.0));
                }
            }
        }
    }
}

/// The share of the next block that a tile prefetches. The next block is assumed to be as long as the current one.
#[derive(Clone, Copy)]
struct Ask<const N: usize> {
    start: [*const u8; N],
    /// Number of bytes between the addresses that are prefetched for successive lines.
    stride: usize,
}

impl<const N: usize> Ask<N> {
    /// Returns the share of one tile of the band `tiles.0..tiles.1`. `index` is the tile's index within the band.
    #[inline(always)]
    fn new<K: MicroKernel>(
        mut start: [*const u8; N],
        steps: usize,
        (index, tiles): (usize, (usize, usize)),
    ) -> Self {
        let (lines, tiles) = (K::lines(steps), tiles.1 - tiles.0);
        let bytes = lines * STEP * size_of::<K::Raw>();
        for start in &mut start {
            *start = start.wrapping_add(index * bytes / tiles);
        }
        Self { start, stride: bytes.div_ceil(tiles * lines) }
    }
}

/// The matrix product of a tile of `R` rows and a block of `N` panels. `_P` is the number of panels that [`for_tile`]
/// assigns to `R`.
struct Tile<'a, K: MicroKernel, const R: usize, const _P: usize, const N: usize> {
    work: Work<'a>,
    row: usize,
    /// The block's first panel.
    panel: usize,
    /// The block's first step.
    block: usize,
    /// Number of steps in the block.
    length: usize,
    /// Addresses of the block's panels.
    weights: [*const K::Raw; N],
    ask: Ask<N>,
    /// Sums from the tile's first row and the block's first panel on, `[row][16]`. The next panel's sums are `stride`
    /// floats further. The first block of inputs starts with zeros and does not read these sums.
    sums: &'a mut [f32],
    stride: usize,
}

impl<K: MicroKernel, const R: usize, const _P: usize, const N: usize> Op for Tile<'_, K, R, _P, N> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, row, panel, block, length, weights, ask, sums: rest, stride } = self;
        if block + length == work.matrix.shape.steps() {
            for r in 0..R {
                (0..N).for_each(|p| work.prefetch_results(s, row + r, panel + p));
            }
        }
        assert!(rest.len() >= (N - 1) * stride + R * LANES);
        let rest = rest.as_mut_ptr();
        let ask = |p: usize, line: usize| K::prefetch_block(s, ask.start[p].wrapping_add(line * ask.stride));
        // SAFETY: the activations are packed, and no task writes to them now. `Blocked::block` took `weights` from
        // `Data::steps`, which checks that `length` steps are readable. `rest` is long enough by the assertion.
        unsafe {
            let mut sums = [[s.splat(0.0); N]; R];
            if block > 0 {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = s.load(rest.add(p * stride + r * LANES));
                    }
                }
            }
            let x = work.inputs::<K, R>(row, block);
            let sums = K::multiply::<S, R, N>(s, sums, x, weights, length, ask);
            for (r, sums) in sums.iter().enumerate() {
                for (p, &sum) in sums.iter().enumerate() {
                    s.store(rest.add(p * stride + r * LANES), sum);
                }
            }
        }
    }
}
