//! The innermost loops of matrix products in f32 and with bfloat16 dot products: a tile of `R` rows by `P` panels, held
//! in registers.
//!
//! An output element is one chain of fused multiply-adds over the inputs in order. `R`, `P` and the assignment of
//! elements to tiles only determine which elements are computed together, so they do not change any bit of the result.

use crate::cpu::memory::format::{Format, STEP};
use crate::cpu::simd::{Op, Simd};

/// Addresses of a tile's activations: element (row, input) is at `start + row * row_stride + input * input_stride`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Rows {
    pub(in crate::cpu) start: *const f32,
    pub(in crate::cpu) row_stride: usize,
    pub(in crate::cpu) input_stride: usize,
}

/// Numbers of rows that a tile may have if a matrix product has several tiles. The list is short because the loop is
/// compiled for each number with every format and instruction path.
const HEIGHTS: [usize; 8] = [14, 12, 8, 6, 4, 3, 2, 1];

/// A division of rows into tiles. All tiles have the largest size except for the last few, whose sizes are chosen so
/// that a tile of a single row is avoided.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Tiling {
    /// Index of the first row.
    start: usize,
    rows: usize,
    largest: usize,
    /// Number of tiles of the largest size, which come first.
    full: usize,
    pub(in crate::cpu) tiles: usize,
}

/// The largest numbers of rows that the tiles of a matrix product may have.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct TileLimits {
    /// Number of rows of the largest of several tiles: one of [`HEIGHTS`].
    pub(in crate::cpu) several: usize,
    /// Maximum number of rows of a single tile. A single tile may have any smaller number of rows, too.
    pub(in crate::cpu) single: usize,
}

impl TileLimits {
    /// Divides the rows `rows.0..rows.1` into one tile if they fit one tile, and otherwise into several.
    pub(in crate::cpu) fn divide(self, rows: (usize, usize)) -> Tiling {
        let count = rows.1 - rows.0;
        if (1..=self.single).contains(&count) {
            return Tiling { start: rows.0, rows: count, largest: count, full: 1, tiles: 1 };
        }
        Tiling::of(rows, self.several)
    }
}

impl Tiling {
    /// Divides the rows `0..rows` into tiles of at most `largest` rows. `largest` is one of [`HEIGHTS`].
    pub(in crate::cpu) fn new(rows: usize, largest: usize) -> Self {
        Self::of((0, rows), largest)
    }

    /// Divides the rows `start..end`, as [`Self::new`] does.
    pub(in crate::cpu) fn of((start, end): (usize, usize), largest: usize) -> Self {
        let rows = end - start;
        let full = if rows < 2 * largest { usize::from(rows == largest) } else { rows / largest - 1 };
        let mut tiling = Self { start, rows, largest, full, tiles: full };
        let mut done = full * largest;
        while done < rows {
            done += tiling.end_tile(rows - done);
            tiling.tiles += 1;
        }
        tiling
    }

    /// First row and number of rows of a tile.
    pub(in crate::cpu) fn tile(self, index: usize) -> (usize, usize) {
        if index < self.full {
            return (self.start + index * self.largest, self.largest);
        }
        let mut first = self.full * self.largest;
        for _ in self.full..index {
            first += self.end_tile(self.rows - first);
        }
        (self.start + first, self.end_tile(self.rows - first))
    }

    /// First row after the first `tiles` tiles.
    pub(in crate::cpu) fn end(self, tiles: usize) -> usize {
        if tiles < self.tiles { self.tile(tiles).0 } else { self.start + self.rows }
    }

    /// Number of rows of the next tile when `left` rows remain. `left` is less than twice the size of the largest tile.
    fn end_tile(self, left: usize) -> usize {
        if left <= self.largest && HEIGHTS.contains(&left) {
            return left;
        }
        let half = left.div_ceil(2).min(self.largest);
        HEIGHTS.into_iter().rev().find(|&rows| rows >= half).unwrap_or(1).min(self.largest)
    }
}

