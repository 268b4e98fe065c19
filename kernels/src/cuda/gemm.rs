//! Matrix products with weights, by cuBLASLt.
//!
//! ```text
//! Gemm --> plan (one shape's descriptions and algorithms) --> trial (which algorithms are equal, which is the fastest)
//! ```
//!
//! The order of each row's sums must not depend on the batch. A trial at load finds algorithms whose rows have the same
//! bits for all numbers of rows. One of them is the plan's anchor, and each bucket of rows takes the fastest of them.
//! Algorithms that divide the sums among blocks (split-K) are excluded. No algorithm gets a workspace.

mod plan;
mod trial;

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use self::plan::{Key, Operands, Plan};
use super::context::Gpu;
use super::memory::DevicePointer;
use super::tensor::Matrix;
use crate::DeviceError;

/// Number of rows for which cuBLASLt proposes the algorithm of a plan without a trial.
const BASE_ROWS: usize = 64;

/// Tells if a matrix product replaces the output or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accumulate {
    Set,
    Add,
}

/// One matrix product, `out[rows, outputs] = x[rows, inputs] · Wᵀ`. `x` has the matrix's type, `out` is f32.
pub(super) struct Product<'a> {
    pub(super) x: DevicePointer<u8>,
    pub(super) rows: usize,
    pub(super) matrix: &'a Matrix,
    pub(super) accumulate: Accumulate,
    pub(super) out: DevicePointer<f32>,
}

/// The handle of cuBLASLt, and a plan per shape.
pub(super) struct Gemm {
    gpu: Arc<Gpu>,
    handle: sys::cublasLtHandle_t,
    plans: HashMap<Key, Plan>,
}

// SAFETY: handle, descriptions and layouts are owned by this value, and cuBLASLt does not tie them to a thread.
unsafe impl Send for Gemm {}

impl Gemm {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let handle = result::create_handle()
            .map_err(|error| DeviceError::Lost(format!("opening cuBLASLt: {error}")))?;
        Ok(Self { gpu: gpu.clone(), handle, plans: HashMap::new() })
    }

    /// Makes the plan for products with `matrix`, unless there is already one for the matrix's shape. Tries the
    /// algorithms with this matrix.
    pub(super) fn prepare(&mut self, matrix: &Matrix) -> Result<(), DeviceError> {
        let key = Key::of(matrix);
        if self.plans.contains_key(&key) || matrix.outputs == 0 {
            return Ok(());
        }
        let mut plan = Plan::new(self.handle, key).map_err(|error| {
            DeviceError::Unsupported(format!("cuBLASLt has no product with {key}: {error}"))
        })?;
        trial::choose(&self.gpu, &mut plan, matrix)?;
        self.plans.insert(key, plan);
        Ok(())
    }

    /// Enqueues a matrix product.
    pub(super) fn product(&mut self, product: &Product<'_>) -> Result<(), DeviceError> {
        let Product { x, rows, matrix, accumulate, out } = *product;
        if rows == 0 || matrix.outputs == 0 {
            return Ok(());
        }
        self.prepare(matrix)?;
        let Some(plan) = self.plans.get_mut(&Key::of(matrix)) else {
            return Err(DeviceError::Misuse("a product without a plan".to_owned()));
        };
        let gpu = &self.gpu;
        let operands = Operands { weight: matrix.at(), x, rows, accumulate, out };
        gpu.writes.count();
        // SAFETY: the buffers have the sizes of the product, as the callers have checked, and live until the stream has
        // passed the product.
        unsafe { plan.run(gpu, operands) }.map_err(|error: CublasError| {
            DeviceError::Lost(format!("a product, cublasLtMatmul: {error}; {}", gpu.last_kernel()))
        })
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        let _ = self.gpu.synchronize();
        self.plans.clear();
        // SAFETY: no matrix product is being enqueued. Errors are ignored, because there is nothing left to do.
        unsafe {
            let _ = result::destroy_handle(self.handle);
        }
    }
}

#[cfg(test)]
mod tests;
