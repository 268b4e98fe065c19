//! [`CudaDevice`]: weights, buffers, planes and steps. The operations of each family are in a module of their own,
//! which checks the operands and launches the kernels.

mod attention;
mod codes;
mod collectives;
mod compressed;
mod delta_rule;
mod dense;
mod encoder;
mod experts;
mod hyper;
mod recurrence;
mod sampler;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::compile::KernelCache;
use super::context::{Event, Gpu, MemoryReader};
use super::experts::{CountsOfStep, ExpertCounts, ExpertTables};
use super::gemm::Gemm;
use super::host_threads::HostThreads;
use super::kernels::Kernels;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::nccl::{Communicator, GroupMeeting};
use super::planes::{FORMAT, Planes};
use super::results::{Block, Results};
use super::staging::Staging;
use super::step::Step;
use super::tensor::{Matrix, Tensor, Vector, WeightLoader};
use super::watchdog::Watchdog;
use crate::collective::GroupRank;
use crate::cpu::RowQuantiser;
use crate::{
    Device, DeviceError, DeviceLimits, HostMatrix, PageId, PlanesShape, Quantize, QuantizedRows, SlotId,
    StepInputs, StepResults, quantize_of_head,
};

/// Maximum number of steps that are enqueued and not collected: one runs while the host prepares the next.
const STEPS_IN_FLIGHT: usize = 2;
/// Interval at which a wait with a limit checks for the end of a step. The driver has no wait with a limit. A helper
/// thread that waits instead would cost two thread switches per step. The engine waits without a limit, so it does not
/// poll.
const POLL: Duration = Duration::from_micros(20);

/// Largest size in bytes of values that are copied to rows through a pair of the staging. Larger ones are the input of
/// an encoder and go through the buffers for weights, so that a large picture leaves no large pair behind.
const MOST_STAGED_BYTES: usize = 4 << 20;

/// Scratch memory of operations, which grows to the largest need.
#[derive(Default)]
struct Scratch {
    /// Normalised or converted input of a matrix product.
    input: Option<DeviceBuffer>,
    /// Sums of the splits of a product with codes.
    splits: Option<DeviceBuffer>,
    /// Outputs of the gate and up projections, side by side.
    gate_up: Option<DeviceBuffer>,
    /// Buffers for the rows that are sampled at once: logits with bias and penalties, probabilities, and counts of
    /// tokens.
    adjusted: Option<DeviceBuffer>,
    weights: Option<DeviceBuffer>,
    counts: Option<DeviceBuffer>,
    /// The peaks and the nominated tokens of the slices of rows.
    sliced_peaks: Option<DeviceBuffer>,
    sliced_tokens: Option<DeviceBuffer>,
    /// Partial results of attention.
    parts: Option<DeviceBuffer>,
    /// The experts of each row and the rows of each expert, and the activations and outputs of all pairs of a row and
    /// an expert.
    routes: Option<DeviceBuffer>,
    activated: Option<DeviceBuffer>,
    expert_outputs: Option<DeviceBuffer>,
    /// Rows that this rank sends to a gather, and the gathered parts of all ranks.
    packed: Option<DeviceBuffer>,
    gathered: Option<DeviceBuffer>,
    /// Values from the host that are added to rows.
    added: Option<DeviceBuffer>,
}

impl Scratch {
    fn bytes(&self) -> u64 {
        let Self { input, splits, gate_up, adjusted, weights, counts, parts, .. } = self;
        let Self {
            sliced_peaks,
            sliced_tokens,
            routes,
            activated,
            expert_outputs,
            packed,
            gathered,
            added,
            ..
        } = self;
        let dense = [input, gate_up, adjusted, weights, counts, sliced_peaks, sliced_tokens, parts];
        let others = [splits, routes, activated, expert_outputs, packed, gathered, added];
        dense.into_iter().chain(others).flatten().map(|buffer| buffer.bytes() as u64).sum()
    }
}

