//! `y = x · Wᵀ` over packed panels.
//!
//! Activations pass a *door* first: they are copied into tiles of a few rows, transposed so that a tile's rows lie
//! side by side for each input, and rounded to bfloat16 where the weights are. Then every panel of weights meets every
//! tile while it is in the cache, so that one read of the weights from memory serves all rows.

use super::format::{Bf16, F16, F32, Format, STEP, Stored};
use super::isa::Path;
use super::matrix::Matrix;
use super::memory::{Buffer, Shared};
use super::pool::ThreadPool;
use super::simd::{LANES, Op, Simd, from_bf16, to_bf16};
use super::tile::{Rows, Tiling, dot_product, for_tile, product};
use crate::DeviceError;

/// Bytes of weights that are kept in the second-level cache while all tiles of rows pass by.
const CACHED_WEIGHTS: usize = 192 << 10;
/// Steps that weights are asked for ahead of their use.
const AHEAD: usize = 24;
/// Tiles below which passing the door is not worth waking another thread.
const INLINE_TILES: usize = 4;

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(super) enum Store<'a> {
    /// `out = x · Wᵀ (+ bias)`.
    Set(Option<&'a [f32]>),
    /// `out += x · Wᵀ (+ bias)`.
    Add(Option<&'a [f32]>),
}

/// The operands of one product.
pub(super) struct Product<'a> {
    /// `[rows, inputs]`.
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
    pub(super) matrix: &'a Matrix,
    pub(super) store: Store<'a>,
    /// `[rows, outputs]`.
    pub(super) out: &'a mut [f32],
}

/// Computes a product. `door` has room for the rows times the inputs, rounded up to a pair.
pub(super) fn linear(
    path: Path,
    pool: &mut ThreadPool,
    door: &mut Buffer<f32>,
    product: Product<'_>,
) -> Result<(), DeviceError> {
    linear_with(path, pool, door, product, path.dots_bf16())
}

/// [`linear`], with bfloat16 kept as pairs or not.
fn linear_with(
    path: Path,
    pool: &mut ThreadPool,
    door: &mut Buffer<f32>,
    product: Product<'_>,
    dots: bool,
) -> Result<(), DeviceError> {
    let Product { x, rows, matrix, store, out } = product;
    let tiling = Tiling::new(rows, path.run(LargestTile));
    let door = Shared::new(&mut door[..]);
    let narrow = matches!(matrix.data, Stored::Bf16(_));
    let pass = Pass { x, inputs: matrix.inputs, tiling, door: &door, narrow, dots: dots && narrow };
    if tiling.tiles <= INLINE_TILES {
        (0..tiling.tiles).for_each(|tile| pass.tile(tile));
    } else {
        pool.run(tiling.tiles, |tile, _| pass.tile(tile))?;
    }
    let out = Shared::new(out);
    let work = Work { tiling, door: &door, matrix, store, out: &out };
    match &matrix.data {
        Stored::F32(data) => work.run::<F32, false>(path, pool, data),
        Stored::F16(data) => work.run::<F16, false>(path, pool, data),
        Stored::Bf16(data) if dots => work.run::<Bf16, true>(path, pool, data),
        Stored::Bf16(data) => work.run::<Bf16, false>(path, pool, data),
    }
}

/// Rows that a tile can have.
struct LargestTile;

impl Op for LargestTile {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::ACCUMULATORS
    }
}

/// The way of all rows through the door.
struct Pass<'a> {
    x: &'a [f32],
    inputs: usize,
    tiling: Tiling,
    door: &'a Shared<'a, f32>,
    /// Round to bfloat16.
    narrow: bool,
    /// Keep as pairs of bfloat16.
    dots: bool,
}