/// Evaluates `$body` for a tile of `$rows` rows, with the constants `R` (that number) and `P` (the number of panels
/// that the tile is multiplied by at once). `P` is the largest of 1, 2 and 4 for which the sums of `R` rows and `P`
/// panels fit the registers. There are then enough independent chains to hide the latency of a multiply-add, and each
/// load of an activation feeds several chains. Seven rows have two panels: with four panels, sums and weights would
/// take all registers. The keyword `single` allows all row counts of a tile that is the only one of a matrix product
/// (see [`TileLimits`]).
macro_rules! for_tile {
    ($simd:ident, $rows:expr, $body:expr) => {
        for_tile!(@ $simd, $simd::TILE_ROWS, $rows, $body, 1, 2, 3, 4, 6, 8, 12, 14)
    };
    (single $simd:ident, $rows:expr, $body:expr) => {
        for_tile!(@ $simd, $simd::SINGLE_TILE_ROWS, $rows, $body, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    };
    (@ $simd:ident, $most:expr, $rows:expr, $body:expr, $($r:literal),*) => {
        match $rows {
            $($r => {
                const R: usize = $r;
                // The `const` conditions keep tiles that do not fit from being compiled.
                if const { R * 4 <= $simd::TILE_SUMS && R <= 6 } {
                    const P: usize = 4;
                    $body
                } else if const { R * 2 <= $simd::TILE_SUMS } {
                    const P: usize = 2;
                    $body
                } else if const { R <= $most } {
                    const P: usize = 1;
                    $body
                } else {
                    unreachable!("a tile of {R} rows")
                }
            })*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(in crate::cpu) use for_tile;

/// Returns the tile limits of the instruction path that runs this operation.
pub(in crate::cpu) struct FindTileLimits;

impl Op for FindTileLimits {
    type Output = TileLimits;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> TileLimits {
        TileLimits { several: S::TILE_ROWS, single: S::SINGLE_TILE_ROWS }
    }
}

/// Returns `sums` plus the matrix product of a tile's rows and the panels: lane `lane` of each `sums[r][p]` grows by
/// `Σ x[r][i] * panel[p][i][lane]` over `2 * steps` inputs `i`. Calls `ask(p, step)` for each step of each panel, to
/// prefetch later steps.
///
/// # Safety
///
/// `x` is readable for `R` rows and `2 * steps` inputs, and every panel for `steps` steps.
#[inline(always)]
pub(in crate::cpu) unsafe fn product_on<S: Simd, W: Format, const R: usize, const P: usize>(
    s: S,
    mut sums: [[S::F; P]; R],
    x: Rows,
    panels: [*const W::Raw; P],
    steps: usize,
    ask: impl Fn(usize, usize),
) -> [[S::F; P]; R] {
    let mut even = x.start;
    for step in 0..steps {
        (0..P).for_each(|p| ask(p, step));
        // SAFETY: by the caller's contract, the rows and panels are readable for `steps` steps. `even` points to input
        // `2 * step` of row 0.
        unsafe {
            let odd = even.add(x.input_stride);
            if W::ODD_FIRST {
                row::<S, W, true, R, P>(s, &mut sums, odd, x.row_stride, panels, step);
                row::<S, W, false, R, P>(s, &mut sums, even, x.row_stride, panels, step);
            } else {
                row::<S, W, false, R, P>(s, &mut sums, even, x.row_stride, panels, step);
                row::<S, W, true, R, P>(s, &mut sums, odd, x.row_stride, panels, step);
            }
            even = odd.add(x.input_stride);
        }
    }
    sums
}

/// Prefetches `count` elements. The address may be out of range.
#[inline(always)]
pub(in crate::cpu) fn prefetch<S: Simd, T>(s: S, from: *const T, count: usize) {
    const LINE: usize = 64;
    for line in 0..(count * size_of::<T>()).div_ceil(LINE) {
        s.prefetch_far(from.cast::<u8>().wrapping_add(line * LINE));
    }
}

/// The part of [`product_on`] for one input of a step: adds the input's products with all rows and panels to `sums`.
///
/// # Safety
///
/// The rows and panels are readable as [`product_on`] requires. `x` points to the input's element in row 0.
#[inline(always)]
unsafe fn row<S: Simd, W: Format, const ODD: bool, const R: usize, const P: usize>(
    s: S,
    sums: &mut [[S::F; P]; R],
    x: *const f32,
    row_stride: usize,
    panels: [*const W::Raw; P],
    step: usize,
) {
    if const { R > P } {
        let mut weights = [s.splat(0.0); P];
        for (weights, panel) in weights.iter_mut().zip(panels) {
            // SAFETY: by the caller's contract, every panel is readable at `step`.
            *weights = unsafe { W::load_step::<S, ODD>(s, panel.add(step * STEP)) };
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller's contract, the input's element is readable in all `R` rows.
            let x = s.splat(unsafe { *x.add(r * row_stride) });
            for (sum, weights) in sums.iter_mut().zip(weights) {
                *sum = s.fma(x, weights, *sum);
            }
        }
        return;
    }
    for p in 0..P {
        // SAFETY: by the caller's contract, every panel is readable at `step`.
        let weights = unsafe { W::load_step::<S, ODD>(s, panels[p].add(step * STEP)) };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller's contract, the input's element is readable in all `R` rows.
            let x = s.splat(unsafe { *x.add(r * row_stride) });
            sums[p] = s.fma(x, weights, sums[p]);
        }
    }
}

/// [`product_on`] for bfloat16, with one dot-product instruction per step. `x` holds pairs: the pair of row `r` in step
/// `i` is at `i * R + r`.
///
/// # Safety
///
/// `x` is readable for `R * steps` pairs, and every panel for `steps` steps.
#[inline(always)]
pub(in crate::cpu) unsafe fn dot_product_on<S: Simd, const R: usize, const P: usize>(
    s: S,
    mut sums: [[S::F; P]; R],
    x: *const u32,
    panels: [*const u16; P],
    steps: usize,
    ask: impl Fn(usize, usize),
) -> [[S::F; P]; R] {
    for step in 0..steps {
        (0..P).for_each(|p| ask(p, step));
        // The loop over panels is the inner one, so that each pair is loaded once and used for all panels.
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller's contract, `x` is readable for `R * steps` pairs.
            let pair = unsafe { *x.add(step * R + r) };
            for (sum, panel) in sums.iter_mut().zip(panels) {
                // SAFETY: by the caller's contract, every panel is readable for `steps` steps.
                *sum = unsafe { s.dot_bf16(*sum, panel.add(step * STEP), pair) };
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests;