/// A GPU as a device. Operations are enqueued on one stream, and two steps may be in flight.
///
/// The order of the fields is the order of their drops. `gpu` is last, because the other fields need its context.
pub struct CudaDevice {
    /// The device's TP group; `None` if the device is alone. This field is first, because its drop aborts collectives
    /// for which the other drops would wait.
    group: Option<Communicator>,
    kernels: Kernels,
    gemm: Gemm,
    step: Step,
    inputs: Staging,
    results: Results,
    scratch: Scratch,
    narrowed: Option<dense::Narrowed>,
    loader: WeightLoader,
    host_threads: HostThreads,
    /// Rotary frequencies that have been copied to the device.
    ropes: Vec<attention::RopeOnDevice>,
    expert_tables: ExpertTables,
    expert_counts: ExpertCounts,
    /// Maximum size in bytes of the experts' outputs. A step with larger outputs is computed in chunks of rows.
    expert_output_bytes: usize,
    /// Number of tiles from which on a product with codes is not divided into splits; `None` for the default.
    enough_tiles: Option<usize>,
    /// The token that was sampled last for each slot.
    last_tokens: DeviceBuffer,
    /// Total size in bytes of all tensors that have been made.
    tensor_bytes: u64,
    _watchdog: Option<Watchdog>,
    gpu: Arc<Gpu>,
}

/// A step in flight.
pub struct Done {
    event: Event,
    blocks: Vec<Block>,
    /// Number of tokens that chose each expert, up to this step; `None` if the step has no experts.
    expert_counts: Option<CountsOfStep>,
}

impl CudaDevice {
    /// Opens GPU `ordinal`, counted from 0, and loads its kernels. Kernels that `cache` does not hold are compiled.
    pub fn open(ordinal: usize, cache: &KernelCache) -> Result<Self, DeviceError> {
        let gpu = Gpu::open(ordinal)?;
        Ok(Self {
            group: None,
            kernels: Kernels::load(&gpu, cache)?,
            gemm: Gemm::new(&gpu)?,
            step: Step::default(),
            inputs: Staging::new(&gpu),
            results: Results::new(&gpu),
            scratch: Scratch::default(),
            narrowed: None,
            loader: WeightLoader::new(&gpu),
            host_threads: HostThreads(1),
            ropes: Vec::new(),
            expert_tables: ExpertTables::default(),
            expert_counts: ExpertCounts::default(),
            expert_output_bytes: experts::OUTPUT_BYTES,
            enough_tiles: None,
            last_tokens: DeviceBuffer::zeroed(&gpu, 4, "the last token of each slot")?,
            tensor_bytes: 0,
            _watchdog: None,
            gpu,
        })
    }

    /// Makes this device a rank of a group of GPUs. Waits until all ranks have joined.
    pub fn join(mut self, meeting: &GroupMeeting) -> Result<Self, DeviceError> {
        self.group = Some(Communicator::join(&self.gpu, meeting)?);
        Ok(self)
    }

