//! A device that records the time and the amount of work of each operation.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tutti_kernels::{
    AttentionShape, Device, DeviceError, HeadNorms, HostMatrix, KvShape, Norm, PageId, Quantize,
    RopeFrequencies, SampleRow, Sampled, ScoreRow, StepInputs, TokenScore,
    collective::GroupRank,
    cpu::{self, CpuDevice},
};

use super::limits::{Clock, Limits};

/// Sums over the operations of one name since the table was last emptied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    pub calls: usize,
    pub time: Duration,
    /// Floating-point operations without products with weights. A multiply-add counts as two.
    pub flops: f64,
    /// Operations of products with weights, of any type.
    pub products: f64,
    /// Bytes of weights, keys and values, which come from memory.
    pub bytes: f64,
}

impl Work {
    /// Returns the least time in seconds that the machine's limits allow.
    pub fn least(&self, limits: &Limits) -> f64 {
        let computing = self.flops / limits.flops + self.products / limits.products;
        computing.max(self.bytes / limits.bytes)
    }
}

/// The cost of one operation, in the units of [`Work`].
#[derive(Clone, Copy, Default)]
struct Cost {
    flops: f64,
    products: f64,
    bytes: f64,
}

/// Operations by name.
pub type Table = Arc<Mutex<BTreeMap<String, Work>>>;

/// A weight matrix with its shape and size.
pub struct Matrix {
    inner: cpu::Weights,
    outputs: usize,
    inputs: usize,
    bytes: usize,
}

/// The CPU device, timed.
pub struct Timed {
    inner: CpuDevice,
    pub table: Table,
    clock: Clock,
    /// The number of tokens and the position of the first token of each row of the last step.
    rows: Vec<(usize, usize)>,
}

impl Timed {
    pub fn new(inner: CpuDevice, clock: Clock) -> Self {
        Self { inner, table: Table::default(), clock, rows: Vec::new() }
    }

    fn timed<T>(
        &mut self,
        name: &str,
        cost: Cost,
        act: impl FnOnce(&mut CpuDevice) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let began = self.clock.now();
        let result = act(&mut self.inner);
        let time = self.clock.now() - began;
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if !table.contains_key(name) {
            table.insert(name.to_owned(), Work::default());
        }
        if let Some(work) = table.get_mut(name) {
            work.calls += 1;
            work.time += time;
            work.flops += cost.flops;
            work.products += cost.products;
            work.bytes += cost.bytes;
        }
        result
    }

