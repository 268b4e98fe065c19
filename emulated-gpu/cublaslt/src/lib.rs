//! `libcublasLt.so.13` over the emulated driver.
//!
//! ```text
//! api (C functions) --> problem (is it supported, and is it valid?) --> product (computes, in the stream's order)
//! ```
//!
//! The matrix product is D = alpha * op(A) * op(B) + beta * C with f32 sums. The matrices are f32, bf16 or f16, in
//! column or row order, and may form batches with strides. A bias per row of D is optional. Any other product is
//! refused with `CUBLAS_STATUS_NOT_SUPPORTED`, as NVIDIA's library refuses a combination without a kernel. The sum over
//! k has the same order for every shape, so results do not depend on the number of rows. NVIDIA's library does not
//! promise this.
//!
//! Unlike NVIDIA's library, this one refuses an algorithm that was requested for other types, transposes or orders. It
//! also refuses an operand with less alignment than the algorithm was requested for (up to 16 bytes), and a workspace
//! that is smaller than the algorithm needs. It overwrites the workspace before each product.
//!
//! With `EMULATED_CUBLASLT_ALGORITHMS=3`, the library proposes up to three algorithms per product. The second does not
//! support all sizes, and the third gives other bits.

mod api;
mod objects;
mod problem;
mod product;
mod status;
