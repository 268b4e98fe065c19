//! One GPU: its primary context and the one stream on which everything runs in order.

use std::sync::Arc;

use cudarc::driver::result::{self, DriverError, event, stream};
use cudarc::driver::sys;

use super::library;
use super::progress::Progress;
use super::watchdog::CurrentWait;
use crate::DeviceError;

/// A GPU with a context and a stream.
pub(super) struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
    /// Number of the GPU among those that the process sees.
    pub(super) ordinal: usize,
    pub(super) name: String,
    /// Compute capability, such as 9 and 0.
    pub(super) capability: (i32, i32),
    /// The driver's version as CUDA counts it, such as 13000.
    pub(super) driver: i32,
    pub(super) progress: Progress,
    /// The wait for this GPU that is under way, for the watchdog.
    pub(super) wait: CurrentWait,
}

// SAFETY: a context and its stream may be used by any thread that binds the context, as every user of a `Gpu` does.
unsafe impl Send for Gpu {}
// SAFETY: the driver's calls on one stream may come from several threads.
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
        let wait = CurrentWait::new();
        Ok(Arc::new(Self { device, context, stream, ordinal, name, capability, driver, progress, wait }))
    }

    /// Makes the context that of the calling thread. Every entry into the device begins with it.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is alive until `Drop`.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(|error| self.lost("binding the context", error))
    }

    /// Waits for all that the stream holds.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive until `Drop`.
        self.wait
            .during(|| unsafe { stream::synchronize(self.stream) })
            .map_err(|error| self.lost("waiting for the GPU", error))
    }

    /// The loss of the GPU by an error of the driver, with the name of the kernel that began last.
    pub(super) fn lost(&self, what: &str, error: DriverError) -> DeviceError {
        DeviceError::Lost(format!("{what}: {error}; {}", self.last_kernel()))
    }

    /// A clause on the kernel that the GPU began last.
    pub(super) fn last_kernel(&self) -> String {
        match self.progress.kernel() {
            Some(kernel) => format!("the kernel that began last is {kernel}"),
            None => "no kernel has begun".to_owned(),
        }
    }

    /// Bytes of device memory that nobody has allocated.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        self.bind().ok()?;
        result::mem_get_info().ok().map(|(free, _)| free as u64)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: all buffers and events hold an `Arc` of the GPU, so nothing uses the stream any more. An error
        // changes nothing: the process gives the device back when it ends.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = stream::destroy(self.stream);
            self.progress.free();
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// A point in the stream.
pub(super) struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: as for `Gpu`.
unsafe impl Send for Event {}

impl Event {
    /// Marks the point behind all that the stream holds.
    pub(super) fn record(gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        let failed = |error| gpu.lost("recording an event", error);
        let event = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed)?;
        let event = Self { gpu: gpu.clone(), event };
        // SAFETY: event and stream are alive.
        unsafe { event::record(event.event, gpu.stream) }.map_err(failed)?;
        Ok(event)
    }

    /// Marks another point in the same way. Nobody waits for the last one.
    pub(super) fn record_again(self) -> Result<Self, DeviceError> {
        // SAFETY: event and stream are alive.
        unsafe { event::record(self.event, self.gpu.stream) }
            .map_err(|error| self.gpu.lost("recording an event", error))?;
        Ok(self)
    }

    /// True if the stream has reached the point.
    pub(super) fn is_reached(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is alive.
        match unsafe { event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the stream has reached the point.
    pub(super) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the event is alive.
        self.gpu.wait.during(|| unsafe { sys::cuEventSynchronize(self.event).result() })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // SAFETY: nobody else has the event. An error changes nothing.
        unsafe {
            let _ = event::destroy(self.event);
        }
    }
}

/// The failure of opening a GPU, by an error of the driver.
fn lost(what: &str, error: DriverError) -> DeviceError {
    DeviceError::Lost(format!("{what}: {error}"))
}
