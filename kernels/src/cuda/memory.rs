//! Memory of the GPU, and pinned host memory for copies to and from the GPU.

mod pointer;

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

pub(super) use pointer::DevicePointer;

use super::context::Gpu;
use crate::DeviceError;

/// Device memory. Its contents are undefined at first.
pub(super) struct DeviceBuffer {
    gpu: Arc<Gpu>,
    at: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes. `None` stands for a size that overflowed, and is an error.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        bytes: impl Into<Option<usize>>,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        let Some(bytes) = bytes.into() else {
            return Err(DeviceError::OutOfMemory { what, wanted: usize::MAX });
        };
        gpu.bind()?;
        // SAFETY: a context is bound. Nothing is assumed about the contents. The driver refuses a size of 0.
        let at = unsafe { result::malloc_sync(bytes.max(4)) }.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                DeviceError::OutOfMemory { what, wanted: bytes }
            }
            error => gpu.lost("allocating device memory", error),
        })?;
        Ok(Self { gpu: gpu.clone(), at, bytes })
    }

    /// Allocates `bytes` bytes of zeros.
    pub(super) fn zeroed(
        gpu: &Arc<Gpu>,
        bytes: impl Into<Option<usize>>,
        what: &'static str,
    ) -> Result<Self, DeviceError> {
        let buffer = Self::new(gpu, bytes, what)?;
        buffer.fill_zeros(0, buffer.bytes)?;
        Ok(buffer)
    }

    /// Address of the buffer's elements.
    pub(super) fn at<T>(&self) -> DevicePointer<T> {
        DevicePointer::new(self.at)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Enqueues the clearing of the bytes `start .. start + bytes`.
    pub(super) fn fill_zeros(&self, start: usize, bytes: usize) -> Result<(), DeviceError> {
        self.check(start, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.gpu.writes.count();
        // SAFETY: the range lies in this buffer, whose drop waits for the stream.
        unsafe { result::memset_d8_async(self.at + start as u64, 0, bytes, self.gpu.stream) }
            .map_err(|error| self.gpu.lost("filling device memory", error))
    }

    /// Enqueues a copy of `bytes` bytes of pinned memory to `start`. The caller must not change the pinned memory until
    /// the stream has completed the copy.
    pub(super) fn copy_in(&self, start: usize, from: &PinnedBuffer, bytes: usize) -> Result<(), DeviceError> {
        self.check(start, bytes)?;
        let from = &from.bytes()[..bytes];
        if bytes == 0 {
            return Ok(());
        }
        self.gpu.writes.count();
        // SAFETY: both ranges have `bytes` bytes.
        unsafe { result::memcpy_htod_async(self.at + start as u64, from, self.gpu.stream) }
            .map_err(|error| self.gpu.lost("copying to the GPU", error))
    }

    /// Enqueues a copy of `bytes` bytes from `start` to pinned memory at `to_start`.
    pub(super) fn copy_out(
        &self,
        start: usize,
        bytes: usize,
        to: &mut PinnedBuffer,
        to_start: usize,
    ) -> Result<(), DeviceError> {
        self.check(start, bytes)?;
        let to = &mut to.bytes_mut()[to_start..to_start + bytes];
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges have `bytes` bytes.
        unsafe { result::memcpy_dtoh_async(to, self.at + start as u64, self.gpu.stream) }
            .map_err(|error| self.gpu.lost("copying from the GPU", error))
    }

    /// Enqueues a copy of `bytes` bytes from `other`. The ranges must not overlap.
    pub(super) fn copy_from(
        &self,
        start: usize,
        other: &Self,
        other_start: usize,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.check(start, bytes)?;
        other.check(other_start, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (self.at + start as u64, other.at + other_start as u64);
        self.gpu.writes.count();
        // SAFETY: both ranges lie in live buffers.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.gpu.stream) }
            .map_err(|error| self.gpu.lost("copying on the GPU", error))
    }

    fn check(&self, start: usize, bytes: usize) -> Result<(), DeviceError> {
        match start.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(DeviceError::Misuse(format!("{bytes} bytes from {start} on of {}", self.bytes))),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // Kernels in the stream may still use the memory. An error is ignored, because there is nothing left to do.
        let _ = self.gpu.bind();
        let _ = self.gpu.synchronize();
        // SAFETY: nothing uses the memory any more.
        unsafe {
            let _ = result::free_sync(self.at);
        }
    }
}

/// Turns a failed allocation inside a step into the loss of the device. The step cannot run to its end, and its earlier
/// operations must not run twice.
pub(super) fn in_step(error: DeviceError) -> DeviceError {
    match error {
        DeviceError::OutOfMemory { .. } => DeviceError::Lost(format!("in a step, {error}")),
        error => error,
    }
}

/// Returns a buffer of at least `bytes` bytes for a step. A smaller one is replaced, and its contents are lost.
pub(super) fn grown<'a>(
    buffer: &'a mut Option<DeviceBuffer>,
    gpu: &Arc<Gpu>,
    bytes: usize,
    what: &'static str,
) -> Result<&'a DeviceBuffer, DeviceError> {
    if buffer.as_ref().is_none_or(|buffer| buffer.bytes < bytes) {
        // The old memory is freed first, so that the old and the new buffer need not fit at the same time.
        *buffer = None;
        *buffer = Some(DeviceBuffer::new(gpu, bytes, what).map_err(in_step)?);
    }
    buffer.as_ref().ok_or_else(|| DeviceError::Misuse("no scratch memory".to_owned()))
}

/// Pinned memory of the host.
pub(super) struct PinnedBuffer {
    gpu: Arc<Gpu>,
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: this value is the only owner of the pinned memory.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    pub(super) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let what = "pinned memory of the host";
        // SAFETY: a context is bound.
        let at = unsafe { result::malloc_host(bytes.max(4), 0) }.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                DeviceError::OutOfMemory { what, wanted: bytes }
            }
            error => gpu.lost("allocating pinned memory", error),
        })?;
        // SAFETY: the memory is new and has `bytes` bytes.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { gpu: gpu.clone(), at, bytes })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has `bytes` bytes, which are initialised. Callers wait for the GPU before they read bytes
        // that it writes.
        unsafe { std::slice::from_raw_parts(self.at.cast(), self.bytes) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory has `bytes` bytes, which are initialised, and `&mut self` makes this slice the only view.
        // Callers wait until the GPU no longer uses the bytes that they change.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // A copy in the stream may still use the memory. An error is ignored, because there is nothing left to do.
        let _ = self.gpu.bind();
        let _ = self.gpu.synchronize();
        // SAFETY: nothing uses the memory any more.
        unsafe {
            let _ = result::free_host(self.at);
        }
    }
}
