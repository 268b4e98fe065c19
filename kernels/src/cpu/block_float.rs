//! bfloat16 weights as block floating point, for machines without bfloat16 dot products.
//!
//! Such machines multiply and add 16-bit integers in pairs (`vpmaddwd`, `vpdpwssd`) at up to twice the rate of f32. So a
//! row of weights is cut into *spans* of [`SPAN`] inputs, whose numbers share an exponent and are integers of it with
//! [`BITS`] bits and a sign. Activations become the same at the door of each product. A span's products are then summed in
//! integers, exactly, and scaled once:
//!
//! ```text
//! y[o] = Σ over spans s, in order: 2^(w_exponent[o,s] + x_exponent[s]) · Σ over inputs i of s: w[o,i] · x[i]
//! ```
//!
//! The largest number of a span keeps at least thirteen significant bits, where bfloat16 has eight; what is less than 2^-5
//! of it keeps fewer bits than it had. No number strays by more than 2^-13 of its span's largest, which bfloat16
//! itself allows that one up to 2^-9: activations in spans are closer to f32 than activations in bfloat16. What weights
//! lose is far below what their rounding to bfloat16 took, unless all large weights of a span happen to be exact.
//!
//! All of it is exact or rounded in one way only, so the bits are the same on every instruction path, and for any
//! batch. A span lies within a rank's share of the inputs wherever that is a multiple of [`SPAN`].
//!
//! Panels and steps are those of bfloat16 (see [`super::format`]), with i16 in place of it; behind them lie the
//! exponents, a byte as f32 has it for each output of each span of each panel.

mod pack;
mod product;
mod spans;

pub(super) use product::{Factors, product_on};
pub(super) use spans::span;

use super::format::STEP;
use super::memory::Buffer;
use super::simd::LANES;

/// Inputs that share an exponent. With twice as many, sums would need a bit more than there is.
pub(super) const SPAN: usize = 32;
/// Steps of a span.
pub(super) const SPAN_STEPS: usize = SPAN / 2;
/// Of the largest magnitude in a span. `SPAN * 2^BITS * (2^BITS - 1)` fits into 31 bits, and weights, which have eight
/// bits at first, never round up to `2^BITS`.
const BITS: u32 = 13;

/// The numbers of a matrix of `[panels, steps]`, then their exponents.
pub(super) struct BlockFloats {
    data: Buffer<u16>,
    /// Where exponents begin.
    elements: usize,
}

/// Spans of so many inputs.
pub(super) const fn spans(inputs: usize) -> usize {
    inputs.div_ceil(SPAN)
}

impl BlockFloats {
    /// Elements of so many panels, exponents included. `None` where there is no number for them.
    pub(super) fn len(panels: usize, inputs: usize) -> Option<usize> {
        Self::numbers(panels, inputs)?.checked_add(panels.checked_mul(spans(inputs) * LANES / 2)?)
    }

    fn numbers(panels: usize, inputs: usize) -> Option<usize> {
        inputs.div_ceil(2).checked_mul(STEP)?.checked_mul(panels)
    }

    /// Those that lie in `data`, which is as long as [`Self::len`] says.
    pub(super) fn new(data: Buffer<u16>, panels: usize, inputs: usize) -> Self {
        let elements = panels * inputs.div_ceil(2) * STEP;
        assert!(Self::len(panels, inputs) == Some(data.len()));
        Self { data, elements }
    }

    /// Panels of steps.
    pub(super) fn numbers_of_panels(&self) -> &[u16] {
        &self.data[..self.elements]
    }

    /// Of each panel, for each span, those of sixteen outputs.
    pub(super) fn exponents(&self) -> &[u8] {
        &self.data.bytes()[self.elements * size_of::<u16>()..]
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    /// One output's weights, in `out`, which is as long as there are inputs.
    pub(super) fn read_row(&self, output: usize, out: &mut [f32]) {
        let (steps, spans, lane) = (out.len().div_ceil(2), spans(out.len()), output % LANES);
        let panel = &self.data[output / LANES * steps * STEP..][..steps * STEP];
        let exponents = &self.exponents()[output / LANES * spans * LANES..][..spans * LANES];
        for (span, out) in out.chunks_mut(SPAN).enumerate() {
            let scale = power(exponents[span * LANES + lane]);
            for (input, out) in out.iter_mut().enumerate() {
                let number = panel[(span * SPAN_STEPS + input / 2) * STEP + 2 * lane + input % 2];
                *out = f32::from(number.cast_signed()) * scale;
            }
        }
    }
}

/// 2 to the power that a byte stands for in the exponent of an f32; infinity for 255.
fn power(exponent: u8) -> f32 {
    f32::from_bits(u32::from(exponent) << 23)
}

/// The exponent, as f32 has it, of a span whose largest magnitude has this one.
fn shared_exponent(largest: u8) -> u8 {
    // Above it, numbers of a span that is not finite could be anything.
    if largest == u8::MAX { largest } else { largest.saturating_sub(BITS as u8 - 1).max(1) }
}

/// What the numbers of a span are multiplied by. Exact.
fn inverse(exponent: u8) -> f32 {
    power(254 - exponent.min(253))
}
