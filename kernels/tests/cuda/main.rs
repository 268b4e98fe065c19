//! Tests of the CUDA device. Its sources are compiled by NVRTC, and each operation is compared with the CPU device.
//!
//! The tests need NVRTC and a GPU, real or emulated (`emulated-gpu`). Without them, they report that they are skipped
//! or, with `CUDA_TESTS=required` in the environment, fail.

#![allow(clippy::unwrap_used, reason = "tests")]

mod attention;
mod attention_tiles;
mod codes;
mod compile;
mod delta_rule;
mod dense;
mod encoder;
mod experts;
mod flight;
mod group;
mod launches;
mod quantised;
mod row_bits;
mod sampling;
mod support;
