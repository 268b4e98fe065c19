//! The CPU device: packed weights, a few threads, and kernels compiled for several instruction paths. The best path
//! that the machine supports is chosen at run time.

mod attention;
mod compressed;
mod delta;
mod device;
mod encoder;
mod experts;
mod gemm;
mod hyper;
mod memory;
mod quant;
mod rowwise;
mod sampling;
mod simd;
mod step;
#[cfg(test)]
mod testing;
mod threads;

pub use device::{CpuDevice, Done};
pub use memory::{PackedOutcome, PackedWeights, Planes, Tensor, Vector, Weights};
pub(crate) use quant::RowQuantiser;
pub use sampling::screen::ScreenCounts;
#[doc(hidden)] // For integration tests.
pub use sampling::screen::inspect;
pub use simd::Isa;
pub use threads::Cores;
