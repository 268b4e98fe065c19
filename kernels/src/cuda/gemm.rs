//! Matrix products with weights, by cuBLASLt.
//!
//! cuBLASLt chooses an algorithm once per matrix shape, for a fixed number of rows. This algorithm then computes
//! products of any number of rows, so that the order of each row's sums does not depend on the batch. For the same
//! reason, algorithms that divide the sums among blocks (split-K) are excluded. No algorithm gets a workspace.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::context::Gpu;
use super::memory::DevicePointer;
use super::tensor::Matrix;
use crate::{DeviceError, WeightType};

/// Number of rows for which algorithms are chosen.
const ASKED_ROWS: usize = 64;

/// `CUBLAS_OP_T`. cudarc's bindings of cuBLASLt lack its type, `cublasOperation_t`.
const TRANSPOSED: i32 = 1;

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

/// The number of outputs, the number of inputs and the type of a weight matrix.
type Key = (usize, usize, WeightType);

/// The cuBLASLt descriptions and the algorithm of all matrix products with weights of one shape.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    weight: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
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

    /// Makes the plan for products with `matrix`, unless there is already one for the matrix's shape.
    pub(super) fn prepare(&mut self, matrix: &Matrix) -> Result<(), DeviceError> {
        let key = (matrix.outputs, matrix.inputs, matrix.dtype);
        if !self.plans.contains_key(&key) {
            let plan = Plan::new(self.handle, key).map_err(|error| {
                let Matrix { outputs, inputs, dtype, .. } = *matrix;
                let why = format!("cuBLASLt has no product with {outputs} x {inputs} {dtype:?}: {error}");
                DeviceError::Unsupported(why)
            })?;
            self.plans.insert(key, plan);
        }
        Ok(())
    }

    /// Enqueues a matrix product.
    pub(super) fn product(&mut self, product: &Product<'_>) -> Result<(), DeviceError> {
        let Product { x, rows, matrix, accumulate, out } = *product;
        if rows == 0 || matrix.outputs == 0 {
            return Ok(());
        }
        self.prepare(matrix)?;
        let key = (matrix.outputs, matrix.inputs, matrix.dtype);
        let Some(plan) = self.plans.get(&key) else {
            return Err(DeviceError::Misuse("a product without a plan".to_owned()));
        };
        let gpu = &self.gpu;
        let failed = |error: CublasError| {
            DeviceError::Lost(format!("a product, cublasLtMatmul: {error}; {}", gpu.last_kernel()))
        };
        let layout = |dtype, width| Layout::new(dtype, width, rows).map_err(failed);
        let (input, output) = (layout(type_of(matrix.dtype), matrix.inputs)?, layout(FLOAT, matrix.outputs)?);
        let (one, beta) = (1f32, if accumulate == Accumulate::Add { 1f32 } else { 0f32 });
        // SAFETY: handle, description, layouts and algorithm are alive. The buffers have the sizes of the layouts, as
        // the callers have checked, and live until the stream has passed the product.
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                matrix.at().address() as *const c_void,
                plan.weight.0,
                x.address() as *const c_void,
                input.0,
                out.address() as *const c_void,
                output.0,
                out.address() as *mut c_void,
                output.0,
                &plan.algorithm,
                ptr::null_mut(),
                0,
                self.gpu.stream.cast(),
            )
        }
        .map_err(failed)
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        let _ = self.gpu.synchronize();
        // SAFETY: no matrix product is being enqueued. Errors are ignored, because there is nothing left to do.
        unsafe {
            for plan in self.plans.values() {
                let _ = result::destroy_matmul_desc(plan.description);
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, key: Key) -> Result<Self, CublasError> {
        let (outputs, inputs, dtype) = key;
        // cuBLASLt stores matrices column by column, so a row-major x is its transpose. The product is out^T = W x^T,
        // where W is stored transposed.
        let weight = Layout::new(type_of(dtype), inputs, outputs)?;
        let input = Layout::new(type_of(dtype), inputs, ASKED_ROWS)?;
        let output = Layout::new(FLOAT, outputs, ASKED_ROWS)?;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = result::create_matmul_desc(compute, FLOAT)?;
        let transposed = TRANSPOSED;
        let transposes = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let (workspace, reductions) = (0u64, 0u32);
        // SAFETY: the attributes' pointers are valid for their sizes, and all objects are alive.
        let algorithm = unsafe {
            result::set_matmul_desc_attribute(
                description,
                transposes,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
            let preference = result::create_matmul_pref()?;
            let set = |attribute, value: *const c_void, bytes| {
                result::set_matmul_pref_attribute(preference, attribute, value, bytes)
            };
            let limits = set(
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )
            .and_then(|()| {
                set(
                    Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                    (&raw const reductions).cast(),
                    size_of_val(&reductions),
                )
            });
            let found = limits.and_then(|()| {
                result::get_matmul_algo_heuristic(
                    handle,
                    description,
                    weight.0,
                    input.0,
                    output.0,
                    output.0,
                    preference,
                )
            });
            let _ = result::destroy_matmul_pref(preference);
            found?.algo
        };
        Ok(Self { description, weight, algorithm })
    }
}

/// A cuBLASLt layout of a matrix that is stored column by column, without gaps.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: sys::cudaDataType, rows: usize, columns: usize) -> Result<Self, CublasError> {
        result::create_matrix_layout(dtype, rows as u64, columns as u64, rows as i64).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: this value owns the layout, and cuBLASLt reads it only while a product is enqueued.
        unsafe {
            let _ = result::destroy_matrix_layout(self.0);
        }
    }
}

const FLOAT: sys::cudaDataType = sys::cudaDataType::CUDA_R_32F;

fn type_of(dtype: WeightType) -> sys::cudaDataType {
    match dtype {
        WeightType::F32 => sys::cudaDataType::CUDA_R_32F,
        WeightType::F16 => sys::cudaDataType::CUDA_R_16F,
        WeightType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}
