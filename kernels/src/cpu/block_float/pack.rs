//! Turns the bfloat16 weights of a checkpoint into block floating point.

use super::super::format::STEP;
use super::super::matrix::panel_rows;
use super::super::memory::{Buffer, Shared};
use super::super::pool::ThreadPool;
use super::super::simd::{LANES, from_bf16};
use super::{BlockFloats, SPAN, SPAN_STEPS, inverse, shared_exponent, spans};
use crate::{DeviceError, HostMatrix};

impl BlockFloats {
    /// Packs `parts` of bfloat16, one below the other or [`paired`](panel_rows), into so many panels. Beside the
    /// matrix nothing is allocated.
    pub(in super::super) fn pack(
        pool: &mut ThreadPool,
        parts: &[HostMatrix<'_>],
        paired: bool,
        panels: usize,
        inputs: usize,
    ) -> Result<Self, DeviceError> {
        const WHAT: &str = "a weight matrix";
        let too_much = DeviceError::OutOfMemory { what: WHAT, wanted: usize::MAX };
        let len = Self::len(panels, inputs).ok_or(too_much)?;
        let mut packed = Self::new(Buffer::zeroed(len, WHAT)?, panels, inputs);
        let (steps, elements) = (inputs.div_ceil(2), packed.elements);
        let (numbers, exponents) = packed.data.bytes_mut().split_at_mut(elements * size_of::<u16>());
        let (numbers, exponents) = (Shared::new(numbers), Shared::new(exponents));
        pool.run(panels, |panel, _| {
            let (bytes, exponent_bytes) = (steps * STEP * size_of::<u16>(), spans(inputs) * LANES);
            // SAFETY: each task has a panel to itself.
            let (numbers, exponents) = unsafe {
                (numbers.part(panel * bytes, bytes), exponents.part(panel * exponent_bytes, exponent_bytes))
            };
            pack_panel(&panel_rows(parts, paired, panel), inputs, numbers, exponents);
        })?;
        Ok(packed)
    }
}

/// Fills a zeroed panel with these outputs; those that are missing stay zeros.
fn pack_panel(rows: &[Option<&[u8]>; LANES], inputs: usize, numbers: &mut [u8], exponents: &mut [u8]) {
    let spans = numbers.chunks_mut(SPAN_STEPS * STEP * 2).zip(exponents.as_chunks_mut::<LANES>().0);
    for (span, (numbers, exponents)) in spans.enumerate() {
        let here = (inputs - span * SPAN).min(SPAN);
        let steps = numbers.as_chunks_mut::<4>().0.as_chunks_mut::<LANES>().0;
        for (lane, (row, exponent)) in rows.iter().zip(exponents).enumerate() {
            let Some(row) = row else { continue };
            let mut raw = [0u16; SPAN];
            let bytes = &row[2 * span * SPAN..][..2 * here];
            for (raw, bytes) in raw.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *raw = u16::from_le_bytes(*bytes);
            }
            let largest = raw.iter().fold(0, |largest, raw| largest.max(raw & 0x7fff));
            *exponent = shared_exponent((largest >> 7) as u8);
            let to_numbers = inverse(*exponent);
            // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
            const MAGIC: f32 = 12_582_912.0;
            let number = |raw| ((from_bf16(raw) * to_numbers + MAGIC) - MAGIC) as i16;
            for (step, pair) in steps.iter_mut().zip(raw.as_chunks::<2>().0) {
                let [even, odd] = pair.map(|raw| number(raw).to_le_bytes());
                step[lane] = [even[0], even[1], odd[0], odd[1]];
            }
        }
    }
}
