//! One GPU: its primary context, and the single stream that runs all of its work in order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use cudarc::driver::result::{self, DriverError, event, stream};
use cudarc::driver::sys;

use super::library;
use super::progress::Progress;
use super::watchdog::CurrentWait;
use crate::DeviceError;

/// Counts kernels, copies and other work that may change device memory.
#[derive(Default)]
pub(super) struct Writes(AtomicU64);

impl Writes {
    pub(super) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of writes that have been enqueued.
    pub(super) fn so_far(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A GPU with a context and a stream.
pub(super) struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
    /// Index of the GPU among those that the process sees.
    pub(super) ordinal: usize,
    pub(super) name: String,
    /// Compute capability as (major, minor), such as (9, 0).
    pub(super) capability: (i32, i32),
    /// The driver's version as CUDA counts it, such as 13000.
    pub(super) driver: i32,
    pub(super) progress: Progress,
    /// The current wait for this GPU, for the watchdog.
    pub(super) wait: CurrentWait,
    pub(super) writes: Writes,
}

// SAFETY: any thread may use a context and its stream after it has bound the context, as every user of a `Gpu` does.
unsafe impl Send for Gpu {}
// SAFETY: several threads may make driver calls for one stream.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens GPU `ordinal`, counted from 0.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Self>, DeviceError> {
        let missing = |missing: library::Missing| DeviceError::Unsupported(missing.to_string());
        let count = library::gpus_without_compiler().map_err(missing)?;
        if ordinal >= count {
            return Err(DeviceError::Unsupported(format!("GPU {ordinal} of {count}")));
        }
        let failed = |what: &'static str| move |error| lost(what, error);
        let device = result::device::get(ordinal as i32).map_err(failed("opening the GPU"))?;
        let attribute = |attribute| {
            // SAFETY: the device is one that the driver returned.
            unsafe { result::device::get_attribute(device, attribute) }.map_err(failed("asking the GPU"))
        };
        let capability = (
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let mut driver = 0;
        // SAFETY: the pointer is valid for one i32.
        let asked = unsafe { sys::cuDriverGetVersion(&mut driver) };
        asked.result().map_err(failed("asking the driver's version"))?;
        let name = result::device::get_name(device).map_err(failed("asking the GPU's name"))?;
        // SAFETY: the device is one that the driver returned. `Drop` releases the context.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("making a context"))?;
        // SAFETY: the context is alive.
        unsafe { result::ctx::set_current(context) }.map_err(failed("binding the context"))?;
        let stream = stream::create(stream::StreamKind::NonBlocking).map_err(failed("making a stream"))?;
        let progress = Progress::new().map_err(failed("allocating pinned memory"))?;
        let (wait, writes) = (CurrentWait::new(), Writes::default());
        Ok(Arc::new(Self {
            device,
            context,
            stream,
            ordinal,
            name,
            capability,
            driver,
            progress,
            wait,
            writes,
        }))
    }

    /// Makes the context current in the calling thread. Every public operation of the device begins with this call.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is alive until `Drop`.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(|error| self.lost("binding the context", error))
    }

    /// Waits until the stream has run all of its work.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive until `Drop`.
        self.wait
            .during(|| unsafe { stream::synchronize(self.stream) })
            .map_err(|error| self.lost("waiting for the GPU", error))
    }

    /// Returns the error for a lost GPU: the driver's error, with the name of the kernel that began last.
    pub(super) fn lost(&self, what: &str, error: DriverError) -> DeviceError {
        DeviceError::Lost(format!("{what}: {error}; {}", self.last_kernel()))
    }

    /// Returns a clause about the kernel that the GPU began last.
    pub(super) fn last_kernel(&self) -> String {
        match self.progress.kernel() {
            Some(kernel) => format!("the kernel that began last is {kernel}"),
            None => "no kernel has begun".to_owned(),
        }
    }

    /// Returns the number of bytes of device memory that no process has allocated.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        self.memory().map(|memory| memory.free)
    }

    fn memory(&self) -> Option<MemoryInfo> {
        self.bind().ok()?;
        let (free, total) = result::mem_get_info().ok()?;
        Some(MemoryInfo { free: free as u64, total: total as u64 })
    }
}

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process has allocated.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// Reads the memory of a GPU from any thread, while the device computes.
pub struct MemoryReader(Weak<Gpu>);

impl MemoryReader {
    pub(super) fn of(gpu: &Arc<Gpu>) -> Self {
        Self(Arc::downgrade(gpu))
    }

    /// Returns `None` once the device is gone, or if the driver does not say. May wait for the driver.
    pub fn read(&self) -> Option<MemoryInfo> {
        self.0.upgrade()?.memory()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: all buffers and events hold an `Arc` of the GPU, so nothing uses the stream any more. Errors are
        // ignored, because the end of the process releases the device anyway.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = stream::destroy(self.stream);
            self.progress.free();
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// A CUDA event. The stream reaches it after all work that was enqueued before it.
pub(super) struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: any thread may use an event after it has bound the event's context, as every method here does.
unsafe impl Send for Event {}

impl Event {
    /// Records an event after all work that is enqueued on the stream now.
    pub(super) fn record(gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        let failed = |error| gpu.lost("recording an event", error);
        let event = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed)?;
        let event = Self { gpu: gpu.clone(), event };
        // SAFETY: event and stream are alive.
        unsafe { event::record(event.event, gpu.stream) }.map_err(failed)?;
        Ok(event)
    }

    /// Records the event again, after all work that is enqueued on the stream now. No thread may still wait for the
    /// earlier recording.
    pub(super) fn record_again(self) -> Result<Self, DeviceError> {
        // SAFETY: event and stream are alive.
        unsafe { event::record(self.event, self.gpu.stream) }
            .map_err(|error| self.gpu.lost("recording an event", error))?;
        Ok(self)
    }

    /// True if the stream has reached the event.
    pub(super) fn is_reached(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is alive.
        match unsafe { event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the stream has reached the event.
    pub(super) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is alive.
        self.gpu.wait.during(|| unsafe { sys::cuEventSynchronize(self.event).result() })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // SAFETY: this value owns the event. An error is ignored, because there is nothing left to do.
        unsafe {
            let _ = event::destroy(self.event);
        }
    }
}

/// Returns the error for a driver call that failed while a GPU was opened.
fn lost(what: &str, error: DriverError) -> DeviceError {
    DeviceError::Lost(format!("{what}: {error}"))
}
