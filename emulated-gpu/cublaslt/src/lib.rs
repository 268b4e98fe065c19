//! `libcublasLt.so.13` over the emulated driver.
//!
//! ```text
//! api (C functions) --> problem (is it supported, and is it valid?) --> product (computes, in the stream's order)
//! ```
//!
//! The product is D = alpha * op(A) * op(B) + beta * C with f32, bf16 or f16 matrices and f32 sums, in column or row
//! order, batched with strides, with or without a bias per row of D. Any other product is refused with
//! `CUBLAS_STATUS_NOT_SUPPORTED`, as NVIDIA's library refuses a combination without a kernel. The sum over k has the
//! same order for every shape, so results do not depend on the number of rows. NVIDIA's library does not promise this.
//!
//! Unlike NVIDIA's library, this one refuses an algorithm that was requested for other types, transposes or orders. It
//! also refuses an operand with less alignment than the algorithm was requested for (up to 16 bytes), and a workspace
//! that is smaller than the algorithm needs. It overwrites the workspace before each product.

mod api;
mod objects;
mod problem;
mod product;
mod status;
