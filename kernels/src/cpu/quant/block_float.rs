//! Block floating point (BFP): bfloat16 weights as integers with shared exponents, for machines without dot products of
//! bfloat16.
//!
//! Such machines multiply pairs of 16-bit integers and add the products (`vpmaddwd`, `vpdpwssd`) faster than they
//! multiply f32. A row of weights is cut into *BFP blocks* of [`BFP_BLOCK`] inputs: integers that share an exponent.
//! Activations are converted to the same form before each matrix product. The products within a BFP block are summed
//! exactly in integers, and the sum is scaled once:
//!
//! ```text
//! y[o] = Σ over blocks b, in order: 2^(w_exponent[o,b] + x_exponent[b]) · Σ over inputs i of b: w[o,i] · x[i]
//! ```
//!
//! Here, `o` is an output, `w` and `x` are the integers of the weights and the activations, and `w_exponent` and
//! `x_exponent` are the exponents that they share within a BFP block. The integer of a block's largest weight has
//! twelve bits, so it keeps all eight significant bits of the bfloat16 weight. A weight below 2^-4 of the largest can
//! lose low bits: the error of such a weight is at most 2^-12 of the largest weight. The integer of a block's largest
//! activation has thirteen bits, so an activation's error is at most 2^-13 of the largest activation. By comparison,
//! rounding to bfloat16 can change the largest activation by up to 2^-8 of its value. Products in block floating point
//! are therefore closer to f32 products than products with bfloat16 activations are.
//!
//! Each operation is either exact or has one defined rounding, so the bits are the same on every instruction path and
//! in any batch. A rank's share of the inputs consists of whole BFP blocks if the share's length is a multiple of
//! [`BFP_BLOCK`].
//!
//! A panel is a sequence of *lines* of 64 bytes, grouped into *superblocks* of four BFP blocks. A superblock is one
//! line of exponents (a byte per output and BFP block, biased as in f32) and then the steps of its BFP blocks. A step
//! is laid out as in bfloat16 (see [`crate::cpu::memory::format`]), with i16 elements.

mod bfp_block;
mod corrections;
mod pack;
mod product;

pub(in crate::cpu) use bfp_block::{BfpBlock, round_activations};
pub(in crate::cpu) use corrections::{Corrections, Marks};
pub(in crate::cpu) use pack::round_weights;
pub(in crate::cpu) use product::{Inputs, product_on};

use crate::cpu::memory::Buffer;
use crate::cpu::memory::format::STEP;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::simd::LANES;

/// Number of inputs that share an exponent. With more inputs, the sum of `w * x` over a block could overflow an i32.
pub(in crate::cpu) const BFP_BLOCK: usize = 64;
/// Number of steps per BFP block.
pub(in crate::cpu) const BFP_BLOCK_STEPS: usize = BFP_BLOCK / 2;
/// Number of bits, without the sign, of the integer that the largest weight of a BFP block becomes.
const WEIGHT_BITS: u8 = 12;
/// Number of bits, without the sign, of the integer that the largest activation of a BFP block becomes.
const ACTIVATION_BITS: u8 = 13;
// The largest sum of a BFP block fits an i32. The integer of an activation may round up to 2^`ACTIVATION_BITS`. The
// integer of the largest weight has at most eight significant bits, so it stays below 2^`WEIGHT_BITS` by at least
// 2^(`WEIGHT_BITS` - 8).
const _: () = assert!(
    BFP_BLOCK as i64 * ((1 << WEIGHT_BITS) - (1 << (WEIGHT_BITS - 8))) * (1 << ACTIVATION_BITS)
        <= i32::MAX as i64
);

/// Number of steps per superblock, whose exponents fill one line.
pub(in crate::cpu) const SUPERBLOCK_STEPS: usize = 4 * BFP_BLOCK_STEPS;

/// The panels of a weight matrix in block floating point.
pub(in crate::cpu) struct BlockFloatPanels(Buffer<u16>);

/// Number of lines that `steps` steps take. If `steps` is the index of a superblock's first step, the result is the
/// index of the superblock's line of exponents.
#[inline(always)]
pub(in crate::cpu) const fn lines(steps: usize) -> usize {
    steps + steps.div_ceil(SUPERBLOCK_STEPS)
}

impl BlockFloatPanels {
    /// Number of elements of a matrix of this shape; `None` if it overflows.
    pub(in crate::cpu) fn len(shape: Shape) -> Option<usize> {
        lines(shape.steps()).checked_mul(STEP)?.checked_mul(shape.panels())
    }

    /// Wraps packed panels. `data` has [`Self::len`] elements.
    pub(in crate::cpu) fn new(data: Buffer<u16>) -> Self {
        Self(data)
    }

    /// The elements of all panels, in order.
    pub(in crate::cpu) fn data(&self) -> &[u16] {
        &self.0
    }

    /// The elements as bytes.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// Converts the weights of one output from block floating point to f32. `out` receives one weight per input, in the
    /// order of the inputs.
    pub(in crate::cpu) fn read_row(&self, output: usize, out: &mut [f32]) {
        let (len, lane) = (lines(out.len().div_ceil(2)) * STEP, output % LANES);
        let panel = &self.0[output / LANES * len..][..len];
        for (out, superblock) in
            out.chunks_mut(2 * SUPERBLOCK_STEPS).zip(panel.chunks((1 + SUPERBLOCK_STEPS) * STEP))
        {
            let (exponents, steps) = superblock.split_at(STEP);
            for (block, out) in out.chunks_mut(BFP_BLOCK).enumerate() {
                let at = block * LANES + lane;
                let scale = power(exponents[at / 2].to_le_bytes()[at % 2]);
                for (input, out) in out.iter_mut().enumerate() {
                    let number = steps[(block * BFP_BLOCK_STEPS + input / 2) * STEP + 2 * lane + input % 2];
                    *out = f32::from(number.cast_signed()) * scale;
                }
            }
        }
    }
}

/// The f32 with this biased exponent and a mantissa of zero: a power of two, or infinity for 255.
fn power(exponent: u8) -> f32 {
    f32::from_bits(u32::from(exponent) << 23)
}

/// Returns the shared exponent of a BFP block, biased as in f32. `largest` is the biased exponent of the block's
/// largest magnitude. Divided by the shared exponent's power of two, this magnitude has `bits` integer bits, or fewer
/// if the shared exponent was raised to 1.
///
/// A `largest` of 255 (an infinity or NaN) gives 255, so that the infinity or NaN propagates. A `largest` of 0 (only
/// zeros and subnormals) gives 0, a scale of zero, because products of two tiny scales would be subnormal, which is
/// slow.
fn shared_exponent(largest: u8, bits: u8) -> u8 {
    match largest {
        0 | u8::MAX => largest,
        _ => largest.saturating_sub(bits - 1).max(1),
    }
}

/// The reciprocal of a shared exponent's power of two: the factor that turns the numbers of a BFP block into integers.
fn inverse(exponent: u8) -> f32 {
    power(254 - exponent.min(253))
}
