//! The device's memory: mapped buffers, and the tensors, KV pages and weight matrices in them.

mod buffer;
pub(super) mod format;
pub(super) mod fused_matrices;
pub(super) mod kv;
pub(super) mod matrix;
pub(super) mod packed;
mod shared;
pub(super) mod tensor;
pub(super) mod weights;

pub(super) use buffer::{Buffer, Element};
pub use kv::KvPool;
pub use packed::{PackedOutcome, PackedWeights};
pub(super) use shared::Shared;
pub use tensor::{Tensor, Vector};
pub use weights::Weights;
