//! Products of several tiles of rows: of the operands, as much at a time as the nearest caches hold.
//!
//! A *block* is some inputs of a panel. All tiles of a *band* of rows meet it while it is near, and meanwhile ask for the
//! block that comes next. Their sums rest between blocks, so that the chain of each output is what it would be without
//! blocks: all inputs in their order.

use super::super::block_float::STRETCH_STEPS;
use super::super::format::STEP;
use super::super::simd::{LANES, Op, Simd};
use super::super::tile::{Tiling, for_tile};
use super::way::{Data, Way};
use super::{Store, Work};

/// Steps of a block. Longer than the first-level cache would have it: weights and inputs stream well from the second,
/// and every block's end costs each tile a pause.
const BLOCK_STEPS: usize = 512;
const _: () = assert!(BLOCK_STEPS.is_multiple_of(STRETCH_STEPS));
/// Rows of a band, at most: their inputs of a block, in f32, stay in the second-level cache.
const BAND_ROWS: usize = 48;
/// Panels of a task, at most: for each of them a band's sums are kept.
pub(super) const TASK_PANELS: usize = 8;

/// Floats that a thread keeps: the sums of a band.
pub(super) const SUMS: usize = TASK_PANELS * BAND_ROWS * LANES;

/// Some panels by some tiles of rows.
pub(super) struct Blocked<'a, W: Way> {
    pub(super) work: Work<'a>,
    pub(super) data: Data<'a, W>,
    /// At most [`TASK_PANELS`].
    pub(super) panels: (usize, usize),
    pub(super) tiles: (usize, usize),
    /// The thread's, [`SUMS`] long.
    pub(super) sums: &'a mut [f32],
}

impl<W: Way> Op for Blocked<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, data, panels, tiles, sums } = self;
        let (tiling, steps) = (work.tiling, work.matrix.shape.steps());
        let mut first = tiles.0;
        while first < tiles.1 {
            let last = band_end(tiling, first, tiles.1);
            let (first_row, end_row) = (tiling.tile(first).0, tiling.end(last));
            let of_panel = |panel: usize| (panel - panels.0) * BAND_ROWS * LANES;
            for panel in panels.0..panels.1 {
                sums[of_panel(panel)..][..(end_row - first_row) * LANES].fill(0.0);
            }
            for block in (0..steps).step_by(BLOCK_STEPS) {
                for panel in panels.0..panels.1 {
                    let length = BLOCK_STEPS.min(steps - block);
                    let weights = data.steps(panel, block, length);
                    let next = if panel + 1 < panels.1 {
                        (panel + 1, block)
                    } else if block + BLOCK_STEPS < steps {
                        (panels.0, block + BLOCK_STEPS)
                    } else if last < tiles.1 {
                        (panels.0, 0)
                    } else {
                        // The thread's next task, as a rule.
                        (panels.1, 0)
                    };
                    let next = data.address(next.0, next.1);
                    let sums = &mut sums[of_panel(panel)..];
                    for tile in first..last {
                        let (row, rows) = tiling.tile(tile);
                        let next = share::<W>(next, length, (tile - first, last - first));
                        let sums = &mut sums[(row - first_row) * LANES..][..rows * LANES];
                        for_tile!(
                            S,
                            rows,
                            s.call(Tile::<W, R, P> { work, row, block, length, weights, next, sums })
                        );
                    }
                }
            }
            if matches!(work.store, Store::Gated) {
                for pair in (panels.0..panels.1).step_by(2) {
                    let (gates, ups) = sums[of_panel(pair)..].split_at(BAND_ROWS * LANES);
                    let sums = gates.as_chunks::<LANES>().0.iter().zip(ups.as_chunks::<LANES>().0);
                    for (row, (gate, up)) in (first_row..end_row).zip(sums) {
                        work.gate(s, row, pair, gate, up);
                    }
                }
            } else {
                for panel in panels.0..panels.1 {
                    let sums = sums[of_panel(panel)..].chunks_exact(LANES);
                    for (row, sum) in (first_row..end_row).zip(sums) {
                        work.finish(s, row, panel, s.load_some(sum, 0.0));
                    }
                }
            }
            first = last;
        }
    }
}

/// The tile after the last of the band that starts with tile `first`, `end` at most.
#[inline(always)]
fn band_end(tiling: Tiling, first: usize, end: usize) -> usize {
    let fits = |tile: usize| tiling.end(tile + 1) - tiling.tile(first).0 <= BAND_ROWS;
    (first + 1..end).find(|&tile| !fits(tile)).unwrap_or(end)
}

/// What tile `index` of so many asks for of the next block, which is as long as this one: its start, and bytes a line.
#[inline(always)]
fn share<W: Way>(next: *const u8, steps: usize, (index, tiles): (usize, usize)) -> (*const u8, usize) {
    let lines = W::lines(steps);
    let bytes = lines * STEP * size_of::<W::Raw>();
    (next.wrapping_add(index * bytes / tiles), bytes.div_ceil(tiles * lines))
}

/// A tile of `R` rows meets a block of one panel. `_P` is of no use: several tiles are never so low that one panel does
/// not fill the registers.
struct Tile<'a, W: Way, const R: usize, const _P: usize> {
    work: Work<'a>,
    row: usize,
    /// The block's first step, and how many there are.
    block: usize,
    length: usize,
    /// The block's.
    weights: *const W::Raw,
    /// Where to ask for what comes next, and bytes a step.
    next: (*const u8, usize),
    /// `[R, 16]`.
    sums: &'a mut [f32],
}

impl<W: Way, const R: usize, const _P: usize> Op for Tile<'_, W, R, _P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, row, block, length, weights, next, sums: rest } = self;
        assert!(rest.len() == R * LANES);
        let rest = rest.as_mut_ptr();
        let ask = |_, line: usize| s.prefetch(next.0.wrapping_add(line * next.1));
        // SAFETY: the door was filled before and nobody writes to it now; `rest` is long enough by the assertion.
        unsafe {
            let mut sums = [[s.splat(0.0); 1]; R];
            for (r, sum) in sums.iter_mut().enumerate() {
                sum[0] = s.load(rest.add(r * LANES));
            }
            let x = work.inputs::<W, R>(row, block);
            let sums = W::multiply::<S, R, 1>(s, sums, x, [weights], length, ask);
            for (r, sum) in sums.iter().enumerate() {
                s.store(rest.add(r * LANES), sum[0]);
            }
        }
    }
}
