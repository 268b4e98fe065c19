//! The interface between models and devices: [`Device`] for everything that all devices have, and one trait per family
//! of operations.
//!
//! A family is a trait in a file of its own ([`Dense`], [`Experts`], [`PagedAttention`], [`Collectives`], [`Sampler`]).
//! The operands of an operation are a struct; optional fields select variants of the operation. A device implements the
//! families that it supports, and every other operation returns [`DeviceError::Unsupported`]. A model has a trait bound
//! for each family that it uses.

mod attention;
mod collectives;
mod compressed;
mod delta_rule;
mod dense;
mod encoder;
mod experts;
mod family;
mod hyper;
mod planes;
mod quantized;
mod recurrence;
mod rotary;
mod sampler;

use std::time::Instant;

pub use tutti_settings::Quantize;

pub use self::attention::{Attention, AttentionShape, HeadNorms, PagedAttention, RotateAndStore};
pub use self::collectives::Collectives;
pub use self::compressed::{
    AttendedEntries, Compress, Compressed, CompressorShape, Indexer, IndexerShape, RotateTails, StoreWindow,
    TailNorm, WindowAttention, WindowShape,
};
pub use self::delta_rule::{DeltaRule, DeltaShape, GatedDelta, GatedNorm};
pub use self::dense::{Dense, Embed, GateUp, GroupedBuffers, GroupedLinear, Linear, Norm, VocabularyShard};
pub use self::encoder::{Encoder, EncoderHeads, Gelu, LayerNorm, PixelGrid, SegmentAttention};
pub(crate) use self::experts::MixSizes;
pub use self::experts::{ExpertBuffers, ExpertChoice, Experts, MixExperts, Routing, Score};
pub use self::hyper::{HyperConnections, HyperShape, StreamProjection};
pub use self::planes::{EntriesShape, KvScales, KvShape, KvType, PlanesShape};
pub use self::quantized::{
    GroupOffsets, INT4_GROUP, OffsetKind, QuantizedRows, QuantizedType, ScaleType, quantize_of_head,
};
pub use self::recurrence::{DecayedSum, Recurrence};
pub use self::rotary::{RopeFrequencies, Rotary};
pub(crate) use self::sampler::preconditions as sampler_preconditions;
pub use self::sampler::{Argmax, GatheredRows, Sampler};
use crate::{PageId, SlotId, StepInputs, StepResults, collective::GroupRank};

/// Storage type of weights, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// 32-bit floats, with arithmetic in f32.
    F32,
    /// IEEE 16-bit floats, widened to f32 for arithmetic.
    F16,
    /// bfloat16. Each matrix product rounds its activations to a precision that is at least bfloat16's.
    Bf16,
}

impl WeightType {
    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// A weight matrix in host memory (often a mapped file), row major: `[rows, columns]` = `[outputs, inputs]`. It may be
/// a window of a wider matrix, such as a TP rank's share of the columns. In a window, `stride` is larger than
/// `columns`, and the device reads the rows in place.
#[derive(Clone, Copy, Debug)]
pub struct HostMatrix<'a> {
    /// Little-endian elements at any alignment, from the first element of the first row to the last element of the last
    /// row.
    pub bytes: &'a [u8],
    /// Type of the elements.
    pub dtype: WeightType,
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs.
    pub columns: usize,
    /// Number of elements from the start of a row to the start of the next, at least `columns`.
    pub stride: usize,
}

impl<'a> HostMatrix<'a> {
    /// Returns a matrix whose rows follow each other without gaps. `bytes` holds `rows * columns` elements.
    pub fn new(bytes: &'a [u8], dtype: WeightType, rows: usize, columns: usize) -> Self {
        Self { bytes, dtype, rows, columns, stride: columns }
    }

    /// Number of bytes from the first element to the last; `None` if it overflows.
    pub fn extent(&self) -> Option<usize> {
        let Self { rows, columns, stride, .. } = *self;
        let Some(gaps) = rows.checked_sub(1).filter(|_| columns > 0) else { return Some(0) };
        gaps.checked_mul(stride)?.checked_add(columns)?.checked_mul(self.dtype.bytes())
    }