    /// Binds the context for an access that waits for the stream. In a group, first waits for the collectives, in a
    /// bounded time.
    fn bind_to_wait(&mut self) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        self.group.as_mut().map_or(Ok(()), Communicator::wait)
    }

    /// Waits for a step until the time `until`, or without a limit if it is `None`. Returns false if the step is still
    /// running at that time. In a group, the wait ends when a collective fails or is overdue.
    fn wait_for(&mut self, done: &Done, until: Option<Instant>) -> Result<bool, DeviceError> {
        let gpu = &self.gpu;
        let failed = |error| gpu.lost("a step", error);
        if let (None, None) = (&self.group, until) {
            return done.event.wait().map(|()| true).map_err(failed);
        }
        loop {
            let reached = done.event.is_reached().map_err(failed)?;
            match &mut self.group {
                // The group is checked even if the step has ended, because a step also ends if a collective is aborted.
                // The step's results are then invalid.
                Some(group) if reached => group.look().map(drop)?,
                Some(group) => group.check()?,
                None => {}
            }
            if reached || until.is_some_and(|until| Instant::now() >= until) {
                return Ok(reached);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Starts a thread that reports each wait for the GPU that lasts longer than `limit`. The report names the kernel
    /// that the GPU began last. The thread only reports: a wait for a hung GPU ends only with the process.
    pub fn with_watchdog(
        self,
        limit: Duration,
        report: impl Fn(&str) + Send + 'static,
    ) -> Result<Self, DeviceError> {
        let started = Watchdog::start(&self.gpu, limit, report);
        let watchdog = started.map_err(|error| DeviceError::Lost(format!("starting a thread: {error}")))?;
        Ok(Self { _watchdog: Some(watchdog), ..self })
    }

    /// Sets the maximum size in bytes of the experts' outputs. A step with larger outputs is computed in chunks of
    /// rows. Tests set a small size.
    pub fn with_expert_memory(self, bytes: usize) -> Self {
        Self { expert_output_bytes: bytes, ..self }
    }

    /// Sets the number of tiles from which on a product with codes is not divided into splits among blocks. Splits
    /// change no bit of the result. Tests set several numbers.
    pub fn with_enough_tiles(self, tiles: usize) -> Self {
        Self { enough_tiles: Some(tiles), ..self }
    }

    /// Sets the number of threads of the host that prepare weights while they are loaded: 1 by default.
    pub fn with_host_threads(self, threads: usize) -> Self {
        Self { host_threads: HostThreads(threads), ..self }
    }

    /// Number of slots whose last token is kept.
    fn kept_slots(&self) -> usize {
        self.last_tokens.bytes() / 4
    }

    fn load(
        &mut self,
        matrices: &[HostMatrix<'_>],
        is_pair: bool,
        quantize: Quantize,
    ) -> Result<Matrix, DeviceError> {
        if let Some(source) = RowQuantiser::new(matrices, is_pair, quantize)? {
            return Matrix::quantise(&self.gpu, &mut self.loader, &source, self.host_threads);
        }
        let matrix = Matrix::load(&self.gpu, &mut self.loader, matrices, is_pair)?;
        self.gemm.prepare(&matrix)?;
        Ok(matrix)
    }

    /// Copies values to the live rows of `out` from row `first` on.
    fn put_rows(&mut self, out: &Tensor, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        let bytes = size_of_val(values);
        if bytes > MOST_STAGED_BYTES {
            let mut start = first * out.width * 4;
            for values in values.chunks(MOST_STAGED_BYTES / 4) {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
                self.loader.load(&out.data, start, [&bytes[..]].into_iter())?;
                start += bytes.len();
            }
            return Ok(());
        }
        let mut pair = self.inputs.take(bytes)?;
        for (to, value) in pair.host.bytes_mut().chunks_exact_mut(4).zip(values) {
            to.copy_from_slice(&value.to_ne_bytes());
        }
        out.data.copy_in(first * out.width * 4, &pair.host, bytes)?;
        // The input of an encoder is copied outside of steps.
        self.inputs.release(pair)
    }
}

impl CudaDevice {
    /// Returns a reader of the GPU's memory, which other threads may use.
    pub fn memory_reader(&self) -> MemoryReader {
        MemoryReader::of(&self.gpu)
    }
}

impl Device for CudaDevice {
    type Matrix = Matrix;
    type Vector = Vector;
    type Tensor = Tensor;
    type Planes = Planes;
    type Done = Done;

    fn describe(&self) -> String {
        let Gpu { ordinal, name, capability: (major, minor), .. } = &*self.gpu;
        format!("cuda, GPU {ordinal}, {name}, compute capability {major}.{minor}")
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { steps_in_flight: STEPS_IN_FLIGHT, nominates_alone: true, masks_argmax: false }
    }

    fn free_bytes(&self) -> Option<u64> {
        self.gpu.free_bytes()
    }

    fn group_rank(&self) -> GroupRank {
        self.group.as_ref().map_or(GroupRank::ALONE, Communicator::group_rank)
    }

    fn matrix(&mut self, matrices: &[HostMatrix<'_>], quantize: Quantize) -> Result<Matrix, DeviceError> {
        self.load(matrices, false, quantize)
    }

    fn head_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Matrix, DeviceError> {
        self.load(matrices, false, quantize_of_head(quantize))
    }

    fn table_matrix(
        &mut self,
        matrices: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<Matrix, DeviceError> {
        self.load(matrices, false, quantize_of_head(quantize))
    }

    fn gate_up_matrix(
        &mut self,
        gate_up: [HostMatrix<'_>; 2],
        quantize: Quantize,
    ) -> Result<Matrix, DeviceError> {
        self.load(&gate_up, true, quantize)
    }

    fn holds_quantized(&self) -> bool {
        true
    }

    fn quantized_matrix(&mut self, matrices: &[QuantizedRows<'_>]) -> Result<Matrix, DeviceError> {
        Matrix::load_codes(&self.gpu, &mut self.loader, matrices, false)
    }

    fn quantized_gate_up(&mut self, gate_up: [QuantizedRows<'_>; 2]) -> Result<Matrix, DeviceError> {
        Matrix::load_codes(&self.gpu, &mut self.loader, &gate_up, true)
    }

    fn host_tasks(&mut self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), DeviceError> {
        self.host_threads.run(tasks, task);
        Ok(())
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> u64 {
        matrix.bytes() as u64
    }

    fn matrix_shape(&self, matrix: &Matrix) -> [usize; 2] {
        [matrix.outputs, matrix.inputs]
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector, DeviceError> {
        Vector::load(&self.gpu, &mut self.loader, values)
    }

    fn tensor(&mut self, rows: usize, width: usize) -> Result<Tensor, DeviceError> {
        let tensor = Tensor::new(&self.gpu, rows, width)?;
        self.tensor_bytes += tensor.data.bytes() as u64;
        Ok(tensor)
    }

    fn tensor_shape(&self, tensor: &Tensor) -> [usize; 2] {
        [tensor.live, tensor.width]
    }

    fn step_bytes(&self) -> u64 {
        self.tensor_bytes + self.scratch.bytes() + self.inputs.bytes() + self.results.staging.bytes()
    }

    fn upload(&mut self, values: &[f32], out: &mut Tensor) -> Result<(), DeviceError> {
        if out.width == 0 || !values.len().is_multiple_of(out.width) {
            return Err(DeviceError::Misuse(format!("{} values for rows of {}", values.len(), out.width)));
        }
        out.written(values.len() / out.width, out.width)?;
        self.put_rows(out, 0, values)
    }

    fn overwrite_rows(&mut self, out: &mut Tensor, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        let room = out.live.saturating_sub(first).saturating_mul(out.width);
        if out.width == 0 || values.len() > room || !values.len().is_multiple_of(out.width) {
            let (count, live, width) = (values.len(), out.live, out.width);
            return Err(DeviceError::Misuse(format!(
                "{count} values from row {first} on into {live} rows of {width}"
            )));
        }
        self.put_rows(out, first, values)
    }

    fn download(&mut self, x: &Tensor, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        self.bind_to_wait()?;
        let bytes = x.elements() * 4;
        let mut host = PinnedBuffer::new(&self.gpu, bytes)?;
        x.data.copy_out(0, bytes, &mut host, 0)?;
        self.gpu.synchronize()?;
        let (values, _) = host.bytes().as_chunks::<4>();
        out.extend(values.iter().map(|value| f32::from_ne_bytes(*value)));
        Ok(())
    }

    fn planes(&mut self, shape: &PlanesShape) -> Result<Planes, DeviceError> {
        let planes = Planes::new(&self.gpu, shape)?;
        if shape.slots > self.kept_slots() {
            self.last_tokens =
                DeviceBuffer::zeroed(&self.gpu, shape.slots * 4, "the last token of each slot")?;
        }
        Ok(planes)
    }

    fn kv_format(&self) -> &'static str {
        FORMAT
    }

    fn read_pages(
        &mut self,
        planes: &Planes,
        pages: &[PageId],
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        self.bind_to_wait()?;
        planes.read_pages(pages, out)
    }

    fn write_pages(&mut self, planes: &mut Planes, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.bind_to_wait()?;
        planes.write_pages(pages, data)
    }

    fn read_slot(&mut self, planes: &Planes, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.bind_to_wait()?;
        planes.read_slot(slot, out)
    }

    fn write_slot(&mut self, planes: &mut Planes, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.bind_to_wait()?;
        planes.write_slot(slot, data)
    }

    fn begin_step(&mut self, inputs: &StepInputs<'_>, planes: &mut Planes) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        for block in self.results.take() {
            // The block of results belongs to a step that was begun and not ended. The stream may still write to this
            // block.
            block.discard(&mut self.inputs);
        }
        let kept = self.kept_slots();
        self.step.begin(inputs, planes, kept, &mut self.inputs)
    }

    fn end_step(&mut self) -> Result<Done, DeviceError> {
        self.gpu.bind()?;
        let expert_counts = self.expert_counts.fetch(&mut self.results.staging)?;
        self.inputs.seal()?;
        self.step.end();
        let event = Event::record(&self.gpu)?;
        Ok(Done { event, blocks: self.results.take(), expert_counts })
    }

    fn collect(
        &mut self,
        done: &mut Done,
        until: Option<Instant>,
        out: &mut StepResults,
    ) -> Result<bool, DeviceError> {
        self.gpu.bind()?;
        if !self.wait_for(done, until)? {
            return Ok(false);
        }
        for block in std::mem::take(&mut done.blocks) {
            block.read(out)?;
            block.free(&mut self.results.staging);
        }
        if let Some(counts) = done.expert_counts.take() {
            self.expert_counts.collect(counts, &mut self.results.staging);
        }
        Ok(true)
    }
}