impl Pass<'_> {
    fn tile(&self, index: usize) {
        let Self { x, inputs, tiling, door, narrow, dots } = *self;
        let (first, rows) = tiling.tile(index);
        let padded = 2 * inputs.div_ceil(2);
        let x = &x[first * inputs..(first + rows) * inputs];
        // SAFETY: each tile has a part of its own.
        let to = unsafe { door.part(first * padded, rows * padded) };
        for (row, x) in x.chunks_exact(inputs.max(1)).enumerate() {
            if dots {
                for (pair, x) in x.chunks(2).enumerate() {
                    let odd = x.get(1).map_or(0, |&odd| to_bf16(odd));
                    let bits = u32::from(to_bf16(x[0])) | u32::from(odd) << 16;
                    to[pair * rows + row] = f32::from_bits(bits);
                }
            } else if narrow {
                x.iter().enumerate().for_each(|(i, &x)| to[i * rows + row] = from_bf16(to_bf16(x)));
            } else {
                x.iter().enumerate().for_each(|(i, &x)| to[i * rows + row] = x);
            }
            if !dots && padded > inputs {
                to[inputs * rows + row] = 0.0;
            }
        }
    }
}

/// What all tasks of one product share.
#[derive(Clone, Copy)]
struct Work<'a> {
    tiling: Tiling,
    door: &'a Shared<'a, f32>,
    matrix: &'a Matrix,
    store: Store<'a>,
    out: &'a Shared<'a, f32>,
}

impl Work<'_> {
    fn run<W: Format, const DOTS: bool>(
        &self,
        path: Path,
        pool: &mut ThreadPool,
        data: &[W::Raw],
    ) -> Result<(), DeviceError> {
        let panels = self.matrix.panels();
        // A few tasks for each thread even out their ends; a task has four panels or more, which a single row needs.
        let share = panels.div_ceil(4 * pool.threads()).next_multiple_of(4);
        let columns = panels.div_ceil(share);
        let bands = (2 * pool.threads()).div_ceil(columns).min(self.tiling.tiles).max(1);
        let band = self.tiling.tiles.div_ceil(bands);
        pool.run(columns * bands, |task, _| {
            let (column, first) = (task / bands, task % bands * band);
            let block = Block::<W, DOTS> {
                work: *self,
                data,
                panels: (column * share, panels.min((column + 1) * share)),
                tiles: (first, self.tiling.tiles.min(first + band)),
            };
            if DOTS { path.run_dots(block) } else { path.run(block) }
        })
    }
}

/// Some panels by some tiles of rows; `DOTS` where the door holds bfloat16 pairs.
#[derive(Clone, Copy)]
struct Block<'a, W: Format, const DOTS: bool> {
    work: Work<'a>,
    data: &'a [W::Raw],
    panels: (usize, usize),
    tiles: (usize, usize),
}

impl<W: Format, const DOTS: bool> Op for Block<'_, W, DOTS> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let panel_bytes = self.work.matrix.steps() * STEP * size_of::<W::Raw>();
        let cached = (CACHED_WEIGHTS / panel_bytes.max(1)).max(4);
        let (mut first, end) = self.panels;
        while first < end {
            let last = end.min(first + cached);
            for tile in self.tiles.0..self.tiles.1 {
                let (row, rows) = self.work.tiling.tile(tile);
                for_tile!(S, rows, s.call(Sweep::<W, DOTS, R, P> { block: self, row, first, last }));
            }
            first = last;
        }
    }
}

/// A tile of `R` rows from `row` on meets panels `first .. last`, `P` of them at once.
struct Sweep<'a, W: Format, const DOTS: bool, const R: usize, const P: usize> {
    block: Block<'a, W, DOTS>,
    row: usize,
    first: usize,
    last: usize,
}

impl<W: Format, const DOTS: bool, const R: usize, const P: usize> Op for Sweep<'_, W, DOTS, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut panel = self.first;
        while panel + P <= self.last {
            self.block.tile::<S, R, P>(s, self.row, panel);
            panel += P;
        }
        while panel < self.last {
            self.block.tile::<S, R, 1>(s, self.row, panel);
            panel += 1;
        }
    }
}

