//! `y = x · Wᵀ` over packed panels.
//!
//! Activations pass a *door* first: they are copied into tiles of a few rows, transposed so that a tile's rows lie
//! side by side for each input, and rounded to bfloat16 where the weights are. Then every panel of weights meets every
//! tile while it is in the cache, so that one read of the weights from memory serves all rows.

mod blocked;
mod door;

use self::blocked::{Blocked, SUMS, TASK_PANELS};
use self::door::Door;
use super::format::{Bf16, F16, F32, Format, STEP, Stored};
use super::isa::Path;
use super::matrix::Matrix;
use super::memory::{Buffer, Shared};
use super::pool::ThreadPool;
use super::simd::{LANES, Op, Simd};
use super::tile::{Rows, Tiling, dot_product_on, for_tile, prefetch, product_on};
use crate::DeviceError;

/// Bytes of weights that are kept in the second-level cache while all tiles of rows pass by.
const CACHED_WEIGHTS: usize = 192 << 10;
/// Steps that weights are asked for ahead of their use.
const AHEAD: usize = 24;

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

/// What products work in.
pub(super) struct Scratch {
    /// Where activations are laid out.
    door: Buffer<f32>,
    /// [`SCRATCH`] for each thread.
    blocks: Buffer<f32>,
}

impl Scratch {
    pub(super) fn new(threads: usize) -> Result<Self, DeviceError> {
        let blocks = Buffer::zeroed(threads * SUMS, "blocks of a product")?;
        Ok(Self { door: Buffer::zeroed(0, DOOR)?, blocks })
    }

    /// Makes room for products of so many rows and inputs.
    pub(super) fn fit(&mut self, rows: usize, inputs: usize) -> Result<(), DeviceError> {
        let padded = rows * inputs.next_multiple_of(2);
        if self.door.len() < padded {
            self.door = Buffer::zeroed(padded, DOOR)?;
        }
        Ok(())
    }

    /// The most that they take.
    pub(super) fn bytes(&self) -> usize {
        (self.door.len() + self.blocks.len()) * size_of::<f32>()
    }
}

/// What the door's memory is for.
const DOOR: &str = "activations of a product";

/// Computes a product. `scratch` fits its rows and inputs.
pub(super) fn linear(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'_>,
) -> Result<(), DeviceError> {
    linear_with(path, pool, scratch, product, path.dots_bf16())
}

