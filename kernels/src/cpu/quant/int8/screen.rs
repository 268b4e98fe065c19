//! The screen of an LM head: a copy of the head in eight bits, and norms that bound the difference between the logits
//! of the copy and of the head (see [`crate::cpu::sampling::screen`]).

use std::fs::File;
use std::marker::PhantomData;

use super::format::{GROUP, Int8Matrix, SCALES, group_bytes};
use super::pack::{pack_group, widen};
use super::quantise::{Rounded, round_lanes};
use crate::cpu::gemm::Layout;
use crate::cpu::gemm::input::Input;
use crate::cpu::memory::format::{Bf16, F16, F32, Format};
use crate::cpu::memory::fused_matrices::{FusedMatrices, Shape};
use crate::cpu::memory::matrix::Form;
use crate::cpu::memory::{Buffer, Shared, Weights};
use crate::cpu::quant::block_float::{self, BFP_BLOCK};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, WeightType};

/// The name of a screen's memory in errors.
const WHAT: &str = "the screen of an LM head";

/// The screen of an LM head: a copy in eight bits, and the norms for the error bounds of its logits.
pub(in crate::cpu) struct Screen {
    /// The head in eight bits. The buffer holds the two norms of each panel after the panels.
    head: Weights,
    /// For each panel, an upper bound of the norms of its outputs' weights, in the form that the exact product reads
    /// (block floating point, for example).
    pub(in crate::cpu) weights: Box<[f32]>,
    /// For each panel, an upper bound of the norms of the differences between its outputs' weights and the same weights
    /// in eight bits.
    pub(in crate::cpu) errors: Box<[f32]>,
    /// The largest of `weights` plus the largest of `errors`.
    pub(in crate::cpu) most: f32,
}

impl Screen {
    /// Size in bytes of the screen of a head of this shape; `None` if it overflows.
    pub(in crate::cpu) fn len(shape: Shape) -> Option<usize> {
        Int8Matrix::len(shape)?.checked_add(2 * shape.panels() * size_of::<f32>())
    }

    /// Packs the screen of a head that is packed in the given form. Returns `None` if a weight of the head or its
    /// square is not finite.
    pub(in crate::cpu) fn pack(
        path: Path,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
        form: Form,
    ) -> Result<Option<Self>, DeviceError> {
        let (shape, panels) = (source.shape, source.shape.panels());
        let mut data = Buffer::zeroed(Self::len(shape), WHAT)?;
        let packed = Int8Matrix::len(shape).unwrap_or_default();
        let (packed, norms) = data.split_at_mut(packed);
        let (weights, errors) = norms.as_chunks_mut::<4>().0.split_at_mut(panels);
        let panel_bytes = packed.len() / panels.max(1);
        let (packed, weights, errors) = (Shared::new(packed), Shared::new(weights), Shared::new(errors));
        pool.run(panels, |panel, _| {
            let rows = &source.rows(panel);
            // SAFETY: each task accesses only its own panel and the panel's two norms.
            let (to, [weight, error]) = unsafe {
                let norms = [weights.slice_mut(panel, 1), errors.slice_mut(panel, 1)];
                (packed.slice_mut(panel * panel_bytes, panel_bytes), norms.map(|norm| &mut norm[0]))
            };
            let inputs = shape.inputs;
            let norms = match source.dtype {
                WeightType::F32 => {
                    path.run_int8(Panel::<F32> { rows, inputs, form, to, format: PhantomData })
                }
                WeightType::F16 => {
                    path.run_int8(Panel::<F16> { rows, inputs, form, to, format: PhantomData })
                }
                WeightType::Bf16 => {
                    path.run_int8(Panel::<Bf16> { rows, inputs, form, to, format: PhantomData })
                }
            };
            [*weight, *error] = norms.map(f32::to_le_bytes);
        })?;
        Ok(Self::of(shape, data))
    }

    /// Maps a packed screen: the [`Self::len`] bytes of `file` from offset `from` on.
    pub(in crate::cpu) fn mapped(file: &File, from: u64, shape: Shape) -> Result<Option<Self>, DeviceError> {
        Ok(Self::of(shape, Buffer::mapped(file, from, Self::len(shape), WHAT)?))
    }

    /// The screen in `data`; `None` if a norm is not finite.
    fn of(shape: Shape, data: Buffer<u8>) -> Option<Self> {
        let norms = data.get(Int8Matrix::len(shape)?..)?.as_chunks::<4>().0;
        let (weights, errors) = norms.split_at_checked(shape.panels())?;
        let numbers =
            |norms: &[[u8; 4]]| norms.iter().copied().map(f32::from_le_bytes).collect::<Box<[f32]>>();
        let (weights, errors) = (numbers(weights), numbers(errors));
        let finite = weights.iter().chain(&errors).all(|norm| norm.is_finite());
        let largest = |norms: &[f32]| norms.iter().copied().fold(0.0, f32::max);
        let most = largest(&weights) + largest(&errors);
        finite.then(|| Self { head: Weights::Int8(Int8Matrix { shape, data }), weights, errors, most })
    }

    /// The head in eight bits.
    pub(in crate::cpu) fn head(&self) -> &Weights {
        &self.head
    }

    /// The [`Self::len`] packed bytes.
    pub(in crate::cpu) fn packed(&self) -> &[u8] {
        self.head.packed()
    }

    /// Size in bytes.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        self.packed().len() + size_of_val(&self.weights[..]) + size_of_val(&self.errors[..])
    }
}

