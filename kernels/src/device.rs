//! The seam between models and devices.

pub use tutti_settings::Quantize;

use crate::{PageId, SampleRow, Sampled, ScoreRow, StepInputs, TokenScore, collective::GroupRank};

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

/// A weight matrix in host memory (often a mapped file), row major: `[rows, columns]` = `[outputs, inputs]`. It may be a
/// window of a wider matrix, such as a TP rank's share of the columns: then the rows lie further apart than they are
/// wide, and the device's threads read them in place.
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

    /// Returns the bytes of a row, which is below `rows`.
    pub fn row(&self, index: usize) -> &'a [u8] {
        let size = self.dtype.bytes();
        &self.bytes[index * self.stride * size..][..self.columns * size]
    }
}

/// The shape of a paged KV plane, over all its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers with keys and values.
    pub layers: usize,
    /// Heads per layer.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Number of pages, including the null page.
    pub pages: usize,
    /// Storage type of keys and values.
    pub dtype: WeightType,
}

impl KvShape {
    /// Bytes per page: keys and values of all layers.
    pub fn page_bytes(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * self.page_tokens * self.dtype.bytes()
    }
}

/// The heads of one attention layer. A token's fused `qkv` is `[q heads | k heads | v heads] × head_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor by which q·k is multiplied.
    pub scale: f32,
    /// Number of keys that a query sees, including its own; `None` if it sees all keys up to its own.
    pub window: Option<usize>,
}

/// An RMS norm of each row of a tensor: `x / sqrt(mean(x²) + eps) * weight`.
pub struct Norm<'a, V> {
    /// Weights, one per element of a row.
    pub weight: &'a V,
    /// Value added to the mean square.
    pub eps: f32,
}

/// RMS norms that are applied to each head of q and k before rotation (Qwen3).
pub struct HeadNorms<'a, V> {
    /// Weight for every query head, `[head_dim]`.
    pub q: &'a V,
    /// Weight for every key head, `[head_dim]`.
    pub k: &'a V,
    /// Value added to the mean square.
    pub eps: f32,
}

/// Rotary frequencies: `angle[i] = position * inverse[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// Inverse frequencies, `[head_dim / 2]`.
    pub inverse: Vec<f32>,
    /// Factor by which cosine and sine are multiplied (YaRN's attention factor); 1 without YaRN.
    pub scale: f32,
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
    /// The device failed, or computed a NaN or infinity.
    #[error("device lost: {0}")]
    Lost(String),
}