    fn sized(&self, inner: cpu::Weights, fused: &[HostMatrix<'_>]) -> Matrix {
        let bytes = self.inner.matrix_bytes(&inner) as usize;
        let outputs = fused.iter().map(|matrix| matrix.rows).sum();
        Matrix { inner, outputs, inputs: fused[0].columns, bytes }
    }

    fn product<T>(
        &mut self,
        rows: usize,
        weight: &Matrix,
        act: impl FnOnce(&mut CpuDevice) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let Matrix { outputs, inputs, bytes, .. } = *weight;
        let name = format!("product {inputs} to {outputs}");
        let products = 2.0 * (rows * outputs * inputs) as f64;
        self.timed(&name, Cost { flops: 0.0, products, bytes: bytes as f64 }, act)
    }
}

impl Device for Timed {
    type Matrix = Matrix;
    type Vector = cpu::Vector;
    type Tensor = cpu::Tensor;
    type KvPool = cpu::KvPool;

    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn group_rank(&self) -> GroupRank {
        self.inner.group_rank()
    }
    fn matrix(&mut self, parts: &[HostMatrix<'_>], quantize: Quantize) -> Result<Matrix, DeviceError> {
        let inner = self.inner.matrix(parts, quantize)?;
        Ok(self.sized(inner, parts))
    }
    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<Matrix, DeviceError> {
        let inner = self.inner.gate_up_matrix(gate_up, quantize)?;
        Ok(self.sized(inner, &gate_up))
    }
    fn matrix_bytes(&self, matrix: &Matrix) -> u64 {
        matrix.bytes as u64
    }
    fn upload(&mut self, values: &[f32], out: &mut cpu::Tensor) -> Result<(), DeviceError> {
        self.inner.upload(values, out)
    }
    fn overwrite_rows(
        &mut self,
        out: &mut cpu::Tensor,
        first: usize,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        self.inner.overwrite_rows(out, first, values)
    }
    fn download(&mut self, x: &cpu::Tensor, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        self.inner.download(x, out)
    }
    fn vector(&mut self, values: &[f32]) -> Result<cpu::Vector, DeviceError> {
        self.inner.vector(values)
    }
    fn tensor(&mut self, rows: usize, width: usize) -> Result<cpu::Tensor, DeviceError> {
        self.inner.tensor(rows, width)
    }
    fn step_bytes(&self) -> u64 {
        self.inner.step_bytes()
    }
    fn kv_pool(&mut self, shape: KvShape) -> Result<cpu::KvPool, DeviceError> {
        self.inner.kv_pool(shape)
    }
    fn kv_format(&self) -> &'static str {
        self.inner.kv_format()
    }
    fn read_pages(
        &mut self,
        kv: &cpu::KvPool,
        pages: &[PageId],
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        self.inner.read_pages(kv, pages, out)
    }
    fn write_pages(
        &mut self,
        kv: &mut cpu::KvPool,
        pages: &[PageId],
        data: &[u8],
    ) -> Result<(), DeviceError> {
        self.inner.write_pages(kv, pages, data)
    }
    fn begin_step(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
        self.rows.clear();
        self.rows.extend(inputs.rows.iter().map(|row| (row.tokens, row.start)));
        self.timed("begin_step", Cost::default(), |device| device.begin_step(inputs))
    }
    fn embed(&mut self, table: &Matrix, out: &mut cpu::Tensor) -> Result<(), DeviceError> {
        self.timed("embed", Cost::default(), |device| device.embed(&table.inner, out))
    }
    fn embed_shard(
        &mut self,
        table: &Matrix,
        first: usize,
        vocabulary: usize,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        self.inner.embed_shard(&table.inner, first, vocabulary, out)
    }
    fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut cpu::Tensor) -> Result<(), DeviceError> {
        self.timed("rope_angles", Cost::default(), |device| device.rope_angles(rope, out))
    }
    fn rms_norm(
        &mut self,
        x: &cpu::Tensor,
        norm: Norm<'_, cpu::Vector>,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        self.timed("rms_norm", Cost::default(), |device| device.rms_norm(x, norm, out))
    }
    fn linear(
        &mut self,
        x: &cpu::Tensor,
        weight: &Matrix,
        bias: Option<&cpu::Vector>,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        self.product(x.live(), weight, |device| device.linear(x, &weight.inner, bias, out))
    }
    fn norm_linear(
        &mut self,
        x: &cpu::Tensor,
        norm: Norm<'_, cpu::Vector>,
        weight: &Matrix,
        bias: Option<&cpu::Vector>,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        self.product(x.live(), weight, |device| device.norm_linear(x, norm, &weight.inner, bias, out))
    }
    fn linear_add(
        &mut self,
        x: &cpu::Tensor,
        weight: &Matrix,
        bias: Option<&cpu::Vector>,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        self.product(x.live(), weight, |device| device.linear_add(x, &weight.inner, bias, out))
    }
    fn all_reduce(&mut self, x: &mut cpu::Tensor) -> Result<(), DeviceError> {
        self.inner.all_reduce(x)
    }
    fn all_reduce_add(&mut self, x: &mut cpu::Tensor, out: &mut cpu::Tensor) -> Result<(), DeviceError> {
        self.inner.all_reduce_add(x, out)
    }
    fn gather_columns(
        &mut self,
        part: &cpu::Tensor,
        out: Option<&mut cpu::Tensor>,
    ) -> Result<(), DeviceError> {
        self.inner.gather_columns(part, out)
    }
    fn norm_gate_up(
        &mut self,
        x: &cpu::Tensor,
        norm: Norm<'_, cpu::Vector>,
        weight: &Matrix,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        self.product(x.live(), weight, |device| device.norm_gate_up(x, norm, &weight.inner, out))
    }
    fn rotate_and_store(
        &mut self,
        qkv: &mut cpu::Tensor,
        shape: AttentionShape,
        norms: Option<HeadNorms<'_, cpu::Vector>>,
        angles: &cpu::Tensor,
        kv: &mut cpu::KvPool,
        layer: usize,
    ) -> Result<(), DeviceError> {
        self.timed("rotate_and_store", Cost::default(), |device| {
            device.rotate_and_store(qkv, shape, norms, angles, kv, layer)
        })
    }
    fn attention(
        &mut self,
        qkv: &cpu::Tensor,
        shape: AttentionShape,
        kv: &cpu::KvPool,
        layer: usize,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        let (mut seen, mut keys) = (0, 0);
        for &(tokens, start) in &self.rows {
            seen += tokens * start + tokens * (tokens + 1) / 2;
            keys += start + tokens;
        }
        let flops = 4.0 * (seen * shape.heads * shape.head_dim) as f64;
        // Keys and values are bfloat16 in the measured shape.
        let bytes = (4 * keys * shape.kv_heads * shape.head_dim) as f64;
        self.timed("attention", Cost { flops, products: 0.0, bytes }, |device| {
            device.attention(qkv, shape, kv, layer, out)
        })
    }
    fn keep_logit_rows(&mut self, x: &mut cpu::Tensor) -> Result<(), DeviceError> {
        self.timed("keep_logit_rows", Cost::default(), |device| device.keep_logit_rows(x))
    }
    fn copy_rows(
        &mut self,
        x: &cpu::Tensor,
        rows: Range<usize>,
        out: &mut cpu::Tensor,
    ) -> Result<(), DeviceError> {
        self.timed("copy_rows", Cost::default(), |device| device.copy_rows(x, rows, out))
    }
    fn norm_argmax(
        &mut self,
        x: &cpu::Tensor,
        norm: Norm<'_, cpu::Vector>,
        weight: &Matrix,
        logits: &mut cpu::Tensor,
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError> {
        self.product(x.live(), weight, |device| device.norm_argmax(x, norm, &weight.inner, logits, out))
    }
    fn sample(
        &mut self,
        logits: &cpu::Tensor,
        rows: &[(usize, SampleRow<'_>)],
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError> {
        self.timed("sample", Cost::default(), |device| device.sample(logits, rows, out))
    }
    fn score(
        &mut self,
        logits: &cpu::Tensor,
        rows: &[(usize, ScoreRow)],
        out: &mut Vec<TokenScore>,
    ) -> Result<(), DeviceError> {
        self.timed("score", Cost::default(), |device| device.score(logits, rows, out))
    }
}
