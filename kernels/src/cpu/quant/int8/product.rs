//! `y = x · Wᵀ` in eight bits.
//!
//! A word packs two or four quantised activations. Each step of the loop over the inputs reads one word of every row of
//! a tile, and these words are adjacent.

use super::activations::{pack_group, row_words};
use super::format::{GROUP, Int8Matrix, panel_bytes};
use super::micro_kernel::add_product;
use crate::DeviceError;
use crate::cpu::gemm::Product;
use crate::cpu::gemm::input::InputRow;
use crate::cpu::memory::Weights;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::quant::product::{self, CHUNK, GroupedProduct, Scratch};
use crate::cpu::simd::Simd;
use crate::cpu::simd::isa::Path;
use crate::cpu::threads::pool::ThreadPool;

const _: () = assert!(GROUP == CHUNK);

/// Computes a matrix product in int8. `scratch` must have room for the product's rows and inputs.
pub(in crate::cpu) fn linear(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'_>,
) -> Result<(), DeviceError> {
    product::linear(path, pool, scratch, product, |weights| {
        let Weights::Int8(matrix) = weights else { unreachable!("a matrix that is not in int8") };
        Int8Product(matrix)
    })
}

/// Products with weights and activations in eight bits.
#[derive(Clone, Copy)]
struct Int8Product<'a>(&'a Int8Matrix);

impl GroupedProduct for Int8Product<'_> {
    const MOST_ROWS: usize = usize::MAX;

    #[inline(always)]
    fn shape(self) -> Shape {
        self.0.shape
    }
    #[inline(always)]
    fn data(&self) -> &[u8] {
        &self.0.data
    }
    #[inline(always)]
    fn panel_bytes(self, inputs: usize) -> usize {
        panel_bytes(inputs)
    }
    #[inline(always)]
    fn row_words(self, inputs: usize, dot_inputs: usize) -> usize {
        row_words(inputs, dot_inputs)
    }
    #[inline(always)]
    fn pack<S: Simd, const R: usize>(self, s: S, rows: &[InputRow<'_>; R], first: usize, to: &mut [u32]) {
        pack_group(s, rows, first, to);
    }
    #[inline(always)]
    unsafe fn add_product<S: Simd, const R: usize, const P: usize>(
        self,
        s: S,
        sums: &mut [[S::F; P]; R],
        x: *const u32,
        panels: [*const u8; P],
        inputs: usize,
        further: [usize; P],
    ) {
        let panel_bytes = panel_bytes(self.0.shape.inputs);
        // SAFETY: the caller keeps the same contract.
        unsafe { add_product::<S, R, P>(s, sums, x, panels, inputs, panel_bytes, further) };
    }
}
