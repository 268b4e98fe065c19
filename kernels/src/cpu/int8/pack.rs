//! Quantises the weights of a checkpoint into panels.

use std::fs::File;
use std::marker::PhantomData;

use super::super::format::{Bf16, F16, F32, Format};
use super::super::isa::Path;
use super::super::matrix::{check, panel_rows, panels};
use super::super::memory::{Buffer, Shared};
use super::super::pool::ThreadPool;
use super::super::simd::{LANES, Op, Simd};
use super::quantise::quantise;
use super::{GROUP, Int8Matrix, OFFSET, PAD, group_bytes, panel_bytes, place};
use crate::{DeviceError, HostMatrix, WeightType};

impl Int8Matrix {
    /// Bytes of such a matrix. `None` where there is no number for them.
    pub(in super::super) fn len(outputs: usize, inputs: usize, paired: bool) -> Option<usize> {
        panels(outputs, paired).checked_mul(panel_bytes(inputs))
    }

    /// One that was packed before, in place in a file from byte `from` on, where [`Self::len`] bytes are.
    pub(in super::super) fn mapped(
        file: &File,
        from: u64,
        (outputs, inputs): (usize, usize),
        paired: bool,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "a packed weight matrix";
        let too_much = DeviceError::OutOfMemory { what: WHAT, wanted: usize::MAX };
        let len = Self::len(outputs, inputs, paired).ok_or(too_much)?;
        Ok(Self { outputs, inputs, paired, data: Buffer::mapped(file, from, len, WHAT)? })
    }

    /// Quantises `parts`, one below the other or [`paired`](panel_rows). Beside the matrix nothing is allocated.
    pub(in super::super) fn pack(
        path: Path,
        pool: &mut ThreadPool,
        parts: &[HostMatrix<'_>],
        paired: bool,
    ) -> Result<Self, DeviceError> {
        let (outputs, inputs, dtype) = check(parts, paired)?;
        let wanted = DeviceError::OutOfMemory { what: "a weight matrix", wanted: usize::MAX };
        let bytes = Self::len(outputs, inputs, paired).ok_or(wanted)?;
        let mut matrix = Self { outputs, inputs, paired, data: Buffer::zeroed(bytes, "a weight matrix")? };
        let panels = matrix.panels();
        let data = Shared::new(&mut matrix.data);
        pool.run(panels, |panel, _| {
            // SAFETY: each task has a panel to itself.
            let to = unsafe { data.part(panel * panel_bytes(inputs), panel_bytes(inputs)) };
            let rows = panel_rows(parts, paired, panel);
            match dtype {
                WeightType::F32 => path.run_int8(Panel::<F32> { rows, inputs, to, format: PhantomData }),
                WeightType::F16 => path.run_int8(Panel::<F16> { rows, inputs, to, format: PhantomData }),
                WeightType::Bf16 => path.run_int8(Panel::<Bf16> { rows, inputs, to, format: PhantomData }),
            }
        })?;
        Ok(matrix)
    }
}

/// One panel to be filled.
struct Panel<'a, W: Format> {
    rows: [Option<&'a [u8]>; LANES],
    inputs: usize,
    to: &'a mut [u8],
    format: PhantomData<W>,
}

impl<W: Format> Op for Panel<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut quantised = [[0; GROUP]; LANES];
        for (group, to) in self.to.chunks_mut(group_bytes(GROUP)).enumerate() {
            let first = group * GROUP;
            let inputs = (self.inputs - first).min(GROUP);
            let (scales, weights) = to.split_at_mut(super::SCALES);
            for ((row, quantised), scale) in
                self.rows.iter().zip(&mut quantised).zip(scales.as_chunks_mut::<4>().0)
            {
                let mut x = [0.0; GROUP];
                if let Some(row) = row {
                    widen::<S, W>(s, row, first, &mut x[..inputs]);
                }
                *scale = quantise(s, &x[..inputs], quantised).to_le_bytes();
            }
            for input in (0..inputs.next_multiple_of(PAD)).step_by(S::DOT_INPUTS) {
                for (lane, row) in quantised.iter().enumerate() {
                    let at = place(input, lane, S::DOT_INPUTS);
                    let step = &mut weights[at..at + S::DOT_INPUTS];
                    for (to, q) in step.iter_mut().zip(&row[input..]) {
                        *to = q.cast_unsigned() ^ OFFSET;
                    }
                }
            }
        }
    }
}

/// A row's elements from `first` on.
#[inline(always)]
fn widen<S: Simd, W: Format>(s: S, row: &[u8], first: usize, out: &mut [f32]) {
    for (block, out) in out.chunks_mut(LANES).enumerate() {
        // By way of an array, since files align nothing.
        let mut raw = [W::narrow(0.0); LANES];
        for (i, raw) in raw[..out.len()].iter_mut().enumerate() {
            *raw = W::read(row, first + block * LANES + i);
        }
        // SAFETY: `raw` holds sixteen.
        s.store_some(out, unsafe { W::load_row(s, raw.as_ptr()) });
    }
}
