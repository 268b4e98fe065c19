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

/// A weight matrix in host memory (often a mapped file), row major: `[rows, columns]` = `[outputs, inputs]`.
#[derive(Clone, Copy, Debug)]
pub struct HostMatrix<'a> {
    /// Little-endian elements, `rows * columns` of them, at any alignment.
    pub bytes: &'a [u8],
    /// Type of the elements.
    pub dtype: WeightType,
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs.
    pub columns: usize,
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

/// The heads of one attention layer. A fused `qkv` row is `[q heads | k heads | v heads] × head_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor of q·k.
    pub scale: f32,
    /// Number of keys that a query sees, including its own; `None` if it sees all keys up to its own.
    pub window: Option<usize>,
}

/// An RMS norm over the width of a row: `x / sqrt(mean(x²) + eps) * weight`.
pub struct Norm<'a, V> {
    /// Weight, as wide as the row.
    pub weight: &'a V,
    /// Value added to the mean square.
    pub eps: f32,
}

/// RMS norms of each head of q and k before rotation (Qwen3).
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
    /// Factor of cosine and sine (YaRN's attention factor); 1 without YaRN.
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
    /// A call that violates the contract of [`Device`]: operands of different shapes, an index out of range, a page that two
    /// rows write to. The device remains usable.
    #[error("misuse of the device: {0}")]
    Misuse(String),
    /// The device failed, or computed a NaN or infinity.
    #[error("device lost: {0}")]
    Lost(String),
}

/// Operations of one device, enqueued in order.
///
/// A `Tensor` is an activation buffer of fixed capacity `[rows, width]`. An operation works on its first rows, as many as the step
/// has tokens (or, after [`Device::keep_logit_rows`], as many as it has logit rows). No memory is allocated inside a step.
///
/// Results do not depend on a row's batch-mates: the order of every reduction depends only on shapes and absolute positions.
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
    /// The device's rank in its TP group. Every rank calls the collective operations, in the same order, with tensors of
    /// the same number of live rows. A rank that misses one makes the device lost for all.
    fn group_rank(&self) -> GroupRank;

    /// Loads a matrix whose rows are the rows of `matrices`, one matrix after the other (fused q, k and v). All matrices have the
    /// same number of columns and the same type. No memory of that size is allocated apart from the device's copy.
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
    /// Size in bytes of a matrix on the device.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> u64;
    /// Loads a vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;
    /// Allocates an activation buffer.
    fn tensor(&mut self, rows: usize, width: usize) -> Result<Self::Tensor, DeviceError>;
    /// Size in bytes of the memory that steps use: all tensors, and the scratch memory of operations. It is known after the tensors
    /// are made and one step has run.
    fn step_bytes(&self) -> u64;
    /// Allocates a pool of KV pages. Their contents are undefined until they are written.
    fn kv_pool(&mut self, shape: KvShape) -> Result<Self::KvPool, DeviceError>;
    /// Name of the layout of keys and values within a page. Devices with the same name and shape can exchange pages.
    fn kv_format(&self) -> &'static str;
    /// Appends the bytes of pages in the device's layout: page by page, layer by layer, head by head. Waits for the device.
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

    /// Replaces `out` with rows from the host, `[values / width, width]`: the input of an encoder, which runs outside of a step.
    fn upload(&mut self, values: &[f32], out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Overwrites rows of `out` from `first` on with rows from the host: embeddings of media tokens.
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
    /// [`embed`](Self::embed) with a shard that holds the rows from `first` on of a table of `vocabulary` rows. The result is zeros
    /// for ids of other shards, so that the sum over ranks is the result of the whole table.
    fn embed_shard(
        &mut self,
        table: &Self::Matrix,
        first: usize,
        vocabulary: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Computes `out[t] = [cos | sin](positions[t] * inverse) * scale`, `[tokens, head_dim]`, once per step for all layers.
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
    /// Replaces `x` with its sum over ranks.
    fn all_reduce(&mut self, x: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Replaces `x` with its sum over ranks, and adds it to `out`: the residual add if inputs are divided among ranks.
    fn all_reduce_add(&mut self, x: &mut Self::Tensor, out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Gathers columns at rank 0: each row of `out` is the concatenation of the ranks' rows of `part`. Only rank 0 passes an `out`.
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
    /// Normalises q and k of each token if there are norms, and rotates them by `angles` (halves convention). q stays in `qkv`; k
    /// and v are written to the request's pages.
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

    /// Computes `x[i] = x[logit_rows[i]]`, which drops the rows that no logit is computed from. Later operations on `x`, and on
    /// tensors computed from it, cover `logit_rows.len()` rows. The step's `logit_rows` ascend.
    fn keep_logit_rows(&mut self, x: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Computes `out[i] = x[rows.start + i]`. Later operations on `out`, and on tensors computed from it, cover `rows.len()` rows.
    fn copy_rows(
        &mut self,
        x: &Self::Tensor,
        rows: std::ops::Range<usize>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Appends the likeliest token of each row of `norm(x) · Wᵀ`. The result is that of [`sample`](Self::sample) for rows that
    /// [need nothing else](SampleRow::takes_the_likeliest). `logits` is scratch memory; its contents are undefined afterwards.
    /// Waits for the device.
    fn norm_argmax(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        weight: &Self::Matrix,
        logits: &mut Self::Tensor,
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError>;
    /// Samples one token from row `rows[i].0` of `logits` for each i, and appends them to `out`. Waits for the device.
    fn sample(
        &mut self,
        logits: &Self::Tensor,
        rows: &[(usize, SampleRow<'_>)],
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError>;
    /// Looks up the scores of known tokens, and appends them to `out`. `rows[i].0` is the row of `logits`. Waits for the device.
    fn score(
        &mut self,
        logits: &Self::Tensor,
        rows: &[(usize, ScoreRow)],
        out: &mut Vec<TokenScore>,
    ) -> Result<(), DeviceError>;
}
