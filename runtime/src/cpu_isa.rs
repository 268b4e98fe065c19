//! The setting of a CPU's instruction path. Conductor and workers share it.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The instruction path of CPU workers. Its names are those that the kernels give their paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum CpuIsa {
    /// The best path that the worker's machine has.
    #[default]
    Auto,
    /// Plain code, on every machine.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with dot products of bytes.
    Avx512Vnni,
    /// AVX-512 with dot products of bytes and of bfloat16.
    Avx512Bf16,
}
