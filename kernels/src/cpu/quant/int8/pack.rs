//! Quantisation of a checkpoint's weights into panels.

use std::fs::File;
use std::marker::PhantomData;

use super::format::{GROUP, Int8Matrix, OFFSET, PAD, SCALES, group_bytes, panel_bytes, weight_index};
use super::quantise::quantise;
use crate::cpu::memory::Buffer;
use crate::cpu::memory::format::{Bf16, F16, F32, Format};
use crate::cpu::memory::fused_matrices::{FusedMatrices, Shape};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, WeightType};

impl Int8Matrix {
    /// Size in bytes of a matrix of this shape; `None` if it overflows.
    pub(in crate::cpu) fn len(shape: Shape) -> Option<usize> {
        shape.panels().checked_mul(panel_bytes(shape.inputs))
    }

    /// Maps a packed matrix: the [`Self::len`] bytes of `file` from `from` on.
    pub(in crate::cpu) fn mapped(file: &File, from: u64, shape: Shape) -> Result<Self, DeviceError> {
        Ok(Self { shape, data: Buffer::mapped(file, from, Self::len(shape), "a packed weight matrix")? })
    }

    /// Quantises `source`. Allocates nothing but the packed matrix.
    pub(in crate::cpu) fn pack(
        path: Path,
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Self, DeviceError> {
        let FusedMatrices { shape, dtype, .. } = source;
        let mut data = Buffer::zeroed(Self::len(shape), "a weight matrix")?;
        source.pack(pool, &mut data, |rows, to| match dtype {
            WeightType::F32 => path.run_int8(Panel::<F32>::new(rows, shape.inputs, to)),
            WeightType::F16 => path.run_int8(Panel::<F16>::new(rows, shape.inputs, to)),
            WeightType::Bf16 => path.run_int8(Panel::<Bf16>::new(rows, shape.inputs, to)),
        })?;
        Ok(Self { shape, data })
    }
}

/// Quantises the weights of one panel into `to`.
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
        let mut quantised = [[0; GROUP]; LANES];
        for (group, to) in self.to.chunks_mut(group_bytes(GROUP)).enumerate() {
            let first = group * GROUP;
            let inputs = (self.inputs - first).min(GROUP);
            pack_group::<S, W>(s, self.rows, (first, inputs), &mut quantised, to);
        }
    }
}

/// Quantises inputs `first .. first + inputs` of a panel's rows into one group of the panel, `to`. `quantised` receives
/// the quantised numbers of each row, and zeros for a missing row.
#[inline(always)]
pub(super) fn pack_group<S: Simd, W: Format>(
    s: S,
    rows: &[Option<&[u8]>; LANES],
    (first, inputs): (usize, usize),
    quantised: &mut [[i8; GROUP]; LANES],
    to: &mut [u8],
) {
    let (scales, weights) = to.split_at_mut(SCALES);
    for ((row, quantised), scale) in rows.iter().zip(&mut *quantised).zip(scales.as_chunks_mut::<4>().0) {
        let mut x = [0.0; GROUP];
        if let Some(row) = row {
            widen::<S, W>(s, row, first, &mut x[..inputs]);
        }
        *scale = quantise(s, &x[..inputs], quantised).to_le_bytes();
    }
    for input in (0..inputs.next_multiple_of(PAD)).step_by(S::DOT_INPUTS) {
        for (lane, row) in quantised.iter().enumerate() {
            let at = weight_index(input, lane, S::DOT_INPUTS);
            let step = &mut weights[at..at + S::DOT_INPUTS];
            for (to, q) in step.iter_mut().zip(&row[input..]) {
                *to = q.cast_unsigned() ^ OFFSET;
            }
        }
    }
}

/// Writes a row's elements from `first` on to `out`, as f32.
#[inline(always)]
pub(in crate::cpu::quant) fn widen<S: Simd, W: Format>(s: S, row: &[u8], first: usize, out: &mut [f32]) {
    for (block, out) in out.chunks_mut(LANES).enumerate() {
        // The bytes of a file may be unaligned, so they are copied to an array.
        let mut raw = [W::narrow(0.0); LANES];
        for (i, raw) in raw[..out.len()].iter_mut().enumerate() {
            *raw = W::read(row, first + block * LANES + i);
        }
        // SAFETY: `raw` holds sixteen elements.
        s.store_some(out, unsafe { W::load_row(s, raw.as_ptr()) });
    }
}
