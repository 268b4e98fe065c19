//! The CUDA device: its sources under NVIDIA's compiler, and each operation against the CPU device.
//!
//! The tests run where they find NVRTC and a GPU, real or emulated (`emulated-gpu`), and say so where they do not.
//! With `CUDA_TESTS=required` in the environment they fail instead.

#![allow(clippy::unwrap_used, reason = "tests")]

mod attention;
mod attention_tiles;
mod compile;
mod delta_rule;
mod dense;
mod experts;
mod flight;
mod group;
mod launches;
mod sampling;
mod support;
