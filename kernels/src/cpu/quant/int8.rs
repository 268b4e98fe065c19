//! Weights and activations in eight bits (W8A8). Weights are quantised when they are loaded.
//!
//! The weights of an output are cut into *groups* of [`GROUP`] inputs. Each group has its own scale: the largest
//! magnitude in the group divided by 127. The weights of the group are rounded to multiples of the scale. Activations
//! are quantised in the same way before each product, with a scale per group and row. The products within a group are
//! summed exactly in integers, and the sum is scaled once:
//!
//! ```text
//! y[o] = Σ over groups g, in order: Σ over inputs i of g (w[o,i] · x[i]) · (w_scale[o,g] · x_scale[g])
//! ```
//!
//! Here, `o` is an output, `w` and `x` are quantised weights and activations, and `w_scale` and `x_scale` are the
//! scales of their groups. The sum over groups starts with zero. If the epilogue adds the product to the output, the
//! sum starts with the output's old value instead. A bias is added last.
//!
//! Each operation is either exact or has one defined rounding (a group's sum is scaled and added with one rounding), so
//! the bits are the same on every instruction path and in any batch. A rank's share of the inputs consists of whole
//! groups if the share's length is a multiple of [`GROUP`]; the ranks then hold the same quantised numbers as a single
//! device. Embeddings can be read from the bytes of an LM head, so a table that a model uses for both is held once.
//!
//! A panel of sixteen outputs is a sequence of groups. A group is sixteen f32 scales and then steps. A step is sixteen
//! outputs by as many inputs as the path's dot product takes (`Simd::DOT_INPUTS`). 128 is added to each weight when it
//! is stored, since one operand of the dot-product instructions is unsigned. This adds 128 times the sum of the group's
//! activations to each integer sum. The initial value of the integer sum compensates for that.

mod activations;
mod pack;
mod product;
mod quantise;
mod screen;

pub(in crate::cpu) use product::{Scratch, linear};
pub(in crate::cpu) use screen::{RowNorms, Screen};

use crate::cpu::memory::Buffer;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Number of inputs that share a scale.
pub(in crate::cpu) const GROUP: usize = 128;
/// Inputs are padded to a multiple of this: the largest `Simd::DOT_INPUTS`.
const PAD: usize = 4;
/// The offset that is added to weights when they are stored.
const OFFSET: u8 = 128;
/// Size in bytes of the scales of one group of a panel.
const SCALES: usize = LANES * size_of::<f32>();

/// An int8 weight matrix, `[outputs, inputs]`.
pub struct Int8Matrix {
    pub(in crate::cpu) shape: Shape,
    /// `[outputs / 16]` panels of [`panel_bytes`] each. Outputs that pad the last panel are zeros.
    pub(in crate::cpu) data: Buffer<u8>,
}

impl Int8Matrix {
    /// Size in bytes.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Writes the weights of one output to `out`, dequantised. `out` has one element per input. `path` is the
    /// instruction path that the matrix was packed for.
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

/// Size in bytes of a panel's group of `inputs` inputs.
const fn group_bytes(inputs: usize) -> usize {
    SCALES + inputs.next_multiple_of(PAD) * LANES
}

/// Size in bytes of a panel.
const fn panel_bytes(inputs: usize) -> usize {
    inputs.div_ceil(GROUP) * SCALES + inputs.next_multiple_of(PAD) * LANES
}

/// Index of a weight among the weights of its group.
#[inline(always)]
const fn weight_index(input: usize, lane: usize, dot_inputs: usize) -> usize {
    (input / dot_inputs * LANES + lane) * dot_inputs + input % dot_inputs
}

/// Returns the path's number of inputs per step.
struct DotInputs;

impl Op for DotInputs {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::DOT_INPUTS
    }
}