    /// Returns the bytes of row `index`, which must be below `rows`.
    pub fn row(&self, index: usize) -> &'a [u8] {
        let size = self.dtype.bytes();
        &self.bytes[index * self.stride * size..][..self.columns * size]
    }
}

/// An error of a device. After [`DeviceError::Lost`], the contents of the device are undefined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An allocation does not fit.
    #[error("out of device memory: {wanted} bytes for {what}")]
    OutOfMemory {
        /// Purpose of the allocation.
        what: &'static str,
        /// Size in bytes.
        wanted: usize,
    },
    /// A shape that this device cannot run.
    #[error("unsupported on this device: {0}")]
    Unsupported(String),
    /// A call that violates the contract of [`Device`]: operands of different shapes, an index out of range, a page
    /// that two requests write to. The device remains usable.
    #[error("misuse of the device: {0}")]
    Misuse(String),
    /// Logits or embeddings of one row that are NaN or infinite: no token may be sampled from them. The other rows of
    /// the step are valid, because rows do not affect each other.
    #[error("not finite: {0}")]
    NotFinite(String),
    /// The device failed.
    #[error("device lost: {0}")]
    Lost(String),
}

/// The limits of a device, known before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Maximum number of steps that are enqueued and not collected, at least 1. A device that runs operations while
    /// they are enqueued has 1.
    pub steps_in_flight: usize,
    /// True if a device in a group of one rank samples from [nominated](Sampler::nominate) tokens faster than from
    /// whole rows of logits.
    pub nominates_alone: bool,
    /// True if the [arg max](Sampler::argmax) takes the masks of rows.
    pub masks_argmax: bool,
}

/// Name of a sequence of operations that a device may record once and replay. Steps with the same name enqueue the same
/// operations on tensors of the same shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GraphId(pub u64);

