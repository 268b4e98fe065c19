//! Conversion of a checkpoint's bfloat16 weights to block floating point.

use std::ops::Range;

use super::{
    BFP_BLOCK, BFP_BLOCK_STEPS, BlockFloatPanels, SUPERBLOCK_STEPS, WEIGHT_BITS, inverse, power,
    shared_exponent,
};
use crate::DeviceError;
use crate::cpu::memory::Buffer;
use crate::cpu::memory::format::STEP;
use crate::cpu::memory::fused_matrices::FusedMatrices;
use crate::cpu::simd::{LANES, from_bf16};
use crate::cpu::threads::pool::ThreadPool;

impl BlockFloatPanels {
    /// Packs matrices of bfloat16. Allocates nothing but the packed matrix.
    pub(in crate::cpu) fn pack(
        pool: &mut ThreadPool,
        source: FusedMatrices<'_>,
    ) -> Result<Self, DeviceError> {
        let mut data = Buffer::zeroed(Self::len(source.shape), "a weight matrix")?;
        source.pack(pool, data.bytes_mut(), |rows, to| pack_panel(rows, source.shape.inputs, to))?;
        Ok(Self::new(data))
    }
}

/// Bytes per line.
const LINE: usize = STEP * size_of::<u16>();

/// Fills a zeroed panel with the weights of sixteen outputs. The lanes of missing outputs stay zero.
fn pack_panel(rows: &[Option<&[u8]>; LANES], inputs: usize, panel: &mut [u8]) {
    for (superblock, lines) in panel.chunks_mut((1 + SUPERBLOCK_STEPS) * LINE).enumerate() {
        let (exponents, steps) = lines.split_at_mut(LINE);
        let blocks = steps.chunks_mut(BFP_BLOCK_STEPS * LINE).zip(exponents.as_chunks_mut::<LANES>().0);
        for (block, (steps, exponents)) in blocks.enumerate() {
            let first = (superblock * SUPERBLOCK_STEPS + block * BFP_BLOCK_STEPS) * 2;
            pack_bfp_block(rows, first..inputs.min(first + BFP_BLOCK), steps, exponents);
        }
    }
}

/// Fills one BFP block of a panel: the integers and the shared exponent of each of sixteen outputs.
fn pack_bfp_block(
    rows: &[Option<&[u8]>; LANES],
    inputs: Range<usize>,
    steps: &mut [u8],
    exponents: &mut [u8; LANES],
) {
    let steps = steps.as_chunks_mut::<4>().0.as_chunks_mut::<LANES>().0;
    for (lane, (row, exponent)) in rows.iter().zip(exponents).enumerate() {
        let Some(row) = row else { continue };
        let mut raw = [0u16; BFP_BLOCK];
        let bytes = &row[2 * inputs.start..2 * inputs.end];
        for (raw, bytes) in raw.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *raw = u16::from_le_bytes(*bytes);
        }
        let largest = raw.iter().fold(0, |largest, raw| largest.max(raw & 0x7fff));
        *exponent = shared_exponent((largest >> 7) as u8, WEIGHT_BITS);
        let to_numbers = inverse(*exponent);
        let number = |raw| rounded(from_bf16(raw) * to_numbers) as i16;
        for (step, pair) in steps.iter_mut().zip(raw.as_chunks::<2>().0) {
            let [even, odd] = pair.map(|raw| number(raw).to_le_bytes());
            step[lane] = [even[0], even[1], odd[0], odd[1]];
        }
    }
}

/// Rounds up to [`BFP_BLOCK`] weights, which were bfloat16, to the numbers that their BFP block stands for. The result
/// is not finite if a weight is not finite.
#[inline(always)]
pub(in crate::cpu) fn round_weights(block: &mut [f32]) {
    let mut largest = 0;
    for x in &*block {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    let exponent = shared_exponent((largest >> 23) as u8, WEIGHT_BITS);
    let (to_numbers, unit) = (inverse(exponent), power(exponent));
    for x in block {
        *x = rounded(*x * to_numbers) * unit;
    }
}

/// Rounds a number far below 2^22 to the nearest integer, ties to even, by adding and subtracting 1.5 * 2^23.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}
