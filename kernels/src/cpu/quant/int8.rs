//! Weights in eight bits, quantised when they are loaded (W8A8).
//!
//! A row of weights is cut into *groups* of [`GROUP`] inputs. Each group of each output has a scale of its own, its
//! largest magnitude over 127, and its weights are that many steps of it, rounded to nearest. Activations are quantised
//! alike before each product: a scale for each group of each row. A group's products are then summed in
//! integers, exactly, and scaled once:
//!
//! ```text
//! y[o] = Σ over groups g, in order: Σ over inputs i of g (w[o,i] · x[i]) · (w_scale[o,g] · x_scale[g])
//! ```
//!
//! The sum begins with zero or, where the product is added to something, with that; a bias comes last.
//!
//! All of it is exact or rounded in one way only (a group's sum is scaled and added with one rounding), so the bits are the
//! same on every instruction path, and for any batch. A group lies within a rank's share of the inputs wherever that is a multiple of [`GROUP`]:
//! ranks then hold the very numbers that one would. An embedding is read from the same bytes as its LM head, so that a
//! tied table is held once.
//!
//! A panel of sixteen outputs is, group after group, sixteen f32 scales and then steps of as many inputs as the path's
//! dot product takes (`Simd::DOT_INPUTS`), sixteen outputs each. Weights lie there plus 128, as the unsigned side that
//! those instructions have; what that adds to a sum, 128 times the sum of a group's activations, is taken off where
//! the sum begins.

mod activations;
mod pack;
mod product;
mod quantise;

pub(in crate::cpu) use product::{Product, Scratch, linear};

use crate::cpu::memory::Buffer;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Inputs that share a scale.
pub(in crate::cpu) const GROUP: usize = 128;
/// Inputs are padded to a multiple of this: the largest `Simd::DOT_INPUTS`.
const PAD: usize = 4;
/// What is added to weights as they are stored.
const OFFSET: u8 = 128;
/// Bytes of the scales of a panel's group.
const SCALES: usize = LANES * size_of::<f32>();

/// An int8 weight matrix, `[outputs, inputs]`.
pub struct Int8Matrix {
    pub(in crate::cpu) shape: Shape,
    /// `[outputs / 16]` panels of [`panel_bytes`]; outputs that fill up the last one are zeros.
    pub(in crate::cpu) data: Buffer<u8>,
}

impl Int8Matrix {
    /// Bytes that it takes.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        self.data.len()
    }

    /// One output's weights, dequantised; `path` is that for which they were packed. `out` is `inputs` long.
    pub(in crate::cpu) fn read_row(&self, path: Path, output: usize, out: &mut [f32]) {
        let dot_inputs = path.run_int8(DotInputs);
        let bytes = panel_bytes(self.shape.inputs);
        let panel = &self.data[output / LANES * bytes..][..bytes];
        let lane = output % LANES;
        for (out, group) in out.chunks_mut(GROUP).zip(panel.chunks(group_bytes(GROUP))) {
            let (scales, weights) = group.split_at(SCALES);
            let scale = scales.as_chunks::<4>().0[lane];
            let scale = f32::from_le_bytes(scale);
            for (input, out) in out.iter_mut().enumerate() {
                let raw = weights[weight_index(input, lane, dot_inputs)];
                *out = f32::from((raw ^ OFFSET).cast_signed()) * scale;
            }
        }
    }
}

/// Bytes of a panel's group of so many inputs.
const fn group_bytes(inputs: usize) -> usize {
    SCALES + inputs.next_multiple_of(PAD) * LANES
}

/// Bytes of a panel.
const fn panel_bytes(inputs: usize) -> usize {
    inputs.div_ceil(GROUP) * SCALES + inputs.next_multiple_of(PAD) * LANES
}

/// Where a weight lies among those of its group.
#[inline(always)]
const fn weight_index(input: usize, lane: usize, dot_inputs: usize) -> usize {
    (input / dot_inputs * LANES + lane) * dot_inputs + input % dot_inputs
}

/// Inputs of a step.
struct DotInputs;

impl Op for DotInputs {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::DOT_INPUTS
    }
}
