//! [`CpuDevice`]: the operations of the device seam, each checked and handed to its kernel.

mod products;

use std::ops::Range;

use super::attention;
use super::attention::rotate::{Norms, RotateAndStore, rotate_and_store};
use super::gemm::{self, Epilogue};
use super::memory::fused_matrices::FusedMatrices;
use super::memory::{KvPool, PackedWeights, Tensor, Vector, Weights, kv};
use super::quant::int8;
use super::rowwise;
use super::sampling::{argmax, logits, sample};
use super::simd::Isa;
use super::simd::isa::Path;
use super::step::Step;
use super::threads::cores::{self, Cores};
use super::threads::pool::ThreadPool;
use crate::{
    AttentionShape, Device, DeviceError, HeadNorms, HostMatrix, KvShape, Norm, PageId, Quantize,
    RopeFrequencies, SampleRow, Sampled, ScoreRow, StepInputs, TokenScore,
    collective::{Collective, CollectiveError, GroupRank},
};

/// A CPU as a device. Operations run synchronously, on the caller's thread and the device's own threads.
pub struct CpuDevice {
    path: Path,
    pool: ThreadPool,
    step: Step,
    /// Scratch memory of products, sized for the largest tensor so far. The system commits the pages of this memory
    /// when they are first written.
    products: gemm::Scratch,
    /// Scratch memory for products in int8.
    int8: int8::Scratch,
    attention: attention::Scratch,
    best: Vec<argmax::Best>,
    /// One scratch per thread.
    sampling: Vec<sample::Scratch>,
    /// The collective of the TP group; `None` without a group.
    group: Option<Box<dyn Collective>>,
    /// Columns gathered from the ranks, rank by rank.
    gathered: Vec<f32>,
    /// The cache file of packed weights.
    packed: Option<PackedWeights>,
    /// Total size in bytes of all tensors that have been made.
    tensor_bytes: u64,
    /// Rows and width of the widest tensor. In a model with an LM head, that is the tensor of logits.
    widest: (usize, usize),
}

impl CpuDevice {
    /// Creates a device with `threads` threads, including the caller's (0 counts as 1). The machine must support the
    /// instruction path; [`Isa::detect`] returns the best one.
    pub fn new(threads: usize, isa: Isa) -> Result<Self, DeviceError> {
        Self::with_pool(ThreadPool::new(threads.max(1))?, isa)
    }

    /// Creates a device with one thread pinned to each of these cores. The caller's thread, which must run the device,
    /// is pinned to the first.
    pub fn on_cores(cores: &Cores, isa: Isa) -> Result<Self, DeviceError> {
        let device = Self::with_pool(ThreadPool::on_cores(cores.numbers())?, isa)?;
        // The caller is pinned last, since threads that it starts inherit its core.
        cores.numbers().first().map_or(Ok(()), |&first| cores::pin(first))?;
        Ok(device)
    }

    fn with_pool(pool: ThreadPool, isa: Isa) -> Result<Self, DeviceError> {
        let (path, threads) = (Path::new(isa)?, pool.threads());
        let sampling = (0..threads).map(|_| sample::Scratch::default()).collect();
        Ok(Self {
            path,
            pool,
            step: Step::default(),
            products: gemm::Scratch::new(threads)?,
            int8: int8::Scratch::new()?,
            attention: attention::Scratch::default(),
            best: Vec::new(),
            sampling,
            group: None,
            gathered: Vec::new(),
            packed: None,
            tensor_bytes: 0,
            widest: (0, 0),
        })
    }

    /// Makes the device a rank of a TP group.
    #[must_use]
    pub fn with_group(self, group: Box<dyn Collective>) -> Self {
        Self { group: Some(group), ..self }
    }

    /// Makes the device load weights from a cache file, or write them to it.
    #[must_use]
    pub fn with_packed_weights(self, packed: PackedWeights) -> Self {
        Self { packed: Some(packed), ..self }
    }

    fn pack(
        &mut self,
        matrices: &[HostMatrix<'_>],
        paired: bool,
        quantize: Quantize,
    ) -> Result<Weights, DeviceError> {
        let (path, pool, source) = (self.path, &mut self.pool, FusedMatrices::new(matrices, paired)?);
        let mut pack = || Weights::pack(path, pool, source, quantize);
        match &self.packed {
            Some(packed) => packed.matrix(path, source, quantize, pack),
            None => pack(),
        }
    }
}

impl Device for CpuDevice {
    type Matrix = Weights;
    type Vector = Vector;
    type Tensor = Tensor;
    type KvPool = KvPool;

    fn describe(&self) -> String {
        format!("cpu, {}, {} threads", self.path.isa(), self.pool.threads())
    }

    fn group_rank(&self) -> GroupRank {
        self.group.as_ref().map_or(GroupRank::ALONE, |group| group.group_rank())
    }

