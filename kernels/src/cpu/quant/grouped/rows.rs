//! The source of a matrix that a checkpoint stores quantised: one or more matrices, cut into panels.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::layout::GroupLayout;
use crate::DeviceError;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::simd::LANES;
use crate::device::{GroupOffsets, QuantizedRows};

/// Number of samples per source matrix, and bytes per sample.
const SAMPLES: (usize, usize) = (4, 64);

/// Quantised matrices that one packed matrix holds: stacked one below another (q, k and v), or a pair with the same
/// number of rows (gate and up).
#[derive(Clone, Copy)]
pub(in crate::cpu) struct FusedRows<'a> {
    matrices: &'a [QuantizedRows<'a>],
    pub(in crate::cpu) shape: Shape,
    pub(in crate::cpu) layout: GroupLayout,
}

impl<'a> FusedRows<'a> {
    pub(in crate::cpu) fn new(matrices: &'a [QuantizedRows<'a>], paired: bool) -> Result<Self, DeviceError> {
        let first = QuantizedRows::check_fused(matrices, paired)?;
        let outputs = matrices.iter().map(|matrix| matrix.rows).sum();
        let divides = |group: &usize| {
            matrices
                .iter()
                .all(|matrix| matrix.group >= matrix.columns || matrix.group.is_multiple_of(*group))
        };
        let group = [128, 64, 32].into_iter().find(divides).unwrap_or(16);
        let (scales, offsets) = (first.scale_type, first.offsets.kind());
        let layout = GroupLayout { codes: first.element, group, scales, offsets };
        Ok(Self { matrices, shape: Shape { outputs, inputs: first.columns, paired }, layout })
    }

    /// The rows of a panel: each a matrix and the index of the row in it. In a paired matrix, the panels of gate and up
    /// alternate.
    pub(super) fn rows(&self, panel: usize) -> [Option<(&'a QuantizedRows<'a>, usize)>; LANES] {
        let (matrices, first) = match self.shape.paired {
            true => (&self.matrices[panel % 2..][..1], panel / 2 * LANES),
            false => (self.matrices, panel * LANES),
        };
        std::array::from_fn(|lane| {
            let mut index = first + lane;
            for matrix in matrices {
                if index < matrix.rows {
                    return Some((matrix, index));
                }
                index -= matrix.rows;
            }
            None
        })
    }

    /// Returns a hash of the scales and of a few samples of the codes. The hash detects a checkpoint that was changed
    /// in place.
    pub(in crate::cpu) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for matrix in self.matrices {
            (matrix.rows, matrix.columns, matrix.group, matrix.rows_per_scale).hash(&mut hasher);
            matrix.scales.iter().for_each(|scale| scale.to_bits().hash(&mut hasher));
            match matrix.offsets {
                GroupOffsets::None => {}
                GroupOffsets::ZeroPoints(zeros) => zeros.hash(&mut hasher),
                GroupOffsets::Minima(minima) => minima.iter().for_each(|x| x.to_bits().hash(&mut hasher)),
            }
            let (count, len) = SAMPLES;
            for sample in 0..count {
                let from = matrix.codes.len().saturating_sub(len) / (count - 1) * sample;
                matrix.codes[from..matrix.codes.len().min(from + len)].hash(&mut hasher);
            }
        }
        hasher.finish()
    }
}
