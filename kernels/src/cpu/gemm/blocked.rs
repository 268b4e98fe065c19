//! Products of several tiles of rows: of the operands, as much at a time as the nearest caches hold.
//!
//! A *block* is some inputs of one or two panels. All tiles of a *band* of rows meet it while it is near, and meanwhile ask
//! for the block that comes next. Their sums rest between blocks, so that the chain of each output is what it would be
//! without blocks: all inputs in their order.

use super::micro_kernel::{Data, MicroKernel};
use super::{Epilogue, Work};
use crate::cpu::gemm::tile::{Tiling, for_tile};
use crate::cpu::memory::format::STEP;
use crate::cpu::quant::block_float::SUPERBLOCK_STEPS;
use crate::cpu::simd::{LANES, Op, Simd};

/// Steps of a block. Longer than the first-level cache would have it: weights and inputs stream well from the second,
/// and every block's end costs each tile a pause.
const BLOCK_STEPS: usize = 512;
const _: () = assert!(BLOCK_STEPS.is_multiple_of(SUPERBLOCK_STEPS));
/// Rows of a band, at most. The more there are, the less often weights are read from the second-level cache, which holds
/// the inputs of a block: of 1 MiB or more where there is AVX-512, and of half of that elsewhere.
const fn band_rows<S: Simd>() -> usize {
    if two_panels::<S>() { MOST_BAND_ROWS } else { 48 }
}
const MOST_BAND_ROWS: usize = 168;
/// Whether the largest tiles have registers for the sums of two panels.
const fn two_panels<S: Simd>() -> bool {
    S::TILE_SUMS >= 2 * S::TILE_ROWS
}
/// Panels of a task, at most: for each of them a band's sums are kept.
pub(super) const TASK_PANELS: usize = 8;

/// Floats that a thread keeps: the sums of a band.
pub(super) const SUMS: usize = TASK_PANELS * MOST_BAND_ROWS * LANES;

/// Gives the number of bands into which these tiles are cut.
pub(super) struct Bands(pub(super) Tiling);

impl Op for Bands {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        let whole = const { if two_panels::<S>() { band_rows::<S>() / S::TILE_ROWS } else { usize::MAX } };
        self.0.tiles.div_ceil(whole)
    }
}

/// Some panels by some tiles of rows.
pub(super) struct Blocked<'a, K: MicroKernel> {
    pub(super) work: Work<'a>,
    pub(super) data: Data<'a, K>,
    /// At most [`TASK_PANELS`].
    pub(super) panels: (usize, usize),
    pub(super) tiles: (usize, usize),
    /// The thread's, [`SUMS`] long.
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
            for panel in self.panels.0..self.panels.1 {
                let sums = (band.end_row - band.first_row) * LANES;
                self.sums[(panel - self.panels.0) * band.stride..][..sums].fill(0.0);
            }
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

/// Tiles whose inputs of a block the second-level cache holds.
#[derive(Clone, Copy)]
struct Band {
    tiles: (usize, usize),
    first_row: usize,
    end_row: usize,
    /// Floats from the sums of one panel to those of the next.
    stride: usize,
}

/// The tile after the last of the band that starts with tile `first`, `end` at most.
#[inline(always)]
fn band_end<S: Simd>(tiling: Tiling, first: usize, end: usize) -> usize {
    let fits = |tile: usize| tiling.end(tile + 1) - tiling.tile(first).0 <= const { band_rows::<S>() };
    (first + 1..end).find(|&tile| !fits(tile)).unwrap_or(end)
}

impl<K: MicroKernel> Blocked<'_, K> {
    /// Multiplies a band by the block of `N` panels from `panel` on that begins with step `block`.
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
            // The thread's next task, as a rule.
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
                s.call(Tile::<K, R, P, N> { work, row, block, length, weights, ask, sums, stride })
            );
        }
    }

    /// Stores the sums of a band: row by row, so that stores go to whole runs of cache lines.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, band: Band) {
        let Self { work, panels, sums, .. } = self;
        let sums = |panel: usize, row: usize| {
            let at = (panel - panels.0) * band.stride + (row - band.first_row) * LANES;
            let Some(sums) = sums[at..].first_chunk::<LANES>() else { unreachable!("sums of a band") };
            sums
        };
        for row in band.first_row..band.end_row {
            if matches!(work.epilogue, Epilogue::Gated) {
                for pair in (panels.0..panels.1).step_by(2) {
                    work.gate(s, row, pair, sums(pair, row), sums(pair + 1, row));
                }
            } else {
                for panel in panels.0..panels.1 {
                    work.finish(s, row, panel, s.load_some(sums(panel, row), 0.0));
                }
            }
        }
    }
}

/// The part of the next block that a tile prefetches. That block is as long as the one at hand.
#[derive(Clone, Copy)]
struct Ask<const N: usize> {
    start: [*const u8; N],
    /// Bytes from what one line asks for to what the next does.
    stride: usize,
}

impl<const N: usize> Ask<N> {
    /// The share of tile `index` of those in `tiles`.
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

/// A tile of `R` rows meets a block of `N` panels. `_P` is what goes with `R` in [`for_tile`].
struct Tile<'a, K: MicroKernel, const R: usize, const _P: usize, const N: usize> {
    work: Work<'a>,
    row: usize,
    /// The block's first step, and how many there are.
    block: usize,
    length: usize,
    /// The block's.
    weights: [*const K::Raw; N],
    ask: Ask<N>,
    /// From the tile's first row and the block's first panel on, `[row][16]`, with the next panel's `stride` further.
    sums: &'a mut [f32],
    stride: usize,
}

impl<K: MicroKernel, const R: usize, const _P: usize, const N: usize> Op for Tile<'_, K, R, _P, N> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, row, block, length, weights, ask, sums: rest, stride } = self;
        assert!(rest.len() >= (N - 1) * stride + R * LANES);
        let rest = rest.as_mut_ptr();
        let ask = |p: usize, line: usize| s.prefetch(ask.start[p].wrapping_add(line * ask.stride));
        // SAFETY: the activations were packed before and nobody writes to them now; `rest` is long enough by the assertion.
        unsafe {
            let mut sums = [[s.splat(0.0); N]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (p, sum) in sums.iter_mut().enumerate() {
                    *sum = s.load(rest.add(p * stride + r * LANES));
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
