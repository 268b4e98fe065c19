//! The operands of a trial, and the CUDA events that time it.

use std::sync::Arc;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::result::{DriverError, event};
use cudarc::driver::sys::{CUevent, CUevent_flags};
use half::{bf16, f16};

use crate::cuda::context::Gpu;
use crate::cuda::gemm::Accumulate;
use crate::cuda::gemm::plan::{Algorithm, Key, Operands, Plan};
use crate::cuda::memory::{DeviceBuffer, PinnedBuffer};
use crate::cuda::tensor::Matrix;
use crate::{DeviceError, WeightType};

/// Bytes that are cleared before each timed product, so that the weights are read from memory, as in a step.
const FLUSHED_BYTES: usize = 96 << 20;

/// Random rows of input, and room for their output.
pub(super) struct TrialOperands<'a> {
    gpu: &'a Arc<Gpu>,
    matrix: &'a Matrix,
    most: usize,
    x: DeviceBuffer,
    /// One row of the input. A row inside `x` may lack the alignment that algorithms need.
    alone: DeviceBuffer,
    out: DeviceBuffer,
    flushed: DeviceBuffer,
}

impl<'a> TrialOperands<'a> {
    /// Makes operands of at most `most` rows.
    pub(super) fn new(
        gpu: &'a Arc<Gpu>,
        key: Key,
        matrix: &'a Matrix,
        most: usize,
    ) -> Result<Self, DeviceError> {
        let bytes = random(key.dtype, most * key.inputs);
        let x = DeviceBuffer::new(gpu, bytes.len(), "the input of a trial")?;
        let mut pinned = PinnedBuffer::new(gpu, bytes.len())?;
        pinned.bytes_mut().copy_from_slice(&bytes);
        x.copy_in(0, &pinned, bytes.len())?;
        let alone = DeviceBuffer::new(gpu, key.inputs * key.dtype.bytes(), "the input of a trial")?;
        let out = DeviceBuffer::new(gpu, most * key.outputs * size_of::<f32>(), "the output of a trial")?;
        let flushed = DeviceBuffer::new(gpu, FLUSHED_BYTES, "memory that a trial clears")?;
        Ok(Self { gpu, matrix, most, x, alone, out, flushed })
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Enqueues a product of the first `rows` rows into a cleared output; for [`Accumulate::Add`], enqueues another
    /// one, which adds to the first. Returns false if cuBLASLt refuses the algorithm.
    pub(super) fn run(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        rows: usize,
        accumulate: Accumulate,
    ) -> Result<bool, DeviceError> {
        self.run_on(&self.x, plan, algorithm, rows, accumulate)
    }

    /// Like [`run`](Self::run), for one row alone.
    pub(super) fn run_alone(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        row: usize,
        accumulate: Accumulate,
    ) -> Result<bool, DeviceError> {
        let bytes = self.alone.bytes();
        self.alone.copy_from(0, &self.x, row * bytes, bytes)?;
        self.run_on(&self.alone, plan, algorithm, 1, accumulate)
    }

    fn run_on(
        &self,
        x: &DeviceBuffer,
        plan: &Plan,
        algorithm: &Algorithm,
        rows: usize,
        accumulate: Accumulate,
    ) -> Result<bool, DeviceError> {
        self.out.fill_zeros(0, rows * self.matrix.outputs * size_of::<f32>())?;
        Ok(self.enqueue(x, plan, algorithm, rows, Accumulate::Set)?
            && (accumulate == Accumulate::Set || self.enqueue(x, plan, algorithm, rows, accumulate)?))
    }

    /// Enqueues one product of the first `rows` rows. Returns false if cuBLASLt refuses the algorithm.
    pub(super) fn run_once(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        rows: usize,
        accumulate: Accumulate,
    ) -> Result<bool, DeviceError> {
        self.enqueue(&self.x, plan, algorithm, rows, accumulate)
    }

    /// Fills memory that is larger than the caches.
    pub(super) fn flush(&self) -> Result<(), DeviceError> {
        self.flushed.fill_zeros(0, FLUSHED_BYTES)
    }

    /// Returns the bits of a row of the output.
    pub(super) fn read(&self, row: usize) -> Result<Vec<u8>, DeviceError> {
        let bytes = self.matrix.outputs * size_of::<f32>();
        let mut pinned = PinnedBuffer::new(self.gpu, bytes)?;
        self.out.copy_out(row * bytes, bytes, &mut pinned, 0)?;
        self.gpu.synchronize()?;
        Ok(pinned.bytes().to_vec())
    }

    fn enqueue(
        &self,
        x: &DeviceBuffer,
        plan: &Plan,
        algorithm: &Algorithm,
        rows: usize,
        accumulate: Accumulate,
    ) -> Result<bool, DeviceError> {
        let operands = Operands { weight: self.matrix.at(), x: x.at(), rows, accumulate, out: self.out.at() };
        // SAFETY: the input and the output have room for `rows` rows. Both live until the end of the trial, whose drop
        // waits for the stream.
        match unsafe { plan.run_with(self.gpu, operands, algorithm) } {
            Ok(()) => Ok(true),
            Err(CublasError(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => Ok(false),
            Err(error) => {
                let key = plan.key;
                Err(DeviceError::Lost(format!("a trial of a product with {key}, cublasLtMatmul: {error}")))
            }
        }
    }
}

/// Random elements between -1 and 1, as bytes.
fn random(dtype: WeightType, count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity(count * dtype.bytes());
    for _ in 0..count {
        // Knuth's linear congruential generator, MMIX. Its high bits are random enough.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let value = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
        match dtype {
            WeightType::F32 => bytes.extend_from_slice(&value.to_le_bytes()),
            WeightType::F16 => bytes.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
            WeightType::Bf16 => bytes.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
        }
    }
    bytes
}

/// A moment of the stream, whose time is measured.
pub(super) struct Moment {
    gpu: Arc<Gpu>,
    event: CUevent,
}

impl Moment {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        let event = event::create(CUevent_flags::CU_EVENT_DEFAULT);
        let event = event.map_err(|error| gpu.lost("making an event", error))?;
        Ok(Self { gpu: gpu.clone(), event })
    }

    /// Records the moment when the stream has done all work that is enqueued now.
    pub(super) fn record(&self) -> Result<(), DriverError> {
        // SAFETY: event and stream are alive.
        unsafe { event::record(self.event, self.gpu.stream) }
    }

    /// Returns the milliseconds from this moment to a later one. The stream has passed both.
    pub(super) fn milliseconds_until(&self, later: &Self) -> Result<f32, DriverError> {
        // SAFETY: both events are alive.
        unsafe { event::elapsed(self.event, later.event) }
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // SAFETY: this value owns the event. An error is ignored, because there is nothing left to do.
        unsafe {
            let _ = event::destroy(self.event);
        }
    }
}
