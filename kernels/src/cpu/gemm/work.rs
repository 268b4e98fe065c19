//! Shared state of the tasks of one group's matrix product.

use super::epilogue::Epilogue;
use super::micro_kernel::{Inputs, MicroKernel};
use crate::cpu::gemm::tile::Tiling;
use crate::cpu::memory::Shared;
use crate::cpu::memory::matrix::Matrix;
use crate::cpu::quant::block_float::BFP_BLOCK_STEPS;

/// State that all tasks of one group's matrix product share.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) tiling: Tiling,
    pub(super) activations: &'a Shared<'a, f32>,
    pub(super) matrix: &'a Matrix,
    pub(super) epilogue: Epilogue<'a>,
    pub(super) out: &'a Shared<'a, f32>,
    /// Index of the thread that runs the task.
    pub(super) thread: usize,
}

impl Work<'_> {
    /// Returns the addresses of a tile's packed activations from step `step` on. The tile has `R` rows and starts at
    /// row `row`.
    ///
    /// # Safety
    ///
    /// The tiling has a tile of `R` rows that starts at `row`.
    #[inline(always)]
    pub(super) unsafe fn inputs<K: MicroKernel, const R: usize>(&self, row: usize, step: usize) -> Inputs {
        let steps = self.matrix.shape.steps();
        // SAFETY: the addresses are within the packed activations, by the caller's contract.
        unsafe {
            let tile = self.activations.as_ptr().add(row * 2 * steps).cast_const();
            let powers = tile.add((steps + step / BFP_BLOCK_STEPS) * R);
            Inputs { values: tile.add(K::LAYOUT.step_words() * step * R), powers }
        }
    }
}
