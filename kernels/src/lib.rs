//! Device operations behind one interface. Models do not depend on the kind of device that runs them.
//!
//! [`Device`] is the interface: typed buffers that a device owns, and steps of fused operations over them. The
//! operations are in one trait per family: [`Dense`], [`Experts`], [`PagedAttention`], [`Collectives`], [`Sampler`]. A
//! step is enqueued and collected later. Its host inputs ([`StepInputs`]) are first copied to fixed buffers, and only
//! sampled ids and requested logprobs are returned ([`StepResults`]). [`cpu`] and [`cuda`] are the devices. A
//! [`Recorder`] shows a device's operations to an observer.

pub mod collective;
pub mod cpu;
pub mod cuda;
mod device;
pub mod e4m3;
mod recorder;
mod sampling;
mod step;

pub use device::{
    Argmax, AttendedEntries, Attention, AttentionShape, Collectives, Compress, Compressed, CompressorShape,
    DecayedSum, DeltaRule, DeltaShape, Dense, Device, DeviceError, DeviceLimits, Embed, Encoder,
    EncoderHeads, EntriesShape, ExpertBuffers, ExpertChoice, Experts, GateUp, GatedDelta, GatedNorm,
    GatheredRows, Gelu, GraphId, GroupOffsets, GroupedBuffers, GroupedLinear, HeadNorms, HostMatrix,
    HyperConnections, HyperShape, INT4_GROUP, Indexer, IndexerShape, KvScales, KvShape, KvType, LayerNorm,
    Linear, MixExperts, Norm, OffsetKind, PagedAttention, PixelGrid, PlanesShape, Quantize, QuantizedRows,
    QuantizedType, Recurrence, RopeFrequencies, Rotary, RotateAndStore, RotateTails, Routing, Sampler,
    ScaleType, Score, SegmentAttention, StoreWindow, StreamProjection, TailNorm, VocabularyShard, WeightType,
    WindowAttention, WindowShape, quantize_of_head,
};
pub use recorder::{Observer, Operation, Recorder};
pub use sampling::{
    Adjustments, LogitBias, MAX_NOMINATED, Nomination, SampleRow, Sampled, SamplingParams, ScoreRow,
    StepResults, TokenMask, TokenScore,
};
pub use step::{RowInputs, StepInputs, StepShape};
pub use tutti_planes::{PageId, SlotCopy, SlotId};
