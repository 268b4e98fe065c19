//! The layout of weights in eight bits: panels of groups of steps.

use crate::cpu::memory::Buffer;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Number of inputs that share a scale.
pub(in crate::cpu) const GROUP: usize = 128;
/// Inputs are padded to a multiple of this: the largest `Simd::DOT_INPUTS`.
pub(super) const PAD: usize = 4;
/// The offset that is added to weights when they are stored.
pub(super) const OFFSET: u8 = 128;
/// Size in bytes of the scales of one group of a panel.
pub(super) const SCALES: usize = LANES * size_of::<f32>();

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

    /// Dequantises the weights of one output. `out` receives one weight per input, in the order of the inputs. `path`
    /// is the instruction path that the matrix was packed for.
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
pub(super) const fn group_bytes(inputs: usize) -> usize {
    SCALES + inputs.next_multiple_of(PAD) * LANES
}

/// Size in bytes of a panel.
pub(super) const fn panel_bytes(inputs: usize) -> usize {
    inputs.div_ceil(GROUP) * SCALES + inputs.next_multiple_of(PAD) * LANES
}

/// Index of a weight among the weights of its group.
#[inline(always)]
pub(super) const fn weight_index(input: usize, lane: usize, dot_inputs: usize) -> usize {
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
