//! The CPU device against plain arithmetic in double precision, and against itself: alone, batched, chunked, on every
//! instruction path and number of threads.

#![allow(clippy::unwrap_used)] // Tests, and what they share.

mod argmax;
mod attention;
mod gate_up;
mod int8;
mod linear;
mod misuse;
mod packed;
mod rowwise;
mod sampling;
mod support;
