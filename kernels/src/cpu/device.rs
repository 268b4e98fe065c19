//! [`CpuDevice`]: weights, buffers, planes and steps. The operations of each family are in a module of their own, which
//! checks the operands and calls the kernels.

mod attention;
mod collectives;
mod compressed;
mod delta_rule;
mod dense;
mod encoder;
mod experts;
mod hyper;
mod recurrence;
mod sampler;
mod weights;

use std::collections::BTreeMap;
use std::time::Instant;

use self::weights::pack;
use super::experts::Routes;
use super::gemm;
use super::memory::fused_matrices::FusedMatrices;
use super::memory::matrix::{Elements, Form, Matrix};
use super::memory::weights::Packing;
use super::memory::{PackedWeights, Planes, Tensor, Vector, Weights, kv};
use super::quant;
use super::quant::grouped::Activations;
use super::sampling::screen::{self, ScreenCounts};
use super::sampling::{argmax, sample};
use super::simd::Isa;
use super::simd::isa::Path;
use super::step::Step;
use super::threads::cores::{self, Cores};
use super::threads::pool::ThreadPool;
use crate::{
    Device, DeviceError, DeviceLimits, HostMatrix, PageId, PlanesShape, Quantize, QuantizedRows, SlotId,
    StepInputs, StepResults,
    collective::{Collective, GroupRank},
    quantize_of_head,
};

/// A CPU as a device. Operations run synchronously, on the caller's thread and the device's own threads.
pub struct CpuDevice {
    path: Path,
    pool: ThreadPool,
    step: Step,
    /// Scratch memory of matrix products, sized for the largest tensor so far. The system commits the pages of this
    /// memory when they are first written.
    products: gemm::Scratch,
    /// Scratch memory of matrix products with quantised weights.
    quantised: quant::Scratch,
    /// The activations of products whose weights are integers of four bits.
    activations: Activations,
    attention: super::attention::Scratch,
    /// Scratch memory of windows and compressed entries.
    compressed: super::compressed::Scratch,
    /// Packed keys and values of an encoder's attention.
    segments: super::encoder::attention::Scratch,
    best: Vec<argmax::Best>,
    screening: screen::Scratch,
    routes: Routes,
    /// The groups of a grouped product. The memory is reused by every product.
    groups: Vec<gemm::groups::Group>,
    /// Number of tokens that chose each expert, by layer.
    expert_tokens: BTreeMap<usize, Vec<u64>>,
    /// One scratch per thread.
    sampling: Vec<sample::Scratch>,
    /// The results of the step so far.
    results: StepResults,
    /// The collective of the TP group; `None` without a group.
    group: Option<Box<dyn Collective>>,
    /// Columns gathered from the ranks, rank by rank.
    gathered: Vec<f32>,
    /// The cache file of packed weights.
    packed: Option<PackedWeights>,
    /// True if the memory of planes is made resident when the planes are created.
    resident_planes: bool,
    /// True if each LM head gets a screen: an int8 copy that excludes most panels from the arg max.
    screened_head: bool,
    /// Total size in bytes of all tensors that have been made.
    tensor_bytes: u64,
    /// Rows and width of the widest tensor. In a model with an LM head, that is the tensor of logits.
    widest: (usize, usize),
}

/// The results of a step. The step ran when it was enqueued, so the results are complete.
pub struct Done(StepResults);

impl CpuDevice {
    /// Creates a device with `threads` threads, including the caller's (0 counts as 1). The machine must support the
    /// instruction path; [`Isa::detect`] returns the best one.
    pub fn new(threads: usize, isa: Isa) -> Result<Self, DeviceError> {
        Self::with_pool(ThreadPool::new(threads.max(1))?, isa)
    }

    /// Creates a device with one thread pinned to each of these cores. The caller's thread, which must run the device,
    /// is pinned to the first core.
    pub fn on_cores(cores: &Cores, isa: Isa) -> Result<Self, DeviceError> {
        let device = Self::with_pool(ThreadPool::on_cores(cores.numbers())?, isa)?;
        // The caller's thread is pinned after the pool's threads have started, since a new thread inherits the pinning.
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
            quantised: quant::Scratch::new()?,
            activations: Activations::EightBits,
            attention: super::attention::Scratch::default(),
            compressed: super::compressed::Scratch::default(),
            segments: super::encoder::attention::Scratch::default(),
            best: Vec::new(),
            screening: screen::Scratch::default(),
            routes: Routes::default(),
            groups: Vec::new(),
            expert_tokens: BTreeMap::new(),
            sampling,
            results: StepResults::default(),
            group: None,
            gathered: Vec::new(),
            packed: None,
            resident_planes: false,
            screened_head: true,
            tensor_bytes: 0,
            widest: (0, 0),
        })
    }

    /// Makes the device a rank of a TP group.
    #[must_use]
    pub fn with_group(self, group: Box<dyn Collective>) -> Self {
        Self { group: Some(group), ..self }
    }

    /// Makes the device load packed weights from a cache file, or write the file if there is none.
    #[must_use]
    pub fn with_packed_weights(self, packed: PackedWeights) -> Self {
        Self { packed: Some(packed), ..self }
    }

    /// Makes the device take the memory of planes from the operating system when it creates the planes. Otherwise the
    /// system clears each memory page when a step first writes it, which slows down that step.
    #[must_use]
    pub fn with_resident_planes(self, resident_planes: bool) -> Self {
        Self { resident_planes, ..self }
    }

    /// Sets whether each LM head gets a screen, an int8 copy that speeds up the arg max. By default, it does.
    #[must_use]
    pub fn with_screened_head(self, screened_head: bool) -> Self {
        Self { screened_head, ..self }
    }

    /// Sets whether products whose weights are integers of four bits round their activations to eight bits. By default,
    /// they do. Otherwise activations stay in f32: products are slower, and as exact as the weights.
    #[must_use]
    pub fn with_quantised_activations(self, quantised: bool) -> Self {
        Self { activations: if quantised { Activations::EightBits } else { Activations::Full }, ..self }
    }

    /// Returns how often the screens (int8 copies) of LM heads were used.
    pub fn screen_counts(&self) -> ScreenCounts {
        self.screening.counts()
    }
}

