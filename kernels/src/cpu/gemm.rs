//! `y = x · Wᵀ` over packed panels.
//!
//! Activations are packed first ([`activations`]): copied into tiles of a few rows, transposed so that a tile's rows lie side
//! by side for each input, and rounded to what the [micro-kernel](micro_kernel) multiplies. Then one read of the weights
//! from memory serves all rows: a few, which are one tile, by whole panels ([`small_m`]); more of them [`blocked`].

mod activations;
mod blocked;
pub(super) mod input;
mod micro_kernel;
mod small_m;
pub(super) mod tile;

use self::activations::PackActivations;
use self::blocked::{Bands, Blocked, SUMS, TASK_PANELS};
use self::micro_kernel::{BlockFloat, Data, Dots, Inputs, MicroKernel, Widened};
use self::small_m::SmallM;
use crate::DeviceError;
use crate::cpu::gemm::input::Input;
use crate::cpu::gemm::tile::{LargestTile, Tiling};
#[cfg(test)]
use crate::cpu::memory::format::Bf16;
use crate::cpu::memory::format::{F16, F32, Stored};
use crate::cpu::memory::matrix::{Elements, Matrix};
use crate::cpu::memory::{Buffer, Shared};
use crate::cpu::quant::block_float::BFP_BLOCK_STEPS;
use crate::cpu::rowwise::SiluMul;
use crate::cpu::sampling::argmax::{PartialArgmax, UpdateArgmax};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(super) enum Epilogue<'a> {
    /// `out = x · Wᵀ (+ bias)`.
    Set(Option<&'a [f32]>),
    /// `out += x · Wᵀ (+ bias)`.
    Add(Option<&'a [f32]>),
    /// `out = silu(x · gateᵀ) * (x · upᵀ)`, where the matrix is a pair.
    Gated,
    /// The largest of each row of `x · Wᵀ`; `out` is only worked in.
    Largest(PartialArgmax<'a>),
}

/// The operands of one product.
pub(super) struct Product<'a> {
    pub(super) x: Input<'a>,
    pub(super) rows: usize,
    pub(super) matrix: &'a Matrix,
    pub(super) epilogue: Epilogue<'a>,
    /// `[rows, outputs]`, or `[rows, gates]`.
    pub(super) out: &'a mut [f32],
}

/// Memory that products work in.
pub(super) struct Scratch {
    /// Packed activations.
    activations: Buffer<f32>,
    /// [`SUMS`] for each thread.
    sums: Buffer<f32>,
}

impl Scratch {
    pub(super) fn new(threads: usize) -> Result<Self, DeviceError> {
        let sums = Buffer::zeroed(threads * SUMS, "sums of a product")?;
        Ok(Self { activations: Buffer::zeroed(0, ACTIVATIONS)?, sums })
    }

    /// Makes room for products of so many rows and inputs.
    pub(super) fn fit(&mut self, rows: usize, inputs: usize) -> Result<(), DeviceError> {
        let padded = rows * inputs.next_multiple_of(2);
        if self.activations.len() < padded {
            self.activations = Buffer::zeroed(padded, ACTIVATIONS)?;
        }
        Ok(())
    }

    /// The most bytes that products take.
    pub(super) fn bytes(&self) -> usize {
        (self.activations.len() + self.sums.len()) * size_of::<f32>()
    }
}

/// The name of that memory in errors.
const ACTIVATIONS: &str = "activations of a product";

/// Computes a product. `scratch` fits its rows and inputs.
pub(super) fn linear(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'_>,
) -> Result<(), DeviceError> {
    match &product.matrix.data {
        Elements::Stored(Stored::F32(data)) => multiply::<Widened<F32>>(path, pool, scratch, product, data),
        Elements::Stored(Stored::F16(data)) => multiply::<Widened<F16>>(path, pool, scratch, product, data),
        // Only paths with dot products of bfloat16 keep it: see `Form::of`.
        Elements::Stored(Stored::Bf16(data)) => multiply::<Dots>(path, pool, scratch, product, data),
        Elements::BlockFloat(data) => multiply::<BlockFloat>(path, pool, scratch, product, data.data()),
    }
}

/// Computes a product with one micro-kernel.
fn multiply<K: MicroKernel>(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'_>,
    elements: &[K::Raw],
) -> Result<(), DeviceError> {
    let Product { x, rows, matrix, epilogue, out } = product;
    let tiling = Tiling::new(rows, K::run(path, LargestTile));
    let (activations, sums) = (Shared::new(&mut scratch.activations[..]), Shared::new(&mut scratch.sums[..]));
    PackActivations { x, inputs: matrix.shape.inputs, tiling }.run::<K>(path, pool, &activations)?;
    let out = Shared::new(out);
    let work =
        Work { tiling, activations: &activations, sums: &sums, matrix, epilogue, out: &out, thread: 0 };
    work.run::<K>(path, pool, elements)
}

/// What all tasks of one product share.
#[derive(Clone, Copy)]
struct Work<'a> {
    tiling: Tiling,
    activations: &'a Shared<'a, f32>,
    /// [`SUMS`] for each thread.
    sums: &'a Shared<'a, f32>,
    matrix: &'a Matrix,
    epilogue: Epilogue<'a>,
    out: &'a Shared<'a, f32>,
    /// The one that a task's copy is for.
    thread: usize,
}

