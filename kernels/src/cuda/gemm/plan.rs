//! The cuBLASLt descriptions and algorithms of all matrix products with weights of one shape.

use std::collections::HashSet;
use std::ffi::c_void;
use std::fmt::{self, Display, Formatter};
use std::ptr;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::{Accumulate, BASE_ROWS};
use crate::WeightType;
use crate::cuda::context::Gpu;
use crate::cuda::memory::DevicePointer;
use crate::cuda::tensor::Matrix;

pub(super) type Algorithm = sys::cublasLtMatmulAlgo_t;

/// `CUBLAS_OP_T`. cudarc's bindings of cuBLASLt lack its type, `cublasOperation_t`.
const TRANSPOSED: i32 = 1;

/// The largest number of rows of each bucket. The last bucket also holds all larger numbers.
pub(super) const BUCKETS: [usize; 7] = [16, 32, 64, 128, 256, 512, 2048];
/// Number of algorithms that cuBLASLt proposes for a bucket.
const PROPOSED: usize = 8;

/// The shape and the type of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) dtype: WeightType,
}

impl Key {
    pub(super) fn of(matrix: &Matrix) -> Self {
        Self { outputs: matrix.outputs, inputs: matrix.inputs, dtype: matrix.dtype }
    }
}

impl Display for Key {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{} x {} {:?}", self.outputs, self.inputs, self.dtype)
    }
}

/// The operands of a product.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) weight: DevicePointer<u8>,
    pub(super) x: DevicePointer<u8>,
    pub(super) rows: usize,
    pub(super) accumulate: Accumulate,
    pub(super) out: DevicePointer<f32>,
}

/// The cuBLASLt descriptions of a shape, and the algorithms by number of rows.
pub(super) struct Plan {
    handle: sys::cublasLtHandle_t,
    pub(super) key: Key,
    description: Description,
    weight: Layout,
    /// The algorithm that defines the bits. It serves all numbers of rows.
    pub(super) anchor: Algorithm,
    /// The fastest algorithms of each bucket, for [`Accumulate::Set`] and [`Accumulate::Add`].
    pub(super) fastest: [[Algorithm; 2]; BUCKETS.len()],
    /// Numbers of rows for which cuBLASLt has refused the fastest algorithm.
    refused: HashSet<usize>,
}

impl Plan {
    /// Describes products with weights of the shape `key`. All buckets take the first algorithm that cuBLASLt proposes
    /// for [`BASE_ROWS`] rows.
    pub(super) fn new(handle: sys::cublasLtHandle_t, key: Key) -> Result<Self, CublasError> {
        // cuBLASLt stores matrices column by column, so a row-major x is its transpose. The product is out^T = W x^T,
        // where W is stored transposed.
        let description = Description::new()?;
        let weight = Layout::new(type_of(key.dtype), key.inputs, key.outputs)?;
        let proposed = proposals(handle, &description, &weight, key, BASE_ROWS, 1)?;
        let anchor =
            *proposed.first().ok_or(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED))?;
        let (fastest, refused) = ([[anchor; 2]; BUCKETS.len()], HashSet::new());
        Ok(Self { handle, key, description, weight, anchor, fastest, refused })
    }

    /// The algorithms that cuBLASLt proposes for so many rows, the best guess first.
    pub(super) fn proposals(&self, rows: usize) -> Result<Vec<Algorithm>, CublasError> {
        proposals(self.handle, &self.description, &self.weight, self.key, rows, PROPOSED)
    }

    /// Enqueues a product with the fastest algorithm. cuBLASLt may refuse a number of rows for which it did not propose
    /// the algorithm. The anchor then takes its place.
    ///
    /// # Safety
    ///
    /// The operands have the sizes of the product, and live until the stream has passed it.
    pub(super) unsafe fn run(&mut self, gpu: &Gpu, operands: Operands) -> Result<(), CublasError> {
        let rows = operands.rows;
        let bucket = BUCKETS.iter().position(|&most| rows <= most).unwrap_or(BUCKETS.len() - 1);
        let fastest = self.fastest[bucket][operands.accumulate as usize];
        if fastest != self.anchor && !self.refused.contains(&rows) {
            // SAFETY: the caller promises the same.
            match unsafe { self.run_with(gpu, operands, &fastest) } {
                // cuBLASLt has enqueued nothing.
                Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => {}
                ended => return ended,
            }
            self.refused.insert(rows);
        }
        // SAFETY: the caller promises the same.
        unsafe { self.run_with(gpu, operands, &self.anchor) }
    }

    /// Enqueues a product with `algorithm`.
    ///
    /// # Safety
    ///
    /// The operands have the sizes of the product, and live until the stream has passed it.
    pub(super) unsafe fn run_with(
        &self,
        gpu: &Gpu,
        operands: Operands,
        algorithm: &Algorithm,
    ) -> Result<(), CublasError> {
        let Operands { weight, x, rows, accumulate, out } = operands;
        let (input, output) = layouts(self.key, rows)?;
        let (one, beta) = (1f32, if accumulate == Accumulate::Add { 1f32 } else { 0f32 });
        // SAFETY: handle, description, layouts and algorithm are alive. The caller promises the rest.
        unsafe {
            result::matmul(
                self.handle,
                self.description.0,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                weight.address() as *const c_void,
                self.weight.0,
                x.address() as *const c_void,
                input.0,
                out.address() as *const c_void,
                output.0,
                out.address() as *mut c_void,
                output.0,
                algorithm,
                ptr::null_mut(),
                0,
                gpu.stream.cast(),
            )
        }
    }
}

