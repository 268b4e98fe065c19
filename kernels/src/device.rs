//! The seam between models and devices.

pub use tutti_settings::Quantize;

use crate::{PageId, SampleRow, Sampled, ScoreRow, StepInputs, TokenScore, collective::GroupRank};

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// 32-bit floats: computed exactly as such.
    F32,
    /// IEEE half precision, widened when used.
    F16,
    /// bfloat16: stays so in memory; activations are rounded to it at the door of each matrix product.
    Bf16,
}

impl WeightType {
    /// Bytes an element.
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
    /// Of the elements.
    pub dtype: WeightType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
}

/// The shape of a paged KV plane, over all its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers that have keys and values.
    pub layers: usize,
    /// Heads a layer.
    pub kv_heads: usize,
    /// Elements a head.
    pub head_dim: usize,
    /// Tokens a page.
    pub page_tokens: usize,
    /// Pages, the null page included.
    pub pages: usize,
    /// How keys and values are stored.
    pub dtype: WeightType,
}

impl KvShape {
    /// Bytes that one page takes over all layers, keys and values.
    pub fn page_bytes(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * self.page_tokens * self.dtype.bytes()
    }
}

/// The heads of one attention layer. A fused `qkv` row is `[q heads | k heads | v heads] × head_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements a head.
    pub head_dim: usize,
    /// Multiplies q·k.
    pub scale: f32,
    /// Keys a query sees, itself included; `None` sees all before it.
    pub window: Option<usize>,
}

/// An RMS norm over the width of a row: `x / sqrt(mean(x²) + eps) * weight`.
pub struct Norm<'a, V> {
    /// As wide as the row.
    pub weight: &'a V,
    /// Added to the mean square.
    pub eps: f32,
}

/// RMS norms of each head of q and k before rotation (Qwen3).
pub struct HeadNorms<'a, V> {
    /// `[head_dim]`, for every query head.
    pub q: &'a V,
    /// `[head_dim]`, for every key head.
    pub k: &'a V,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rotary frequencies: `angle[i] = position * inverse[i]`; `scale` multiplies cosine and sine (YaRN's attention
/// factor).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// `[head_dim / 2]`.
    pub inverse: Vec<f32>,
    /// 1 without YaRN.
    pub scale: f32,
}

/// What a device can fail with. After [`DeviceError::Lost`] nothing that the device holds can be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An allocation does not fit.
    #[error("out of device memory: {wanted} bytes for {what}")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much.
        wanted: usize,
    },
    /// A shape that this device cannot run.
    #[error("unsupported on this device: {0}")]
    Unsupported(String),
    /// A call that breaks this seam's contract: operands of different shapes, an index out of range, a page that two
    /// rows write to. The device is as good as before.
    #[error("misuse of the device: {0}")]
    Misuse(String),
    /// The device itself failed, or computed something that is not a number.
    #[error("device lost: {0}")]
    Lost(String),
}

