//! Device operations behind one seam; models never see which device runs them.
//!
//! [`Device`] is the seam: typed buffers that a device owns, and steps of fused operations over them. The operations
//! are in traits by family: [`Dense`], [`Experts`], [`PagedAttention`], [`Collectives`], [`Sampler`]. A step is
//! enqueued, then collected: its host inputs ([`StepInputs`]) are copied to fixed buffers first, and only sampled ids
//! and requested logprobs come back ([`StepResults`]). [`cpu`] and [`cuda`] are the devices. A [`Recorder`] shows a
//! device's operations to an observer.

pub mod collective;
pub mod cpu;
pub mod cuda;
mod device;
mod recorder;
mod sampling;
mod step;

pub use device::{
    Argmax, Attention, AttentionShape, Collectives, DecayedSum, DeltaRule, DeltaShape, Dense, Device,
    DeviceError, DeviceLimits, Embed, ExpertBuffers, Experts, GateUp, GatedDelta, GatedNorm, GatheredRows,
    GraphId, HeadNorms, HostMatrix, KvShape, Linear, MixExperts, Norm, PagedAttention, PlanesShape, Quantize,
    Recurrence, RopeFrequencies, Rotary, RotateAndStore, Routing, Sampler, VocabularyShard, WeightType,
};
pub use recorder::{Observer, Operation, Recorder};
pub use sampling::{
    Adjustments, LogitBias, MAX_NOMINATED, Nomination, SampleRow, Sampled, SamplingParams, ScoreRow,
    StepResults, TokenScore,
};
pub use step::{RowInputs, StepInputs, StepShape};
pub use tutti_planes::{PageId, SlotCopy, SlotId};