/// Weights, buffers, planes and steps of one device. Operations are in the traits of the families.
///
/// A `Tensor` is an activation buffer of fixed capacity `[rows, width]`. Inside a step, an operation works on the
/// tensor's first rows: one row per token of the step or, after [`Dense::keep_logit_rows`], one per logit row. No
/// memory is allocated inside a step. If the step has a [`StepShape`](crate::StepShape), rows of padding follow the
/// token rows and the logit rows. Operations compute padding rows or leave them undefined, and no other row depends on
/// them.
///
/// A step is enqueued between [`begin_step`](Self::begin_step) and [`end_step`](Self::end_step), and its results are
/// [collected](Self::collect) later. Operations run in the order in which they are enqueued. A device may run an
/// operation while it is enqueued. Results of sampling are only returned by `collect`.
///
/// A request's results do not depend on the other requests in the step: the order of every reduction depends only on
/// shapes and absolute positions.
pub trait Device: Send + Sized + 'static {
    /// A weight matrix in the device's own layout, `y = x · Wᵀ`.
    type Matrix: Send;
    /// A weight vector: a norm's weight or a bias.
    type Vector: Send;
    /// Activations, `[rows, width]`.
    type Tensor: Send;
    /// The memory of requests: the pages of all paged planes and the slots of all slot planes.
    type Planes: Send;
    /// An enqueued step whose results are not collected yet.
    type Done: Send;

    /// One line for logs: the device, its instruction path, its threads.
    fn describe(&self) -> String;
    /// The device's limits.
    fn limits(&self) -> DeviceLimits;
    /// Bytes of the device's own memory that are free; `None` for a device that computes in the host's memory.
    fn free_bytes(&self) -> Option<u64> {
        None
    }
    /// The device's rank in its TP (tensor parallel) group. Every rank calls the collective operations, in the same
    /// order, with tensors that have the same number of live rows (rows that hold values). If one rank omits a call,
    /// all ranks lose their device.
    fn group_rank(&self) -> GroupRank;

    /// Loads a weight matrix for matrix products. Its rows are the rows of `matrices`, one matrix after the other
    /// (fused q, k and v). All matrices have the same number of columns and the same type. Apart from the device's
    /// copy, no memory of the matrix's size is allocated.
    fn matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError>;
    /// Loads an LM head in the same way as [`matrix`](Self::matrix) loads a matrix, but in eight bits if `quantize` is
    /// [`Quantize::Int4`]. The result can be used like a
    /// matrix, and also for [`Sampler::argmax`] and [`Sampler::partial_argmax`].
    fn head_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError> {
        self.matrix(matrices, quantize)
    }
    /// Loads a table in the same way as [`head_matrix`](Self::head_matrix) loads a head. It can only be used for
    /// [`Dense::embed`]. Unless `quantize` rounds the elements, the device keeps their exact bits, even if matrix
    /// products use another form.
    fn table_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError> {
        self.matrix(matrices, quantize)
    }
    /// Loads a table that is also the LM head. [`Dense::embed`] gives the same result as with a
    /// [table](Self::table_matrix), and matrix products give the same result as with a [head](Self::head_matrix).
    fn tied_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError> {
        self.head_matrix(matrices, quantize)
    }
    /// Loads gate and up, which have the same number of rows, for [`Dense::gate_up`].
    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError>;
    /// True if the device holds weights that the checkpoint stores quantised: see
    /// [`quantized_matrix`](Self::quantized_matrix).
    fn holds_quantized(&self) -> bool {
        false
    }
    /// Loads a weight matrix that the checkpoint stores quantised. The device holds it as it is stored. Its rows are
    /// the rows of `matrices`, which have the same number of columns, the same types of codes and scales, and the same
    /// kind of offsets. The result can be used like a [`matrix`](Self::matrix), a [head](Self::head_matrix) and a
    /// [table](Self::table_matrix).
    fn quantized_matrix(&mut self, matrices: &[QuantizedRows<'_>]) -> Result<Self::Matrix, DeviceError> {
        Err(unsupported(self, matrices))
    }
    /// Loads gate and up, which the checkpoint stores quantised and which have the same number of rows, for
    /// [`Dense::gate_up`].
    fn quantized_gate_up(&mut self, gate_up: [QuantizedRows<'_>; 2]) -> Result<Self::Matrix, DeviceError> {
        Err(unsupported(self, &gate_up))
    }
    /// False if the device gets its matrices from another source, such as a cache file, and reads few of the bytes that
    /// it is given. A loader then does not read ahead.
    fn reads_weights(&self) -> bool {
        true
    }
    /// Runs `task` for each index below `tasks`, in any order, on the threads that the device computes with. Used to
    /// prepare weights on the host while they are loaded.
    fn host_tasks(&mut self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), DeviceError> {
        (0..tasks).for_each(task);
        Ok(())
    }
    /// Size in bytes of a matrix on the device.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> u64;
    /// Size in bytes of the data that the device keeps with an LM head to find the likeliest tokens faster. It is
    /// included in [`matrix_bytes`](Self::matrix_bytes).
    fn screen_bytes(&self, matrix: &Self::Matrix) -> u64 {
        let _ = matrix;
        0
    }
    /// Size in bytes of the data that the device keeps with a [tied](Self::tied_matrix) table because matrix products
    /// use rounded elements. It is included in [`matrix_bytes`](Self::matrix_bytes).
    fn corrections_bytes(&self, matrix: &Self::Matrix) -> u64 {
        let _ = matrix;
        0
    }
    /// Number of outputs and number of inputs of a matrix. For a fused pair, the outputs of gate and up are added.
    fn matrix_shape(&self, matrix: &Self::Matrix) -> [usize; 2];
    /// Loads a vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;

    /// Allocates an activation buffer.
    fn tensor(&mut self, rows: usize, width: usize) -> Result<Self::Tensor, DeviceError>;
    /// Number of live rows and width of a tensor.
    fn tensor_shape(&self, tensor: &Self::Tensor) -> [usize; 2];
    /// Size in bytes of the memory that steps use: all tensors, and the scratch memory of operations. The size is final
    /// once all tensors are allocated and one step has run.
    fn step_bytes(&self) -> u64;
    /// Replaces the contents of `out` with `values` from the host, as `[values.len() / width, width]`. Used for the
    /// input of an encoder, which runs outside of a step.
    fn upload(&mut self, values: &[f32], out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Overwrites the rows of `out` from row `first` on with `values` from the host. Used for embeddings of media
    /// tokens.
    fn overwrite_rows(
        &mut self,
        out: &mut Self::Tensor,
        first: usize,
        values: &[f32],
    ) -> Result<(), DeviceError>;
    /// Appends all rows of `x` to `out`. Waits for the device.
    fn download(&mut self, x: &Self::Tensor, out: &mut Vec<f32>) -> Result<(), DeviceError>;

    /// Allocates the planes of a model. The contents of a page are undefined until the page is written. The contents of
    /// a slot are undefined until a copy or [`write_slot`](Self::write_slot) sets them.
    fn planes(&mut self, shape: &PlanesShape) -> Result<Self::Planes, DeviceError>;
    /// Name of the layout of keys and values within a page. Devices with the same name and shape can exchange pages.
    fn kv_format(&self) -> &'static str;
    /// Appends the bytes of `pages` to `out`, in the device's layout: page by page; within a page, the plane of keys
    /// and values and then each plane of entries; within a plane, layer by layer and head by head. Waits for the
    /// device.
    fn read_pages(
        &mut self,
        planes: &Self::Planes,
        pages: &[PageId],
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError>;
    /// Overwrites pages with bytes that [`read_pages`](Self::read_pages) returned.
    fn write_pages(
        &mut self,
        planes: &mut Self::Planes,
        pages: &[PageId],
        data: &[u8],
    ) -> Result<(), DeviceError>;
    /// Appends a slot's state to `out`: the bytes of each slot plane in order. Waits for the device.
    fn read_slot(
        &mut self,
        planes: &Self::Planes,
        slot: SlotId,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError>;
    /// Overwrites a slot's state with bytes that [`read_slot`](Self::read_slot) returned.
    fn write_slot(&mut self, planes: &mut Self::Planes, slot: SlotId, data: &[u8])
    -> Result<(), DeviceError>;

    /// Begins a step: copies its inputs into the device's fixed buffers and enqueues its slot copies. Later operations
    /// belong to this step. A step that was begun and not ended is dropped, with its results.
    ///
    /// Before anything is enqueued, checks everything that can be checked with the inputs and `planes`. Errors are:
    /// different lengths, gaps between rows, pages or slots out of range, two rows that write to one page or have the
    /// same slot, copies without a slot plane, and a row that continues a step in flight on a device that runs one step
    /// at a time. The caller checks token ids and the capacity of its tensors beforehand, because a step must not fail
    /// after its copies.
    fn begin_step(&mut self, inputs: &StepInputs<'_>, planes: &mut Self::Planes) -> Result<(), DeviceError>;
    /// Enqueues the operations that `body` enqueues. A device that records graphs may replay an earlier recording with
    /// the same name instead of calling `body`.
    fn captured(
        &mut self,
        graph: GraphId,
        body: impl FnOnce(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let _ = graph;
        body(self)
    }
    /// Ends the step that was begun last.
    fn end_step(&mut self) -> Result<Self::Done, DeviceError>;
    /// Waits for a step until the time `until`, or without a limit if it is `None`, and appends the step's results to
    /// `out`. Returns false if the step is still running at that time. Steps are collected in the order in which they
    /// were ended.
    fn collect(
        &mut self,
        done: &mut Self::Done,
        until: Option<Instant>,
        out: &mut StepResults,
    ) -> Result<bool, DeviceError>;
}

/// Returns the error that the device holds no weights of this type as they are stored.
fn unsupported<D: Device>(device: &D, matrices: &[QuantizedRows<'_>]) -> DeviceError {
    let types: Vec<QuantizedType> = matrices.iter().map(|matrix| matrix.element).collect();
    DeviceError::Unsupported(format!(
        "weights that a checkpoint stores as {types:?}, on {}",
        device.describe()
    ))
}