impl Device for CpuDevice {
    type Matrix = Weights;
    type Vector = Vector;
    type Tensor = Tensor;
    type Planes = Planes;
    type Done = Done;

    fn describe(&self) -> String {
        format!("cpu, {}, {} threads", self.path.isa(), self.pool.threads())
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { steps_in_flight: 1, nominates_alone: false, masks_argmax: true }
    }

    fn group_rank(&self) -> GroupRank {
        self.group.as_ref().map_or(GroupRank::ALONE, |group| group.group_rank())
    }

    fn matrix(&mut self, matrices: &[HostMatrix<'_>], quantize: Quantize) -> Result<Weights, DeviceError> {
        self.pack(matrices, false, quantize)
    }

    fn head_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Weights, DeviceError> {
        let mut weights = self.pack(matrices, false, quantize_of_head(quantize))?;
        if let (Weights::Stored(matrix), true) = (&mut weights, self.screened_head) {
            matrix.screen = self.pack_screen(matrices)?.map(Box::new);
        }
        Ok(weights)
    }

    fn table_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Weights, DeviceError> {
        let (path, pool, source) = (self.path, &mut self.pool, FusedMatrices::new(matrices, false)?);
        // A table is only used for look-ups, so it keeps the checkpoint's type on every path.
        let packing = Packing::new(quantize_of_head(quantize), Form::Stored(source.dtype));
        pack(&self.packed, source, packing, || Weights::pack(path, pool, source, packing))
    }

    fn tied_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Weights, DeviceError> {
        let mut weights = self.head_matrix(matrices, quantize)?;
        if let Weights::Stored(matrix @ Matrix { data: Elements::BlockFloat(_), .. }) = &mut weights {
            matrix.corrections = Some(Box::new(self.pack_corrections(matrices)?));
        }
        Ok(weights)
    }

    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<Weights, DeviceError> {
        self.pack(&gate_up, true, quantize)
    }

    fn holds_quantized(&self) -> bool {
        true
    }

    fn quantized_matrix(&mut self, matrices: &[QuantizedRows<'_>]) -> Result<Weights, DeviceError> {
        self.pack_rows(matrices, false)
    }

    fn quantized_gate_up(&mut self, gate_up: [QuantizedRows<'_>; 2]) -> Result<Weights, DeviceError> {
        self.pack_rows(&gate_up, true)
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

    fn screen_bytes(&self, matrix: &Weights) -> u64 {
        matrix.screen_bytes() as u64
    }

    fn corrections_bytes(&self, matrix: &Weights) -> u64 {
        matrix.corrections_bytes() as u64
    }

    fn matrix_shape(&self, matrix: &Weights) -> [usize; 2] {
        [matrix.outputs(), matrix.inputs()]
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
        self.quantised.fit(rows, width)?;
        Ok(tensor)
    }

    fn tensor_shape(&self, tensor: &Tensor) -> [usize; 2] {
        [tensor.live(), tensor.width()]
    }

    fn step_bytes(&self) -> u64 {
        let (rows, width) = self.widest;
        let sampling = self.sampling.len() * sample::Scratch::bytes(width);
        // Only rank 0 gathers columns, so only rank 0 needs memory for the widest tensor's columns.
        let gathers = self.group.as_ref().is_some_and(|group| group.group_rank().is_leader());
        let gathered = if gathers { rows * width * size_of::<f32>() } else { 0 };
        let scratch = self.products.bytes()
            + self.quantised.bytes()
            + self.screening.bytes()
            + self.attention.bytes()
            + self.compressed.bytes()
            + self.segments.bytes()
            + self.routes.bytes();
        self.tensor_bytes + (scratch + sampling + gathered) as u64
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

    fn planes(&mut self, shape: &PlanesShape) -> Result<Planes, DeviceError> {
        let mut planes = Planes::zeroed(shape)?;
        if self.resident_planes {
            planes.make_resident(&mut self.pool)?;
        }
        Ok(planes)
    }

    fn kv_format(&self) -> &'static str {
        kv::FORMAT
    }

    fn read_pages(
        &mut self,
        planes: &Planes,
        pages: &[PageId],
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        planes.read_pages(pages, out)
    }

    fn write_pages(&mut self, planes: &mut Planes, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        planes.write_pages(pages, data)
    }

    fn read_slot(&mut self, planes: &Planes, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        planes.slots.read(slot, out)
    }

    fn write_slot(&mut self, planes: &mut Planes, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        planes.slots.write(slot, data)
    }

    fn begin_step(&mut self, inputs: &StepInputs<'_>, planes: &mut Planes) -> Result<(), DeviceError> {
        self.results.clear();
        self.step.begin(inputs, planes)?;
        planes.slots.copy(inputs.copies, &mut self.pool)
    }

    fn end_step(&mut self) -> Result<Done, DeviceError> {
        Ok(Done(std::mem::take(&mut self.results)))
    }

    fn collect(
        &mut self,
        done: &mut Done,
        _: Option<Instant>,
        out: &mut StepResults,
    ) -> Result<bool, DeviceError> {
        out.append(&mut done.0);
        if self.results.is_empty() {
            // The next step reuses the memory of the collected results.
            self.results = std::mem::take(&mut done.0);
        }
        Ok(true)
    }
}