/// Operations of one device, enqueued in order.
///
/// A `Tensor` is an activation buffer of fixed capacity `[rows, width]`; an operation works on the first rows of it,
/// as many as the step has tokens (or, from [`Device::keep_logit_rows`] on, as many as it has logit rows). Nothing is
/// allocated inside a step.
///
/// Results do not depend on a row's batch-mates: every reduction's order follows from shapes and absolute positions.
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

    /// Takes over a matrix whose rows are the parts' rows, one part after the other (q, k and v fused). All parts have the
    /// same number of columns and the same type. Beside the device's own copy nothing as large is allocated.
    fn matrix(&mut self, parts: &[HostMatrix<'_>], quantize: Quantize) -> Result<Self::Matrix, DeviceError>;
    /// Takes over gate and up, of as many rows each, for [`norm_gate_up`](Self::norm_gate_up).
    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<Self::Matrix, DeviceError>;
    /// Bytes that a matrix takes on the device.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> u64;
    /// Takes over a vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;
    /// An activation buffer.
    fn tensor(&mut self, rows: usize, width: usize) -> Result<Self::Tensor, DeviceError>;
    /// Bytes that steps work in at their largest, known once the tensors are made and one step has run: all tensors, and
    /// what operations keep beside them.
    fn step_bytes(&self) -> u64;
    /// A pool of KV pages; their contents are undefined until written.
    fn kv_pool(&mut self, shape: KvShape) -> Result<Self::KvPool, DeviceError>;
    /// How keys and values lie within a head's share of a page. Devices of one name and shape read each other's bytes.
    fn kv_format(&self) -> &'static str;
    /// Appends the bytes of pages as they lie: of each page layer by layer, of each layer its heads in order. Waits for
    /// the device.
    fn read_pages(
        &mut self,
        kv: &Self::KvPool,
        pages: &[PageId],
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError>;
    /// Fills pages with what [`read_pages`](Self::read_pages) gave.
    fn write_pages(
        &mut self,
        kv: &mut Self::KvPool,
        pages: &[PageId],
        data: &[u8],
    ) -> Result<(), DeviceError>;

    /// Copies the step's inputs into the device's fixed buffers. Every later operation is about this step.
    fn begin_step(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError>;

    /// `out` becomes rows from the host, `[values / width, width]`: the input of an encoder, which is no step.
    fn upload(&mut self, values: &[f32], out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// Rows of `out` from `first` on become rows from the host: embeddings of tokens that are no text.
    fn overwrite_rows(
        &mut self,
        out: &mut Self::Tensor,
        first: usize,
        values: &[f32],
    ) -> Result<(), DeviceError>;
    /// Appends all rows of `x`. Waits for the device.
    fn download(&mut self, x: &Self::Tensor, out: &mut Vec<f32>) -> Result<(), DeviceError>;

    /// `out[t] = table[token_ids[t]]`.
    fn embed(&mut self, table: &Self::Matrix, out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// The same of a table that holds the rows from `first` on of one of `vocabulary` rows: zeros for ids that are not
    /// in it, so that the sum over ranks is the whole table's.
    fn embed_shard(
        &mut self,
        table: &Self::Matrix,
        first: usize,
        vocabulary: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// `out[t] = [cos | sin](positions[t] * inverse) * scale`, `[tokens, head_dim]`: computed once, used by all layers.
    fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// `out = norm(x)`.
    fn rms_norm(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// `out = x · Wᵀ (+ bias)`.
    fn linear(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// `out = norm(x) · Wᵀ (+ bias)`.
    fn norm_linear(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// `out += x · Wᵀ (+ bias)`: the residual add of attention and MLP outputs.
    fn linear_add(
        &mut self,
        x: &Self::Tensor,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// `x` becomes its sum over ranks.
    fn all_reduce(&mut self, x: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// `out += x` summed over ranks, which `x` becomes: the residual add where inputs are cut among ranks.
    fn all_reduce_add(&mut self, x: &mut Self::Tensor, out: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// At rank 0, which alone gives an `out`: each row is the ranks' rows of `part` side by side.
    fn gather_columns(
        &mut self,
        part: &Self::Tensor,
        out: Option<&mut Self::Tensor>,
    ) -> Result<(), DeviceError>;
    /// `out = silu(norm(x) · gateᵀ) * (norm(x) · upᵀ)`.
    fn norm_gate_up(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        weight: &Self::Matrix,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Normalises (where asked) and rotates q and k of each token by `angles` (halves convention), leaves q in `qkv`,
    /// and writes k and v into the request's pages.
    fn rotate_and_store(
        &mut self,
        qkv: &mut Self::Tensor,
        shape: AttentionShape,
        norms: Option<HeadNorms<'_, Self::Vector>>,
        angles: &Self::Tensor,
        kv: &mut Self::KvPool,
        layer: usize,
    ) -> Result<(), DeviceError>;
    /// Causal attention of each token over its request's pages; a query at position p sees keys at positions
    /// `max(0, p + 1 - window) ..= p`. `out`: `[tokens, heads * head_dim]`.
    fn attention(
        &mut self,
        qkv: &Self::Tensor,
        shape: AttentionShape,
        kv: &Self::KvPool,
        layer: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;

    /// `x[i] = x[logit_rows[i]]`: drops the rows that no logit is computed from. Later operations on `x`, and on tensors
    /// computed from it, cover `logit_rows.len()` rows. The step's `logit_rows` ascend.
    fn keep_logit_rows(&mut self, x: &mut Self::Tensor) -> Result<(), DeviceError>;
    /// `out[i] = x[rows.start + i]`; later operations on `out`, and on tensors computed from it, cover `rows.len()` rows.
    fn copy_rows(
        &mut self,
        x: &Self::Tensor,
        rows: std::ops::Range<usize>,
        out: &mut Self::Tensor,
    ) -> Result<(), DeviceError>;
    /// Appends the likeliest token of each row of `norm(x) · Wᵀ`: what [`sample`](Self::sample) gives for rows that
    /// [ask for nothing else](SampleRow::takes_the_likeliest). The device may work in `logits`, of which nothing can be
    /// read afterwards. Waits for the device.
    fn norm_argmax(
        &mut self,
        x: &Self::Tensor,
        norm: Norm<'_, Self::Vector>,
        weight: &Self::Matrix,
        logits: &mut Self::Tensor,
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError>;
    /// Samples one token from row `rows[i].0` of `logits` for each i, appending to `out`. Waits for the device.
    fn sample(
        &mut self,
        logits: &Self::Tensor,
        rows: &[(usize, SampleRow<'_>)],
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError>;
    /// Looks up known tokens: `rows[i].0` is the row of `logits`. Appends to `out`. Waits for the device.
    fn score(
        &mut self,
        logits: &Self::Tensor,
        rows: &[(usize, ScoreRow)],
        out: &mut Vec<TokenScore>,
    ) -> Result<(), DeviceError>;
}
