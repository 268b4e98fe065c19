//! The CUDA device: one GPU and one stream. NVRTC compiles its kernels at the first start.
//!
//! Building this crate, or starting a program that uses it, does not require CUDA. The libraries are opened at run
//! time, and [`gpus`] returns an error that names what is missing. Activations are f32; weights, keys and values have
//! the checkpoint's type. Matrix products with weights run in cuBLASLt, all other operations in the kernels of
//! `cuda/sources`. See `docs/cuda.md`.

mod arguments;
mod attention_work;
mod compile;
mod context;
mod device;
mod experts;
mod gemm;
mod host_threads;
mod kernels;
mod library;
mod memory;
mod nccl;
mod parameters;
mod planes;
mod progress;
mod records;
mod results;
mod sources;
mod staging;
mod step;
mod tensor;
mod watchdog;

pub use compile::{KernelCache, compile, compile_all, virtual_architecture};
pub use context::{MemoryInfo, MemoryReader};
pub use device::{CudaDevice, Done};
pub use library::{Missing, gpus, gpus_without_compiler};
pub use nccl::{GroupId, GroupMeeting, collectives};
pub use planes::Planes;
pub use sources::{DeclaredKernel, SOURCES, Source};
pub use tensor::{Matrix, Tensor, Vector};