impl<W: Format, const DOTS: bool> Block<'_, W, DOTS> {
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const P: usize>(&self, s: S, row: usize, panel: usize) {
        let steps = self.work.matrix.steps();
        let data = &self.data[panel * steps * STEP..(panel + P) * steps * STEP];
        let mut panels = [data.as_ptr(); P];
        for (p, panel) in panels.iter_mut().enumerate() {
            *panel = data[p * steps * STEP..].as_ptr();
        }
        // What is needed some steps later: of these panels or, at their end, of the `P` after them, where the machine's
        // own prefetching would have to find its streams anew.
        let hint = |p: usize, step: usize| {
            let ahead = step + AHEAD;
            let ahead = if ahead < steps { ahead } else { ahead + (P - 1) * steps };
            panels[p].wrapping_add(ahead * STEP)
        };
        // SAFETY: the door holds `2 * steps` inputs of every row, tile by tile, and was filled before; nobody writes
        // to it now. The panels hold `steps` steps by the slice above. With `DOTS` the elements are u16 and u32 in
        // place of f32, of which the door then holds half.
        let sums = unsafe {
            let x = self.work.door.as_ptr().add(row * 2 * steps).cast_const();
            if DOTS {
                let hint = |p, step| hint(p, step).cast();
                dot_product::<S, R, P>(s, x.cast(), panels.map(<*const W::Raw>::cast), steps, hint)
            } else {
                product::<S, W, R, P>(
                    s,
                    Rows { start: x, row_stride: 1, input_stride: R },
                    panels,
                    steps,
                    hint,
                )
            }
        };
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                self.finish(s, row + r, (panel + p) * LANES, sum);
            }
        }
    }

    /// Adds the bias and what is there already, and stores.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, row: usize, column: usize, sum: S::F) {
        let outputs = self.work.matrix.outputs;
        let width = LANES.min(outputs - column);
        // SAFETY: each (row, panel) belongs to one task.
        let out = unsafe { self.work.out.part(row * outputs + column, width) };
        let (bias, add) = match self.work.store {
            Store::Set(bias) => (bias, false),
            Store::Add(bias) => (bias, true),
        };
        let mut sum = sum;
        if let Some(bias) = bias {
            sum = s.add(sum, s.load_some(&bias[column..column + width], 0.0));
        }
        if add {
            sum = s.add(s.load_some(out, 0.0), sum);
        }
        s.store_some(out, sum);
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::testable;
    use super::super::testing::Random;
    use super::*;
    use crate::{HostMatrix, WeightType};

    /// No machine of ours has the dot-product instruction, but all that surrounds it can be checked without: pairs
    /// multiplied by other means come to the same bits as widened elements.
    #[test]
    fn pairs_at_the_door_give_the_bits_of_widened_elements() {
        let mut random = Random::new(11);
        for isa in testable("bfloat16 pairs") {
            let path = Path::new(isa).unwrap();
            for threads in [1, 2] {
                let mut pool = ThreadPool::new(threads).unwrap();
                for (rows, inputs, outputs) in [(1, 64, 100), (2, 7, 17), (7, 33, 40), (29, 128, 70)] {
                    let bytes: Vec<u8> = random
                        .normals(inputs * outputs, 1.0)
                        .into_iter()
                        .flat_map(|x| to_bf16(x).to_le_bytes())
                        .collect();
                    let (dtype, columns) = (WeightType::Bf16, inputs);
                    let part = HostMatrix { bytes: &bytes, dtype, rows: outputs, columns };
                    let matrix = Matrix::pack(&mut pool, &[part]).unwrap();
                    let x = random.normals(rows * inputs, 1.0);
                    let mut door = Buffer::zeroed(rows * (inputs + 1), "the door").unwrap();
                    let mut run = |dots| {
                        let mut out = vec![0.0; rows * outputs];
                        let product =
                            Product { x: &x, rows, matrix: &matrix, store: Store::Set(None), out: &mut out };
                        linear_with(path, &mut pool, &mut door, product, dots).unwrap();
                        out
                    };
                    assert_eq!(run(true), run(false), "{isa} {threads} {rows}x{inputs}x{outputs}");
                }
            }
        }
    }
}
