//! Scratch memory of matrix products with quantised weights.

use crate::DeviceError;
use crate::cpu::gemm::groups::GroupTasks;
use crate::cpu::memory::Buffer;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::quant::{grouped, int8};
use crate::cpu::simd::LANES;

/// Scratch memory of matrix products with quantised weights. The system commits pages only when they are first written.
pub(in crate::cpu) struct Scratch {
    pub(super) activations: Buffer<u32>,
    /// Sums of gate and up, which are kept between blocks of inputs, `[rows, panels * 16]`.
    pub(super) sums: Buffer<f32>,
    /// Largest number of rows and largest width that [`Self::sums`] has room for.
    most: (usize, usize),
    /// The most words that the activations of a tensor take as integers, and as f32.
    words: [usize; 2],
    /// True if activations in f32 need room.
    widened: bool,
    /// True once a matrix product has been computed.
    pub(super) used: bool,
    pub(super) tasks: GroupTasks,
}

impl Scratch {
    pub(in crate::cpu) fn new() -> Result<Self, DeviceError> {
        Ok(Self {
            activations: Buffer::zeroed(0, ACTIVATIONS)?,
            sums: Buffer::zeroed(0, SUMS)?,
            most: (0, 0),
            words: [0, 0],
            widened: false,
            used: false,
            tasks: GroupTasks::default(),
        })
    }

    /// Makes room for matrix products of up to `rows` rows and `inputs` inputs.
    pub(in crate::cpu) fn fit(&mut self, rows: usize, inputs: usize) -> Result<(), DeviceError> {
        let integers = int8::row_words(inputs, 2).max(grouped::most_dot_words(inputs));
        let of_tensor = [integers, grouped::most_widened_words(inputs)].map(|words| rows * words);
        self.words = std::array::from_fn(|kind| self.words[kind].max(of_tensor[kind]));
        self.fit_activations()?;
        self.fit_sums(rows, 0)
    }

    /// Makes room for activations in f32.
    pub(in crate::cpu) fn fit_widened(&mut self) -> Result<(), DeviceError> {
        self.widened = true;
        self.fit_activations()
    }

    /// Makes room for the matrix products of a paired matrix (gate and up).
    pub(in crate::cpu) fn fit_pair(&mut self, shape: Shape) -> Result<(), DeviceError> {
        self.fit_sums(0, shape.panels() * LANES)
    }

    fn fit_activations(&mut self) -> Result<(), DeviceError> {
        let [integers, widened] = self.words;
        let wanted = if self.widened { integers.max(widened) } else { integers };
        if self.activations.len() < wanted {
            self.activations = Buffer::zeroed(wanted, ACTIVATIONS)?;
        }
        Ok(())
    }

    fn fit_sums(&mut self, rows: usize, width: usize) -> Result<(), DeviceError> {
        self.most = (self.most.0.max(rows), self.most.1.max(width));
        let wanted = self.most.0.saturating_mul(self.most.1);
        if self.sums.len() < wanted {
            self.sums = Buffer::zeroed(wanted, SUMS)?;
        }
        Ok(())
    }

    /// Size in bytes; 0 before the first matrix product.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        if self.used { size_of_val(&self.activations[..]) + size_of_val(&self.sums[..]) } else { 0 }
    }
}

/// The name of [`Scratch::activations`] in errors.
const ACTIVATIONS: &str = "activations of a product";
/// The name of [`Scratch::sums`] in errors.
const SUMS: &str = "sums of gate and up";
