//! Turns the bfloat16 weights of a checkpoint into block floating point.

use std::ops::Range;

use super::super::format::STEP;
use super::super::memory::Buffer;
use super::super::parts::Parts;
use super::super::pool::ThreadPool;
use super::super::simd::{LANES, from_bf16};
use super::{BlockFloats, SPAN, SPAN_STEPS, STRETCH_STEPS, WEIGHT_BITS, inverse, shared_exponent};
use crate::DeviceError;

impl BlockFloats {
    /// Packs parts of bfloat16. Beside the matrix nothing is allocated.
    pub(in super::super) fn pack(pool: &mut ThreadPool, parts: Parts<'_>) -> Result<Self, DeviceError> {
        let mut data = Buffer::zeroed(Self::len(parts.shape), "a weight matrix")?;
        parts.pack(pool, data.bytes_mut(), |rows, to| pack_panel(rows, parts.shape.inputs, to))?;
        Ok(Self::new(data))
    }
}

/// Bytes of a line.
const LINE: usize = STEP * size_of::<u16>();

/// Fills a zeroed panel with these outputs; those that are missing stay zeros.
fn pack_panel(rows: &[Option<&[u8]>; LANES], inputs: usize, panel: &mut [u8]) {
    for (stretch, lines) in panel.chunks_mut((1 + STRETCH_STEPS) * LINE).enumerate() {
        let (exponents, steps) = lines.split_at_mut(LINE);
        let spans = steps.chunks_mut(SPAN_STEPS * LINE).zip(exponents.as_chunks_mut::<LANES>().0);
        for (span, (steps, exponents)) in spans.enumerate() {
            let first = (stretch * STRETCH_STEPS + span * SPAN_STEPS) * 2;
            pack_span(rows, first..inputs.min(first + SPAN), steps, exponents);
        }
    }
}

fn pack_span(
    rows: &[Option<&[u8]>; LANES],
    inputs: Range<usize>,
    steps: &mut [u8],
    exponents: &mut [u8; LANES],
) {
    let steps = steps.as_chunks_mut::<4>().0.as_chunks_mut::<LANES>().0;
    for (lane, (row, exponent)) in rows.iter().zip(exponents).enumerate() {
        let Some(row) = row else { continue };
        let mut raw = [0u16; SPAN];
        let bytes = &row[2 * inputs.start..2 * inputs.end];
        for (raw, bytes) in raw.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *raw = u16::from_le_bytes(*bytes);
        }
        let largest = raw.iter().fold(0, |largest, raw| largest.max(raw & 0x7fff));
        *exponent = shared_exponent((largest >> 7) as u8, WEIGHT_BITS);
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
