//! The device's memory: mapped buffers, and the tensors, planes and weight matrices in them.

mod buffer;
pub(super) mod entries;
pub(super) mod format;
pub(super) mod fused_matrices;
pub(super) mod kv;
pub(super) mod matrix;
pub(super) mod packed;
pub(super) mod planes;
mod shared;
pub(super) mod slots;
pub(super) mod tensor;
pub(super) mod weights;

pub(super) use buffer::{Buffer, Element};
pub use packed::{PackedOutcome, PackedWeights};
pub use planes::Planes;
pub(super) use shared::Shared;
pub use tensor::{Tensor, Vector};
pub use weights::Weights;
