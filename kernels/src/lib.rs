//! Device operations behind one seam; models never see which device runs them.
//!
//! [`Device`] is the seam: typed buffers that a device owns, and fused operations over them. Operations are enqueued
//! inside a step. Only an operation that returns results to the host waits for the device. A step's host inputs
//! ([`StepInputs`]) are copied to fixed buffers first, and only sampled ids and requested logprobs come back. [`cpu`]
//! is the first device.

pub mod collective;
pub mod cpu;
mod device;
mod sampling;
mod step;

pub use device::{
    AttentionShape, Device, DeviceError, HeadNorms, HostMatrix, KvShape, Norm, Quantize, RopeFrequencies,
    WeightType,
};
pub use sampling::{SampleRow, Sampled, SamplingParams, ScoreRow, TokenScore};
pub use step::{PageId, RowInputs, SlotCopy, SlotId, StepInputs};
