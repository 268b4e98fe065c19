//! bfloat16 weights as block floating point, for machines without dot products of bfloat16.
//!
//! Such machines multiply 16-bit integers in pairs and add them up (`vpmaddwd`, `vpdpwssd`) faster than f32: half as
//! fast again on Zen 3. So a row of weights is cut into *spans* of [`SPAN`] inputs: integers that share an exponent.
//! Activations become the same before each product. A span's products are then summed in integers, exactly, and
//! scaled once:
//!
//! ```text
//! y[o] = Σ over spans s, in order: 2^(w_exponent[o,s] + x_exponent[s]) · Σ over inputs i of s: w[o,i] · x[i]
//! ```
//!
//! The largest weight of a span has twelve bits, all eight of bfloat16 among them; those below 2^-4 of it lose some of
//! theirs, at most 2^-12 of the largest. The largest activation has thirteen bits, and none strays by more than 2^-13 of
//! it, where bfloat16 lets that one alone stray by 2^-9: products come out closer to those of f32 than with activations
//! in bfloat16.
//!
//! All of it is exact or rounded in one way only, so the bits are the same on every instruction path, and for any
//! batch. A span lies within a rank's share of the inputs wherever that is a multiple of [`SPAN`].
//!
//! A panel consists of *lines* of 64 bytes: stretches of four spans, each a line of their exponents, a byte as f32 has it
//! for each output of each span, and then their steps, which are those of bfloat16 (see [`super::format`]) with i16 in
//! place of it.

mod pack;
mod product;
mod spans;

pub(super) use product::{Inputs, product_on};
pub(super) use spans::span;

use super::format::STEP;
use super::memory::Buffer;
use super::parts::Shape;
use super::simd::LANES;

/// Inputs that share an exponent: as many as leave bits enough for their sum.
pub(super) const SPAN: usize = 64;
/// Steps of a span.
pub(super) const SPAN_STEPS: usize = SPAN / 2;
/// Bits of the largest weight of a span.
const WEIGHT_BITS: u8 = 12;
/// Bits of the largest activation of a span.
const ACTIVATION_BITS: u8 = 13;
// Activations may round up to the next power of two. Weights, of which the largest have eight bits at first, do not.
const _: () = assert!(
    SPAN as i64 * ((1 << WEIGHT_BITS) - (1 << (WEIGHT_BITS - 8))) * (1 << ACTIVATION_BITS) <= i32::MAX as i64
);

/// Steps of a stretch, whose exponents fill a line.
pub(super) const STRETCH_STEPS: usize = 4 * SPAN_STEPS;

/// A matrix's panels.
pub(super) struct BlockFloats(Buffer<u16>);

/// Lines that so many steps take; for the first of a stretch, where its exponents are.
#[inline(always)]
pub(super) const fn lines(steps: usize) -> usize {
    steps + steps.div_ceil(STRETCH_STEPS)
}

impl BlockFloats {
    /// Elements of such a matrix. `None` where there is no number for them.
    pub(super) fn len(shape: Shape) -> Option<usize> {
        lines(shape.steps()).checked_mul(STEP)?.checked_mul(shape.panels())
    }

    /// Those that lie in `data`, which is as long as [`Self::len`] says.
    pub(super) fn new(data: Buffer<u16>) -> Self {
        Self(data)
    }

    /// Panels of lines.
    pub(super) fn data(&self) -> &[u16] {
        &self.0
    }

    /// The same as bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// One output's weights, in `out`, which is as long as there are inputs.
    pub(super) fn read_row(&self, output: usize, out: &mut [f32]) {
        let (len, lane) = (lines(out.len().div_ceil(2)) * STEP, output % LANES);
        let panel = &self.0[output / LANES * len..][..len];
        for (out, stretch) in out.chunks_mut(2 * STRETCH_STEPS).zip(panel.chunks((1 + STRETCH_STEPS) * STEP))
        {
            let (exponents, steps) = stretch.split_at(STEP);
            for (span, out) in out.chunks_mut(SPAN).enumerate() {
                let at = span * LANES + lane;
                let scale = power(exponents[at / 2].to_le_bytes()[at % 2]);
                for (input, out) in out.iter_mut().enumerate() {
                    let number = steps[(span * SPAN_STEPS + input / 2) * STEP + 2 * lane + input % 2];
                    *out = f32::from(number.cast_signed()) * scale;
                }
            }
        }
    }
}

/// 2 to the power that a byte stands for in the exponent of an f32; infinity for 255.
fn power(exponent: u8) -> f32 {
    f32::from_bits(u32::from(exponent) << 23)
}

/// The exponent, as f32 has it, with which a span's largest magnitude, of which this is the exponent, has so many bits. What
/// is not finite keeps the exponent that says so. Zeros, and what is subnormal, are zero times zero: small powers would make
/// subnormal products of powers, which are slow.
fn shared_exponent(largest: u8, bits: u8) -> u8 {
    match largest {
        0 | u8::MAX => largest,
        _ => largest.saturating_sub(bits - 1).max(1),
    }
}

/// What turns the numbers of a span into integers: its power of two, inverted.
fn inverse(exponent: u8) -> f32 {
    power(254 - exponent.min(253))
}