/// Quantises the weights of one panel into `to`. Returns the panel's two norms: infinities if a weight is not finite.
struct Panel<'a, W: Format> {
    rows: &'a [Option<&'a [u8]>; LANES],
    inputs: usize,
    form: Form,
    to: &'a mut [u8],
    format: PhantomData<W>,
}

impl<W: Format> Op for Panel<'_, W> {
    type Output = [f32; 2];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f32; 2] {
        let mut quantised = [[0; GROUP]; LANES];
        // Sums of squares of each output's weights, and of their quantisation errors.
        let (mut weights, mut errors) = ([s.splat(0.0); LANES], [s.splat(0.0); LANES]);
        for (group, to) in self.to.chunks_mut(group_bytes(GROUP)).enumerate() {
            let first = group * GROUP;
            let inputs = (self.inputs - first).min(GROUP);
            pack_group::<S, W>(s, self.rows, (first, inputs), &mut quantised, to);
            let scales = to[..SCALES].as_chunks::<4>().0;
            for (lane, row) in self.rows.iter().enumerate() {
                let Some(row) = row else { continue };
                let mut x = [0.0; GROUP];
                widen::<S, W>(s, row, first, &mut x[..inputs]);
                if self.form == Form::BlockFloat {
                    for block in x.chunks_mut(BFP_BLOCK) {
                        block_float::round_weights(block);
                    }
                }
                let scale = s.splat(f32::from_le_bytes(scales[lane]));
                let mut numbers = [0.0; GROUP];
                for (number, quantised) in numbers.iter_mut().zip(&quantised[lane]) {
                    *number = f32::from(*quantised);
                }
                for (x, numbers) in x.chunks(LANES).zip(numbers.chunks(LANES)) {
                    let x = s.load_some(x, 0.0);
                    let error = s.sub(x, s.mul(s.load_some(numbers, 0.0), scale));
                    weights[lane] = s.fma(x, x, weights[lane]);
                    errors[lane] = s.fma(error, error, errors[lane]);
                }
            }
        }
        let mut largest = [0.0f32; 2];
        for (lane, row) in self.rows.iter().enumerate() {
            let norms = [norm(s.sum(weights[lane]), self.inputs), norm(s.sum(errors[lane]), self.inputs)];
            if row.is_some() && !norms.iter().all(|norm| norm.is_finite()) {
                return [f32::INFINITY; 2];
            }
            largest = [largest[0].max(norms[0]), largest[1].max(norms[1])];
        }
        largest
    }
}

/// Returns an upper bound of the norm of `inputs` numbers, given their sum of squares. The factor covers the roundings
/// of the sum. The added term covers squares that underflow, and denormal numbers that a dot-product instruction
/// flushes. If a number is not finite, the result is not finite.
#[inline(always)]
fn norm(squares: f32, inputs: usize) -> f32 {
    const FACTOR: f32 = 1.0 + 1.0 / 1024.0;
    // 2^-74, the square root of the smallest positive f32, rounded up.
    const PER_INPUT: f32 = f32::from_bits((127 - 74) << 23);
    squares.sqrt() * FACTOR + inputs as f32 * PER_INPUT
}

/// Upper bounds of the norms of one row of activations. If an activation is not finite, the bounds are not finite.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct RowNorms {
    /// Norm of the activations as they are packed for the exact product: rounded to bfloat16, for example.
    pub(in crate::cpu) exact: f32,
    /// Norm of the activations in eight bits.
    pub(in crate::cpu) quantised: f32,
    /// Norm of the difference between the exact and the quantised activations.
    pub(in crate::cpu) difference: f32,
}

impl RowNorms {
    /// Measures row `row` of `x`, which has `inputs` inputs and is packed in `layout` for the exact product.
    pub(in crate::cpu) fn of(path: Path, x: Input<'_>, row: usize, inputs: usize, layout: Layout) -> Self {
        path.run_int8(Row { x, row, inputs, layout })
    }
}

/// Computes the [`RowNorms`] of one row.
struct Row<'a> {
    x: Input<'a>,
    row: usize,
    inputs: usize,
    layout: Layout,
}

impl Op for Row<'_> {
    type Output = RowNorms;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> RowNorms {
        let [row] = self.x.rows::<S, 1>(s, self.row, self.inputs);
        let [mut exact, mut quantised, mut difference] = [s.splat(0.0); 3];
        for group in 0..self.inputs.div_ceil(GROUP) {
            let mut x = [s.splat(0.0); GROUP / LANES];
            for (block, x) in x.iter_mut().enumerate() {
                *x = row.load(s, group * GROUP + block * LANES);
            }
            let Rounded { scale, numbers } = round_lanes(s, x);
            let scale = s.splat(scale);
            let numbers = numbers.as_chunks::<{ BFP_BLOCK / LANES }>().0;
            for (x, numbers) in x.as_chunks::<{ BFP_BLOCK / LANES }>().0.iter().zip(numbers) {
                for (x, number) in self.layout.round(s, *x).into_iter().zip(*numbers) {
                    let number = s.mul(number, scale);
                    let error = s.sub(x, number);
                    exact = s.fma(x, x, exact);
                    quantised = s.fma(number, number, quantised);
                    difference = s.fma(error, error, difference);
                }
            }
        }
        RowNorms {
            exact: norm(s.sum(exact), self.inputs),
            quantised: norm(s.sum(quantised), self.inputs),
            difference: norm(s.sum(difference), self.inputs),
        }
    }
}

#[cfg(test)]
mod tests;