impl Work<'_> {
    fn run<K: MicroKernel>(
        &self,
        path: Path,
        pool: &mut ThreadPool,
        elements: &[K::Raw],
    ) -> Result<(), DeviceError> {
        let panels = self.matrix.shape.panels();
        let data = Data { elements, steps: self.matrix.shape.steps() };
        // Some tasks for each thread even out their ends.
        let share = panels.div_ceil(8 * pool.threads());
        if self.tiling.tiles > 1 {
            // No pair is parted.
            let least = if self.matrix.shape.paired { 2 } else { 1 };
            let share = share.max(1).next_multiple_of(least).min(TASK_PANELS);
            let columns = panels.div_ceil(share);
            // Tasks of a band, or of less where that leaves threads without one.
            let fewest = (2 * pool.threads()).div_ceil(columns);
            let bands = K::run(path, Bands(self.tiling)).max(fewest).min(self.tiling.tiles);
            let band = self.tiling.tiles.div_ceil(bands.max(1));
            let bands = self.tiling.tiles.div_ceil(band);
            return pool.run(columns * bands, |task, thread| {
                let (column, first) = (task / bands, task % bands * band);
                let block = Blocked::<K> {
                    work: Self { thread, ..*self },
                    data,
                    panels: (column * share, panels.min((column + 1) * share)),
                    tiles: (first, self.tiling.tiles.min(first + band)),
                    // SAFETY: each thread has a part of its own, and runs one task at a time.
                    sums: unsafe { self.sums.slice_mut(thread * SUMS, SUMS) },
                };
                K::run(path, block);
            });
        }
        // Four panels or more, which a single row needs.
        let share = share.next_multiple_of(4);
        pool.run(panels.div_ceil(share), |task, thread| {
            let panels = (task * share, panels.min((task + 1) * share));
            K::run(path, SmallM::<K> { work: Self { thread, ..*self }, data, panels });
        })
    }

    /// Where the activations from step `step` on lie of the tile of `R` rows that starts with `row`.
    ///
    /// # Safety
    ///
    /// There is such a tile.
    #[inline(always)]
    unsafe fn inputs<K: MicroKernel, const R: usize>(&self, row: usize, step: usize) -> Inputs {
        let steps = self.matrix.shape.steps();
        // SAFETY: within the packed activations, by the contract.
        unsafe {
            let tile = self.activations.as_ptr().add(row * 2 * steps).cast_const();
            let powers = tile.add((steps + step / BFP_BLOCK_STEPS) * R);
            Inputs { values: tile.add(K::LAYOUT.step_words() * step * R), powers }
        }
    }

    /// Stores the sums of a row and a panel, having added the bias and what is there already, or applied the gate.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, row: usize, panel: usize, sum: S::F) {
        let (bias, add) = match self.epilogue {
            Epilogue::Set(bias) => (bias, false),
            Epilogue::Add(bias) => (bias, true),
            Epilogue::Gated => return self.gate_or_wait(s, row, panel, sum),
            Epilogue::Largest(partial) => return self.update_argmax(s, partial, row, panel, sum),
        };
        let (outputs, column) = (self.matrix.shape.outputs, panel * LANES);
        let width = LANES.min(outputs - column);
        // SAFETY: each (row, panel) belongs to one task.
        let out = unsafe { self.out.slice_mut(row * outputs + column, width) };
        let mut sum = sum;
        if let Some(bias) = bias {
            sum = s.add(sum, s.load_some(&bias[column..column + width], 0.0));
        }
        if add {
            sum = s.add(s.load_some(out, 0.0), sum);
        }
        s.store_some(out, sum);
    }

    #[inline(always)]
    fn update_argmax<S: Simd>(&self, s: S, partial: PartialArgmax<'_>, row: usize, panel: usize, sum: S::F) {
        let (thread, first) = (self.thread, panel * LANES);
        let mut lanes = [0.0; LANES];
        s.store_some(&mut lanes, sum);
        let logits = &lanes[..LANES.min(self.matrix.shape.outputs - first)];
        s.call(UpdateArgmax { partial, thread, row, first, logits });
    }

    /// Leaves gates where their results will be, until what they are for is there too: the panel after theirs, which the
    /// same task computes next.
    #[inline(always)]
    fn gate_or_wait<S: Simd>(&self, s: S, row: usize, panel: usize, sum: S::F) {
        let out = self.gated(row, panel / 2);
        if panel.is_multiple_of(2) {
            return s.store_some(out, sum);
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..out.len()].copy_from_slice(out);
        s.store_some(&mut up, sum);
        s.call(SiluMul { gate: &gate[..out.len()], up: &up[..out.len()], out });
    }

    /// Stores what comes of panel `pair` of gates and of the one after it. Unlike [`Self::finish`] it is no call of its own,
    /// so that one row's exponentials are computed while the next one's begin.
    #[inline(always)]
    fn gate<S: Simd>(&self, s: S, row: usize, pair: usize, gate: &[f32; LANES], up: &[f32; LANES]) {
        let out = self.gated(row, pair / 2);
        SiluMul { gate: &gate[..out.len()], up: &up[..out.len()], out }.run(s);
    }

    /// The place of what becomes of a row and a pair of panels.
    #[allow(clippy::mut_from_ref)] // As `Shared::slice_mut`.
    #[inline(always)]
    fn gated(&self, row: usize, pair: usize) -> &mut [f32] {
        let (gates, column) = (self.matrix.shape.outputs / 2, pair * LANES);
        // SAFETY: each (row, pair of panels) belongs to one task, which holds one such slice at a time.
        unsafe { self.out.slice_mut(row * gates + column, LANES.min(gates - column)) }
    }
}

#[cfg(test)]
mod tests;