/// Operations of one device, enqueued in order.
///
/// A `Tensor` is an activation buffer of fixed capacity `[rows, width]`. Inside a step, an operation works on the
/// tensor's first rows: one row per token of the step or, after [`Device::keep_logit_rows`], one per logit row. No
/// memory is allocated inside a step.
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
    /// The pages of a KV plane.
    type KvPool: Send;

    /// One line for logs: the device, its instruction path, its threads.
    fn describe(&self) -> String;
    /// The device's rank in its TP (tensor parallel) group. Every rank calls the collective operations, in the same
    /// order, with tensors that have the same number of live rows (rows that hold values). If one rank omits a call,
    /// all ranks lose their device.
    fn group_rank(&self) -> GroupRank;

    /// Loads a matrix whose rows are the rows of `matrices`, one matrix after the other (fused q, k and v). All
    /// matrices have the same number of columns and the same type. Apart from the device's copy, no memory of the
    /// matrix's size is allocated.
    fn matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError>;
    /// Loads gate and up, which have the same number of rows, for [`norm_gate_up`](Self::norm_gate_up).
    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError>;
    /// False if the device takes its matrices from elsewhere, such as a cache file, and reads little of the bytes that it
    /// is given. A loader then does not read ahead.
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
    /// Loads a vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;
    /// Allocates an activation buffer.
    fn tensor(&mut self, rows: usize, width: usize) -> Result<Self::Tensor, DeviceError>;
    /// Size in bytes of the memory that steps use: all tensors, and the scratch memory of operations. The size is final
    /// once all tensors are allocated and one step has run.
    fn step_bytes(&self) -> u64;
    /// Allocates a pool of KV pages. The contents of a page are undefined until the page is written.
    fn kv_pool(&mut self, shape: KvShape) -> Result<Self::KvPool, DeviceError>;
    /// Name of the layout of keys and values within a page. Devices with the same name and shape can exchange pages.
    fn kv_format(&self) -> &'static str;
    /// Appends the bytes of `pages` to `out`, in the device's layout: page by page, layer by layer, head by head. Waits
    /// for the device.
    fn read_pages(
        &mut self,
        kv: &Self::KvPool,
        pages: &[PageId],
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError>;
    /// Overwrites pages with bytes that [`read_pages`](Self::read_pages) returned.
    fn write_pages(
        &mut self,
        kv: &mut Self::KvPool,
        pages: &[PageId],
        data: &[u8],
    ) -> Result<(), DeviceError>;

    /// Copies the step's inputs into the device's fixed buffers. Later operations belong to this step.
    fn begin_step(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError>;

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

    /// Computes `out[t] = table[token_ids[t]]`.
    fn embed(&mut self, table: &Self::Matrix, out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// [`embed`](Self::embed) with one shard of a table of `vocabulary` rows: `table` holds the rows of the whole table
    /// from row `first` on. For a token id of another shard, the result is zeros. The sum of all ranks' results
    /// therefore equals the result with the whole table.
    fn embed_shard(
        &mut self,
        table: &Self::Matrix,
        first: usize,
        vocabulary: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Computes `out[t] = [cos | sin](positions[t] * inverse) * scale`, `[tokens, head_dim]`, once per step for all
    /// layers.
    fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Computes `out = norm(x)`.
    fn rms_norm(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Computes `out = x · Wᵀ (+ bias)`.
    fn linear(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Computes `out = norm(x) · Wᵀ (+ bias)`.
    fn norm_linear(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Computes `out += x · Wᵀ (+ bias)`: the residual add of attention and MLP outputs.
    fn linear_add(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Replaces each rank's `x` with the elementwise sum of all ranks' `x`.
    fn all_reduce(&mut self, x: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// [`all_reduce`](Self::all_reduce) of `x`, then `out += x`: the residual add after a product whose inputs are
    /// divided among the ranks.
    fn all_reduce_add(&mut self, x: &mut Self::Tensor, out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Gathers columns at rank 0: each row of `out` is the concatenation of the ranks' rows of `part`. Only rank 0
    /// passes an `out`.
    fn gather_columns(
        &mut self,
        part: &Self::Tensor,
        out: Option<&mut Self::Tensor>,
    ) -> Result<(), DeviceError>;
    /// Computes `out = silu(norm(x) · gateᵀ) * (norm(x) · upᵀ)`.
    fn norm_gate_up(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        weight: &Self::Matrix,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Normalises q and k of each token if there are norms, and rotates q and k by `angles`: element `i` of a head is
    /// rotated with element `i + head_dim / 2`. q stays in `qkv`; k and v are written to the request's pages.
    fn rotate_and_store(
        &mut self,
        qkv: &mut Self::Tensor,
        shape: AttentionShape,
        norms: Option<HeadNorms<'_, Self::Vector>>,
        angles: &Self::Tensor,
        kv: &mut Self::KvPool,
        layer: usize,
    ) -> Result<(), DeviceError>;
    /// Computes causal attention of each token over its request's pages. A query at position p sees keys at positions
    /// `max(0, p + 1 - window) ..= p`. `out` is `[tokens, heads * head_dim]`.
    fn attention(
        &mut self,
        qkv: &Self::Tensor,
        shape: AttentionShape,
        kv: &Self::KvPool,
        layer: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// Keeps only the rows whose logits are needed: computes `x[i] = x[logit_rows[i]]`. Later operations on `x`, and on
    /// tensors computed from `x`, cover `logit_rows.len()` rows. The step's `logit_rows` ascend.
    fn keep_logit_rows(&mut self, x: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Computes `out[i] = x[rows.start + i]`. Later operations on `out`, and on tensors computed from `out`, cover
    /// `rows.len()` rows.
    fn copy_rows(
        &mut self,
        x: &Self::Tensor,
        rows: std::ops::Range<usize>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Appends the likeliest token of each row of `norm(x) · Wᵀ` to `out`. For a row that [takes the likeliest
    /// token](SampleRow::takes_the_likeliest), the result equals that of [`sample`](Self::sample). `logits` is scratch
    /// memory; its contents are undefined afterwards. Waits for the device.
    fn norm_argmax(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        weight: &Self::Matrix,
        logits: &mut Self::Tensor,
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError>;
    /// Samples one token from row `rows[i].0` of `logits` for each i, and appends the tokens to `out`. Waits for the
    /// device.
    fn sample(
        &mut self,
        logits: &Self::Tensor,
        rows: &[(usize, SampleRow<'_>)],
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError>;
    /// Looks up the score of the known token `rows[i].1` in row `rows[i].0` of `logits` for each i, and appends the
    /// scores to `out`. Waits for the device.
    fn score(
        &mut self,
        logits: &Self::Tensor,
        rows: &[(usize, ScoreRow)],
        out: &mut Vec<TokenScore>,
    ) -> Result<(), DeviceError>;
}
