//! `libcublasLt.so.13` over the emulated driver.
//!
//! ```text
//! api (C functions) --> problem (is it supported, and is it valid?) --> product (computes, in the stream's order)
//! ```
//!
//! The product is D = alpha * op(A) * op(B) + beta * C with f32, bf16 or f16 matrices and f32 sums, in column or row
//! order, batched with strides, with or without a bias per row of D. What it does not do is refused with
//! `CUBLAS_STATUS_NOT_SUPPORTED`, as the real library refuses a combination that it has no kernel for. The sum over k
//! has one order for every shape: results do not change with the number of rows, which silicon does not promise.
//!
//! Unlike silicon it also refuses an algorithm that was asked for other types, transposes or orders, an operand whose
//! address is aligned to less than the algorithm was asked for (up to 16 bytes), and a workspace that is smaller than
//! the algorithm needs; and it overwrites the workspace.

mod api;
mod objects;
mod problem;
mod product;
mod status;