    fn matrix(&mut self, matrices: &[HostMatrix<'_>], quantize: Quantize) -> Result<Weights, DeviceError> {
        self.pack(matrices, false, quantize)
    }

    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<Weights, DeviceError> {
        let weights = self.pack(&gate_up, true, quantize)?;
        if let Weights::Int8(matrix) = &weights {
            self.int8.fit_pair(matrix)?;
        }
        Ok(weights)
    }

    fn reads_weights(&self) -> bool {
        !self.packed.as_ref().is_some_and(PackedWeights::is_mapped)
    }

    fn host_tasks(&mut self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), DeviceError> {
        self.pool.run(tasks, |index, _| task(index))
    }

    fn matrix_bytes(&self, matrix: &Weights) -> u64 {
        matrix.bytes() as u64
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector, DeviceError> {
        Vector::copy_of(values)
    }

    fn tensor(&mut self, rows: usize, width: usize) -> Result<Tensor, DeviceError> {
        let tensor = Tensor::zeroed(rows, width)?;
        self.tensor_bytes += (rows * width * size_of::<f32>()) as u64;
        if width > self.widest.1 {
            self.widest = (rows, width);
        }
        self.products.fit(rows, width)?;
        self.int8.fit(rows, width)?;
        Ok(tensor)
    }

    fn step_bytes(&self) -> u64 {
        let (rows, width) = self.widest;
        let sampling = self.sampling.len() * sample::Scratch::bytes(width);
        // Only rank 0 gathers columns, so only rank 0 needs memory for the widest tensor's columns.
        let gathers = self.group.as_ref().is_some_and(|group| group.group_rank().is_leader());
        let gathered = if gathers { rows * width * size_of::<f32>() } else { 0 };
        let scratch = self.products.bytes() + self.int8.bytes() + self.attention.bytes();
        self.tensor_bytes + (scratch + sampling + gathered) as u64
    }

    fn kv_pool(&mut self, shape: KvShape) -> Result<KvPool, DeviceError> {
        KvPool::zeroed(shape)
    }

    fn kv_format(&self) -> &'static str {
        kv::FORMAT
    }

    fn read_pages(&mut self, kv: &KvPool, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        kv.read_pages(pages, out)
    }

    fn write_pages(&mut self, kv: &mut KvPool, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        kv.write_pages(pages, data)
    }

    fn begin_step(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
        self.step.begin(inputs)
    }

    fn upload(&mut self, values: &[f32], out: &mut Tensor) -> Result<(), DeviceError> {
        out.fill(values)
    }

    fn overwrite_rows(&mut self, out: &mut Tensor, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        out.overwrite(first, values)
    }

    fn download(&mut self, x: &Tensor, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        out.extend_from_slice(x.values());
        Ok(())
    }

    fn embed(&mut self, table: &Weights, out: &mut Tensor) -> Result<(), DeviceError> {
        let out = out.written(self.step.tokens(), table.inputs())?;
        rowwise::embed(self.path, &mut self.pool, table, 0, table.outputs(), &self.step.token_ids, out)
    }

    fn embed_shard(
        &mut self,
        table: &Weights,
        first: usize,
        vocabulary: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let out = out.written(self.step.tokens(), table.inputs())?;
        rowwise::embed(self.path, &mut self.pool, table, first, vocabulary, &self.step.token_ids, out)
    }

    fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut Tensor) -> Result<(), DeviceError> {
        let out = out.written(self.step.tokens(), 2 * rope.inverse.len())?;
        rowwise::rope_angles(&mut self.pool, rope, &self.step.positions[0], out)
    }

    fn rms_norm(&mut self, x: &Tensor, norm: Norm<'_, Vector>, out: &mut Tensor) -> Result<(), DeviceError> {
        let weight = norm.weight.read(x.width())?;
        let out = out.written(x.live(), x.width())?;
        rowwise::rms_norm(self.path, &mut self.pool, x.values(), weight, norm.eps, out)
    }

    fn linear(
        &mut self,
        x: &Tensor,
        weight: &Weights,
        bias: Option<&Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let outputs = weight.plain_outputs()?;
        let bias = bias.map(|bias| bias.read(outputs)).transpose()?;
        let out = out.written(x.live(), outputs)?;
        self.product(x, None, weight, Epilogue::Set(bias), out)
    }

    fn norm_linear(
        &mut self,
        x: &Tensor,
        norm: Norm<'_, Vector>,
        weight: &Weights,
        bias: Option<&Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let outputs = weight.plain_outputs()?;
        let bias = bias.map(|bias| bias.read(outputs)).transpose()?;
        let out = out.written(x.live(), outputs)?;
        self.product(x, Some(norm), weight, Epilogue::Set(bias), out)
    }

    fn linear_add(
        &mut self,
        x: &Tensor,
        weight: &Weights,
        bias: Option<&Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let outputs = weight.plain_outputs()?;
        let bias = bias.map(|bias| bias.read(outputs)).transpose()?;
        let out = out.change(x.live(), outputs)?;
        self.product(x, None, weight, Epilogue::Add(bias), out)
    }

    fn all_reduce(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        let Some(group) = &mut self.group else { return Ok(()) };
        Ok(group.all_reduce(x.values_mut())?)
    }

