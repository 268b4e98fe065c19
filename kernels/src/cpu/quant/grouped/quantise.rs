//! Quantisation of a checkpoint's weights to integers of four bits.
//!
//! A scale is chosen by error: of several scales, a group has the one whose codes have the smallest squared error. All
//! operations round alike on every path, so the codes are the same on every path. A group has 32 inputs, since groups
//! of 128 inputs have errors that are larger by a fifth or more, and save only 6 % of the memory.

use std::marker::PhantomData;

use half::f16;

use super::layout::{BLOCK, GroupLayout, GroupedMatrix, LINE};
use crate::cpu::memory::Buffer;
use crate::cpu::memory::format::{Bf16, F16, F32, Format};
use crate::cpu::memory::fused_matrices::FusedMatrices;
use crate::cpu::quant::int8::widen;
use crate::cpu::quant::product::CHUNK;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, HostMatrix, WeightType};

/// The codes that the largest weight of a group may have, less the zero point, without its sign. Codes end at -8, so a
/// larger number clips the largest weights and leaves finer steps to the others.
const EXTREMES: [f32; 5] = [8.0, 7.6, 7.2, 8.4, 8.8];
/// The largest finite f16.
const MOST: f32 = 65504.0;

impl GroupedMatrix {
    /// Quantises `source` to the layout [`GroupLayout::INT4`]. Allocates nothing but the packed matrix.
    pub(in crate::cpu) fn quantise(
        path: Path,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Self, DeviceError> {
        let FusedMatrices { shape, dtype, .. } = source;
        check_groups(source)?;
        let layout = GroupLayout::INT4;
        let mut data = Buffer::zeroed(Self::len(shape, layout), "a weight matrix")?;
        source.pack(pool, &mut data, |rows, to| match dtype {
            WeightType::F32 => path.run(Panel::<F32>::new(rows, shape.inputs, to)),
            WeightType::F16 => path.run(Panel::<F16>::new(rows, shape.inputs, to)),
            WeightType::Bf16 => path.run(Panel::<Bf16>::new(rows, shape.inputs, to)),
        })?;
        Ok(Self { shape, layout, data })
    }
}

/// Returns an error if a matrix is a share of the columns that cuts a group.
pub(in crate::cpu::quant) fn check_groups(source: FusedMatrices<'_>) -> Result<(), DeviceError> {
    let is_cut =
        |matrix: &&HostMatrix<'_>| matrix.stride > matrix.columns && !matrix.columns.is_multiple_of(BLOCK);
    match source.iter().find(is_cut) {
        None => Ok(()),
        Some(HostMatrix { columns, stride, .. }) => Err(DeviceError::Unsupported(format!(
            "int4: a share of {columns} of {stride} inputs cuts a group of {BLOCK}"
        ))),
    }
}

/// Quantises the weights of one panel into `to`, which holds zeros.
struct Panel<'a, W: Format> {
    rows: &'a [Option<&'a [u8]>; LANES],
    inputs: usize,
    to: &'a mut [u8],
    format: PhantomData<W>,
}

impl<'a, W: Format> Panel<'a, W> {
    fn new(rows: &'a [Option<&'a [u8]>; LANES], inputs: usize, to: &'a mut [u8]) -> Self {
        Self { rows, inputs, to, format: PhantomData }
    }
}

impl<W: Format> Op for Panel<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, inputs, to, .. } = self;
        const LAYOUT: GroupLayout = GroupLayout::INT4;
        const { assert!(LAYOUT.group == BLOCK) };
        for (chunk, to) in to.chunks_mut(LAYOUT.chunk_bytes()).enumerate() {
            for group in 0..LAYOUT.groups() {
                let first = chunk * CHUNK + group * BLOCK;
                if first >= inputs {
                    break;
                }
                for (lane, row) in rows.iter().enumerate() {
                    let Some(row) = row else { continue };
                    let mut x = [0.0; BLOCK];
                    widen::<S, W>(s, row, first, &mut x[..(inputs - first).min(BLOCK)]);
                    let (scale, codes) = quantise(s, &x);
                    LAYOUT.store_scale(to, group, lane, scale);
                    let lines = to[LAYOUT.header() + group * (BLOCK / 8 * LINE)..].chunks_mut(LINE);
                    for (line, codes) in lines.zip(codes.as_chunks::<8>().0) {
                        for (index, to) in line[lane * 4..][..4].iter_mut().enumerate() {
                            *to = codes[index] | codes[index + 4] << 4;
                        }
                    }
                }
            }
        }
    }
}

/// Returns the scale of a group, which is an f16, and the codes of its weights. The scale is NaN if a weight is not
/// finite, so that NaN propagates.
#[inline(always)]
pub(in crate::cpu::quant) fn quantise<S: Simd>(s: S, x: &[f32; BLOCK]) -> (f32, [u8; BLOCK]) {
    let mut extreme = 0.0f32;
    for x in x {
        if !x.is_finite() {
            return (f32::NAN, [0; BLOCK]);
        }
        if x.abs() > extreme.abs() {
            extreme = *x;
        }
    }
    let lanes: [S::F; BLOCK / LANES] =
        std::array::from_fn(|block| s.load_some(&x[block * LANES..][..LANES], 0.0));
    let mut best = (f32::INFINITY, 0.0, [s.splat(0.0); BLOCK / LANES]);
    for code in EXTREMES {
        let scale = f16::from_f32((extreme / -code).clamp(-MOST, MOST)).to_f32();
        if scale == 0.0 {
            continue;
        }
        let (inverse, unit) = (s.splat(1.0 / scale), s.splat(scale));
        let (lowest, highest) = (s.splat(-8.0), s.splat(7.0));
        let mut numbers = lanes;
        let mut squares = s.splat(0.0);
        for number in &mut numbers {
            let x = *number;
            // Far beyond the codes, a path's rounding may be wrong, so numbers are clipped first.
            let clipped = s.max(s.mul(x, inverse), lowest);
            *number = s.round(s.less(clipped, highest, clipped, highest));
            let error = s.sub(x, s.mul(*number, unit));
            squares = s.add(s.mul(error, error), squares);
        }
        let error = s.sum(squares);
        if error < best.0 {
            best = (error, scale, numbers);
        }
    }
    let (_, scale, numbers) = best;
    let mut codes = [8; BLOCK];
    for (codes, numbers) in codes.chunks_mut(LANES).zip(numbers) {
        let mut lanes = [0.0; LANES];
        s.store_some(&mut lanes, numbers);
        codes.iter_mut().zip(lanes).for_each(|(code, number)| *code = (number + 8.0) as u8);
    }
    (scale, codes)
}
