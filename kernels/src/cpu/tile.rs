//! The innermost loop of every product: a tile of `R` rows by `P` panels, held in registers.
//!
//! An output element is one chain of fused multiply-adds over the inputs, in their order. `R`, `P`, and which tile an
//! element falls into change only what is computed beside it, so they never change its bits.

use super::format::{Format, STEP};
use super::simd::Simd;

/// Where a tile's activations lie: element (row, input) is at `start + row * row_stride + input * input_stride`.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) start: *const f32,
    pub(super) row_stride: usize,
    pub(super) input_stride: usize,
}

/// Rows cut into tiles of nearly equal size, so that no tile is left with a row or two and little to overlap.
#[derive(Clone, Copy)]
pub(super) struct Tiling {
    rows: usize,
    pub(super) tiles: usize,
}

impl Tiling {
    pub(super) fn new(rows: usize, largest: usize) -> Self {
        Self { rows, tiles: rows.div_ceil(largest) }
    }

    /// First row and number of rows of a tile.
    pub(super) fn tile(self, index: usize) -> (usize, usize) {
        let (base, longer) = (self.rows / self.tiles, self.rows % self.tiles);
        (index * base + index.min(longer), base + usize::from(index < longer))
    }
}

/// Calls `$call::<S, R, P>` for `$rows` rows: `P` panels beside each other, so that there are enough independent chains
/// to hide the latency of a multiply-add, as far as registers allow.
macro_rules! for_tile {
    ($simd:ident, $rows:expr, $object:ident . $call:ident ( $($argument:expr),* )) => {
        match $rows {
            1 if $simd::ACCUMULATORS >= 4 => $object.$call::<$simd, 1, 4>($($argument),*),
            1 => $object.$call::<$simd, 1, 2>($($argument),*),
            2 if $simd::ACCUMULATORS >= 4 => $object.$call::<$simd, 2, 2>($($argument),*),
            2 => $object.$call::<$simd, 2, 1>($($argument),*),
            3 if $simd::ACCUMULATORS >= 6 => $object.$call::<$simd, 3, 2>($($argument),*),
            3 => $object.$call::<$simd, 3, 1>($($argument),*),
            4 if $simd::ACCUMULATORS >= 4 => $object.$call::<$simd, 4, 1>($($argument),*),
            5 if $simd::ACCUMULATORS >= 5 => $object.$call::<$simd, 5, 1>($($argument),*),
            6 if $simd::ACCUMULATORS >= 6 => $object.$call::<$simd, 6, 1>($($argument),*),
            7 if $simd::ACCUMULATORS >= 7 => $object.$call::<$simd, 7, 1>($($argument),*),
            8 if $simd::ACCUMULATORS >= 8 => $object.$call::<$simd, 8, 1>($($argument),*),
            9 if $simd::ACCUMULATORS >= 9 => $object.$call::<$simd, 9, 1>($($argument),*),
            10 if $simd::ACCUMULATORS >= 10 => $object.$call::<$simd, 10, 1>($($argument),*),
            11 if $simd::ACCUMULATORS >= 11 => $object.$call::<$simd, 11, 1>($($argument),*),
            12 if $simd::ACCUMULATORS >= 12 => $object.$call::<$simd, 12, 1>($($argument),*),
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(super) use for_tile;

/// `[r][p]`, sixteen lanes each: `Σ x[r][i] * panel[p][i][lane]` over `2 * steps` inputs.
///
/// # Safety
///
/// `x` is readable for `R` rows and `2 * steps` inputs, and every panel for `steps` steps.
#[inline(always)]
pub(super) unsafe fn product<S: Simd, W: Format, const R: usize, const P: usize>(
    s: S,
    x: Rows,
    panels: [*const W::Raw; P],
    steps: usize,
) -> [[S::F; P]; R] {
    let mut sums = [[s.splat(0.0); P]; R];
    let mut even = x.start;
    for step in 0..steps {
        // SAFETY: the caller's contract; `even` points to input `2 * step` of row 0.
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

/// One input's share of [`product`].
///
/// # Safety
///
/// As [`product`]'s; `x` points to the input in row 0.
#[inline(always)]
unsafe fn row<S: Simd, W: Format, const ODD: bool, const R: usize, const P: usize>(
    s: S,
    sums: &mut [[S::F; P]; R],
    x: *const f32,
    row_stride: usize,
    panels: [*const W::Raw; P],
    step: usize,
) {
    for p in 0..P {
        // SAFETY: the caller's contract.
        let weights = unsafe { W::load_step::<S, ODD>(s, panels[p].add(step * STEP)) };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's contract.
            let x = s.splat(unsafe { *x.add(r * row_stride) });
            sums[p] = s.fma(x, weights, sums[p]);
        }
    }
}

/// [`product`] of bfloat16 with one instruction a step; `x` holds pairs, row `r` of step `i` at `i * R + r`.
///
/// # Safety
///
/// `x` is readable for `R * steps` pairs, and every panel for `steps` steps.
#[inline(always)]
pub(super) unsafe fn dot_product<S: Simd, const R: usize, const P: usize>(
    s: S,
    x: *const u32,
    panels: [*const u16; P],
    steps: usize,
) -> [[S::F; P]; R] {
    let mut sums = [[s.splat(0.0); P]; R];
    for step in 0..steps {
        for p in 0..P {
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's contract.
                sums[p] = unsafe { s.dot_bf16(sums[p], panels[p].add(step * STEP), *x.add(step * R + r)) };
            }
        }
    }
    sums
}

/// `sums[r][p] += Σ x[r][j] * values[j][p]` over `j` in order, where `values[j]` is a row of elements `stride` apart
/// and `x[r]` a row of f32 `x_stride` apart: the weighted sum of attention.
///
/// # Safety
///
/// `x` is readable for `R` rows of `count`, `values` for `count` rows of `16 * P` elements.
#[inline(always)]
pub(super) unsafe fn weighted_sum<S: Simd, W: Format, const R: usize, const P: usize>(
    s: S,
    sums: &mut [[S::F; P]; R],
    x: *const f32,
    x_stride: usize,
    values: *const W::Raw,
    stride: usize,
    count: usize,
) {
    for j in 0..count {
        for p in 0..P {
            // SAFETY: the caller's contract.
            let value = unsafe { W::load_row(s, values.add(j * stride + p * super::simd::LANES)) };
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's contract.
                let x = s.splat(unsafe { *x.add(r * x_stride + j) });
                sums[p] = s.fma(x, value, sums[p]);
            }
        }
    }
}
