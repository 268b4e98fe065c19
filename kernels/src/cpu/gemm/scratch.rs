//! Scratch memory of matrix products.

use super::blocked::SUMS;
use crate::DeviceError;
use crate::cpu::gemm::groups::GroupTasks;
use crate::cpu::memory::Buffer;

/// Scratch memory of matrix products in f32, bfloat16 and block floating point.
pub(in crate::cpu) struct Scratch {
    /// Packed activations.
    pub(super) activations: Buffer<f32>,
    /// [`THREAD_FLOATS`] per thread, for the sums of matrix products of several tiles, or for a copy of the packed
    /// activations that a thread makes for itself.
    pub(super) threads: Buffer<f32>,
    pub(super) tasks: GroupTasks,
}

/// Number of floats in a thread's part of [`Scratch::threads`]: room for the packed activations of sixteen rows of
/// 4,096 inputs in bfloat16.
pub(super) const THREAD_FLOATS: usize = 32 << 10;
const _: () = assert!(THREAD_FLOATS >= SUMS);

impl Scratch {
    pub(in crate::cpu) fn new(threads: usize) -> Result<Self, DeviceError> {
        let threads = Buffer::zeroed(threads * THREAD_FLOATS, "sums and copies of activations of a product")?;
        Ok(Self { activations: Buffer::zeroed(0, ACTIVATIONS)?, threads, tasks: GroupTasks::default() })
    }

    /// Makes room for matrix products of up to `rows` rows and `inputs` inputs.
    pub(in crate::cpu) fn fit(&mut self, rows: usize, inputs: usize) -> Result<(), DeviceError> {
        let padded = rows * inputs.next_multiple_of(2);
        if self.activations.len() < padded {
            self.activations = Buffer::zeroed(padded, ACTIVATIONS)?;
        }
        Ok(())
    }

    /// Size in bytes.
    pub(in crate::cpu) fn bytes(&self) -> usize {
        (self.activations.len() + self.threads.len()) * size_of::<f32>()
    }
}

/// The name of [`Scratch::activations`] in errors.
const ACTIVATIONS: &str = "activations of a product";