/// Asks cuBLASLt for at most `count` algorithms for products with `rows` rows.
fn proposals(
    handle: sys::cublasLtHandle_t,
    description: &Description,
    weight: &Layout,
    key: Key,
    rows: usize,
    count: usize,
) -> Result<Vec<Algorithm>, CublasError> {
    let (input, output) = layouts(key, rows)?;
    let preference = Preference::new()?;
    // SAFETY: the results are plain data, for which zeros are valid.
    let mut results = vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; count];
    let mut found = 0;
    // SAFETY: all objects are alive, and there are `count` results.
    unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            description.0,
            weight.0,
            input.0,
            output.0,
            output.0,
            preference.0,
            count as i32,
            results.as_mut_ptr(),
            &mut found,
        )
    }
    .result()?;
    results.truncate(usize::try_from(found).unwrap_or(0));
    results.retain(|result| result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
    Ok(results.into_iter().map(|result| result.algo).collect())
}

/// Layouts of the input and of the output of `rows` rows.
fn layouts(key: Key, rows: usize) -> Result<(Layout, Layout), CublasError> {
    Ok((Layout::new(type_of(key.dtype), key.inputs, rows)?, Layout::new(FLOAT, key.outputs, rows)?))
}

/// A cuBLASLt description of the product of a transposed matrix with another, with f32 sums.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self, CublasError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = Self(result::create_matmul_desc(compute, FLOAT)?);
        let transposed = TRANSPOSED;
        // SAFETY: the attribute's pointer is valid for its size, and the description is alive.
        unsafe {
            result::set_matmul_desc_attribute(
                description.0,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
        }
        Ok(description)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: this value owns the description, and cuBLASLt reads it only while a product is enqueued.
        unsafe {
            let _ = result::destroy_matmul_desc(self.0);
        }
    }
}

/// A cuBLASLt preference for algorithms without a workspace and without split-K.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref()?);
        let (workspace, reductions) = (0u64, 0u32);
        // SAFETY: the attributes' pointers are valid for their sizes, and the preference is alive.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )?;
            result::set_matmul_pref_attribute(
                preference.0,
                Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (&raw const reductions).cast(),
                size_of_val(&reductions),
            )?;
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: this value owns the preference, and cuBLASLt reads it only while it proposes algorithms.
        unsafe {
            let _ = result::destroy_matmul_pref(self.0);
        }
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