/// [`linear`], with bfloat16 kept as pairs or not.
fn linear_with(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'_>,
    dots: bool,
) -> Result<(), DeviceError> {
    let Product { x, rows, matrix, store, out } = product;
    let tiling = Tiling::new(rows, path.run(LargestTile));
    let (door, blocks) = (Shared::new(&mut scratch.door[..]), Shared::new(&mut scratch.blocks[..]));
    let narrow = matches!(matrix.data, Stored::Bf16(_));
    let way = Door { x, inputs: matrix.inputs, tiling, narrow, dots: dots && narrow };
    way.pass(path, pool, &door)?;
    let out = Shared::new(out);
    let work = Work { tiling, door: &door, blocks: &blocks, matrix, store, out: &out };
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

/// What all tasks of one product share.
#[derive(Clone, Copy)]
struct Work<'a> {
    tiling: Tiling,
    door: &'a Shared<'a, f32>,
    blocks: &'a Shared<'a, f32>,
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
        if self.tiling.tiles > 1 {
            return self.run_blocked::<W, DOTS>(path, pool, data);
        }
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

    fn run_blocked<W: Format, const DOTS: bool>(
        &self,
        path: Path,
        pool: &mut ThreadPool,
        data: &[W::Raw],
    ) -> Result<(), DeviceError> {
        let panels = self.matrix.panels();
        let share = panels.div_ceil(8 * pool.threads()).clamp(1, TASK_PANELS);
        let columns = panels.div_ceil(share);
        let bands = (2 * pool.threads()).div_ceil(columns).min(self.tiling.tiles).max(1);
        let band = self.tiling.tiles.div_ceil(bands);
        pool.run(columns * bands, |task, thread| {
            let (column, first) = (task / bands, task % bands * band);
            let block = Blocked::<W, DOTS> {
                work: *self,
                data,
                panels: (column * share, panels.min((column + 1) * share)),
                tiles: (first, self.tiling.tiles.min(first + band)),
                // SAFETY: each thread has a part of its own, and runs one task at a time.
                sums: unsafe { self.blocks.part(thread * SUMS, SUMS) },
            };
            if DOTS { path.run_dots(block) } else { path.run(block) }
        })
    }

    /// Where the door has laid out the inputs from step `step` on of the tile of `R` rows that starts with `row`.
    ///
    /// # Safety
    ///
    /// There is such a tile.
    #[inline(always)]
    unsafe fn inputs<const DOTS: bool, const R: usize>(&self, row: usize, step: usize) -> *const f32 {
        let elements = if DOTS { 1 } else { 2 };
        // SAFETY: a part of the door, by the contract.
        unsafe { self.door.as_ptr().add(row * 2 * self.matrix.steps() + elements * step * R).cast_const() }
    }

    /// Adds the bias and what is there already to the sum of sixteen outputs, and stores.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, row: usize, column: usize, sum: S::F) {
        let outputs = self.matrix.outputs;
        let width = LANES.min(outputs - column);
        // SAFETY: each (row, panel) belongs to one task.
        let out = unsafe { self.out.part(row * outputs + column, width) };
        let (bias, add) = match self.store {
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
        let zeros = [[s.splat(0.0); P]; R];
        let ask = |p, step| prefetch(s, hint(p, step), STEP);
        // SAFETY: the door holds `2 * steps` inputs of every row, tile by tile, and was filled before; nobody writes
        // to it now. The panels hold `steps` steps by the slice above.
        let sums = unsafe {
            let x = self.work.inputs::<DOTS, R>(row, 0);
            multiply::<S, W, DOTS, R, P>(s, zeros, x, panels, steps, ask)
        };
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                self.work.finish(s, row + r, (panel + p) * LANES, sum);
            }
        }
    }
}

/// [`product_on`] from what the door has laid out, which is pairs with `DOTS`: the elements are then u16 and u32 in place
/// of f32.
///
/// # Safety
///
/// `x` points to a tile of `R` rows of `2 * steps` inputs or more, and the panels hold `steps` steps.
#[inline(always)]
unsafe fn multiply<S: Simd, W: Format, const DOTS: bool, const R: usize, const P: usize>(
    s: S,
    sums: [[S::F; P]; R],
    x: *const f32,
    panels: [*const W::Raw; P],
    steps: usize,
    ask: impl Fn(usize, usize),
) -> [[S::F; P]; R] {
    // SAFETY: the caller's contract.
    unsafe {
        if DOTS {
            let panels = panels.map(<*const W::Raw>::cast);
            dot_product_on::<S, R, P>(s, sums, x.cast(), panels, steps, ask)
        } else {
            let x = Rows { start: x, row_stride: 1, input_stride: R };
            product_on::<S, W, R, P>(s, sums, x, panels, steps, ask)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::testable;
    use super::super::simd::to_bf16;
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
                    let mut scratch = Scratch::new(threads).unwrap();
                    scratch.fit(rows, inputs).unwrap();
                    let mut run = |dots| {
                        let mut out = vec![0.0; rows * outputs];
                        let product =
                            Product { x: &x, rows, matrix: &matrix, store: Store::Set(None), out: &mut out };
                        linear_with(path, &mut pool, &mut scratch, product, dots).unwrap();
                        out
                    };
                    assert_eq!(run(true), run(false), "{isa} {threads} {rows}x{inputs}x{outputs}");
                }
            }
        }
    }
}