    fn all_reduce_add(&mut self, x: &mut Tensor, out: &mut Tensor) -> Result<(), DeviceError> {
        // The operands are checked before this rank joins the collective.
        out.change(x.live(), x.width())?;
        self.all_reduce(x)?;
        rowwise::add(&mut self.pool, x.values(), x.width(), out.change(x.live(), x.width())?)
    }

    fn gather_columns(&mut self, part: &Tensor, out: Option<&mut Tensor>) -> Result<(), DeviceError> {
        let (group_rank, width) = (self.group_rank(), part.width());
        let mut to = out.map(|out| out.written(part.live(), group_rank.world_size * width)).transpose()?;
        if to.is_some() != group_rank.is_leader() {
            return Err(CollectiveError::Misuse("columns are gathered at rank 0 alone".to_owned()).into());
        }
        let Some(group) = &mut self.group else {
            to.into_iter().for_each(|to| to.copy_from_slice(part.values()));
            return Ok(());
        };
        self.gathered.resize(to.as_ref().map_or(0, |to| to.len()), 0.0);
        group.gather(part.values(), to.is_some().then_some(&mut self.gathered[..]))?;
        let Some(to) = &mut to else { return Ok(()) };
        for (rank, part) in self.gathered.chunks(part.values().len().max(1)).enumerate() {
            for (row, part) in part.chunks(width).enumerate() {
                to[(row * group_rank.world_size + rank) * width..][..width].copy_from_slice(part);
            }
        }
        Ok(())
    }

    fn norm_gate_up(
        &mut self,
        x: &Tensor,
        norm: Norm<'_, Vector>,
        weight: &Weights,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let out = out.written(x.live(), weight.gates()?)?;
        self.product(x, Some(norm), weight, Epilogue::Gated, out)
    }

    fn rotate_and_store(
        &mut self,
        qkv: &mut Tensor,
        shape: AttentionShape,
        norms: Option<HeadNorms<'_, Vector>>,
        angles: &Tensor,
        kv: &mut KvPool,
        layer: usize,
    ) -> Result<(), DeviceError> {
        kv.check(layer, &shape)?;
        self.step.check_pages(kv.shape.page_tokens, kv.shape.pages)?;
        let norms = norms.map(|norms| {
            let (q, k) = (norms.q.read(shape.head_dim)?, norms.k.read(shape.head_dim)?);
            Ok::<_, DeviceError>(Norms { q, k, eps: norms.eps })
        });
        let norms = norms.transpose()?;
        let tokens = self.step.tokens();
        let angles = angles.read(shape.head_dim)?;
        if angles.len() != tokens * shape.head_dim {
            return Err(DeviceError::Misuse("rotary angles of another step".to_owned()));
        }
        let qkv = qkv.change(tokens, qkv_width(&shape))?;
        let operands = RotateAndStore { qkv, shape, norms, angles, kv, layer };
        rotate_and_store(self.path, &mut self.pool, &self.step, operands)
    }

    fn attention(
        &mut self,
        qkv: &Tensor,
        shape: AttentionShape,
        kv: &KvPool,
        layer: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        kv.check(layer, &shape)?;
        self.step.check_pages(kv.shape.page_tokens, kv.shape.pages)?;
        let tokens = self.step.tokens();
        if qkv.live() != tokens {
            return Err(DeviceError::Misuse(format!("{} rows of qkv for {tokens} tokens", qkv.live())));
        }
        let qkv = qkv.read(qkv_width(&shape))?;
        let out = out.written(tokens, shape.heads * shape.head_dim)?;
        let operands = attention::Attention { qkv, shape, kv, layer, out };
        attention::attention(self.path, &mut self.pool, &self.step, &mut self.attention, operands)
    }

    fn keep_logit_rows(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        x.keep(&self.step.logit_rows)
    }

    fn copy_rows(&mut self, x: &Tensor, rows: Range<usize>, out: &mut Tensor) -> Result<(), DeviceError> {
        let width = x.width();
        let Some(values) = x.values().get(rows.start * width..rows.end * width) else {
            return Err(DeviceError::Misuse(format!("rows {rows:?} of a tensor that has {}", x.live())));
        };
        out.written(rows.len(), width)?.copy_from_slice(values);
        Ok(())
    }

    fn norm_argmax(
        &mut self,
        x: &Tensor,
        norm: Norm<'_, Vector>,
        weight: &Weights,
        logits: &mut Tensor,
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError> {
        self.likeliest(x, norm, weight, logits.written(x.live(), weight.plain_outputs()?)?, out)
    }

    fn sample(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, SampleRow<'_>)],
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError> {
        self.each_logit_row(logits, rows, out, |path, logits, row, scratch| {
            sample::sample(path, logits, row, scratch)
        })
    }

    fn score(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, ScoreRow)],
        out: &mut Vec<TokenScore>,
    ) -> Result<(), DeviceError> {
        self.each_logit_row(logits, rows, out, |path, logits, row, _| {
            logits::score(path, logits, row.token, row.top)
        })
    }
}

/// Number of elements of one token's fused queries, keys and values.
fn qkv_width(shape: &AttentionShape) -> usize {
    (shape.heads + 2 * shape.kv_heads) * shape.head_dim
}
