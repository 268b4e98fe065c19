//! Scratch memory of matrix products in int8.

use super::activations::row_words;
use super::format::Int8Matrix;
use crate::DeviceError;
use crate::cpu::gemm::groups::GroupTasks;
use crate::cpu::memory::Buffer;
use crate::cpu::simd::LANES;

/// Scratch memory of matrix products in int8. The system commits pages only when they are first written.
pub(in crate::cpu) struct Scratch {
    pub(super) activations: Buffer<u32>,
    /// Sums of gate and up, which are kept between blocks of inputs, `[rows, panels * 16]`.
    pub(super) sums: Buffer<f32>,
    /// Largest number of rows and largest width that [`Self::sums`] has room for.
    most: (usize, usize),
    /// True once a matrix product in int8 has been computed.
    pub(super) used: bool,
    pub(super) tasks: GroupTasks,
}

impl Scratch {
    pub(in crate::cpu) fn new() -> Result<Self, DeviceError> {
        let activations = Buffer::zeroed(0, "activations of a product")?;
        Ok(Self {
            activations,
            sums: Buffer::zeroed(0, SUMS)?,
            most: (0, 0),
            used: false,
            tasks: GroupTasks::default(),
        })
    }

    /// Makes room for matrix products of up to `rows` rows and `inputs` inputs.
    pub(in crate::cpu) fn fit(&mut self, rows: usize, inputs: usize) -> Result<(), DeviceError> {
        let words = rows * row_words(inputs, 2);
        if self.activations.len() < words {
            self.activations = Buffer::zeroed(words, "activations of a product")?;
        }
        self.fit_sums(rows, 0)
    }

    /// Makes room for the matrix products of a paired matrix (gate and up).
    pub(in crate::cpu) fn fit_pair(&mut self, matrix: &Int8Matrix) -> Result<(), DeviceError> {
        self.fit_sums(0, matrix.shape.panels() * LANES)
    }

    fn fit_sums(&mut self, rows: usize, width: usize) -> Result<(), DeviceError> {
        self.most = (self.most.0.max(rows), self.most.1.max(width));
        let wanted = self.most.0.saturating_mul(self.most.1);
        if self.sums.len() < wanted {
            self.sums = Buffer::zeroed(wanted, SUMS)?;
        }
        Ok(())
    }

    /// Size in bytes; 0 before the first matrix product in int8.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        if self.used { size_of_val(&self.activations[..]) + size_of_val(&self.sums[..]) } else { 0 }
    }
}

/// The name of [`Scratch::sums`] in errors.
const SUMS: &str = "sums of gate and up";
