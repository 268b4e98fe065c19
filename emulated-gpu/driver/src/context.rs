//! A device's primary context: its memory and its streams.

use std::ffi::c_void;
use std::sync::Arc;

use crate::error::{Error, Outcome};
use crate::faults::FaultKind;
use crate::handles::Handles;
use crate::memory::Memory;
use crate::queue::{Entry, LEGACY, Order, Point, Queue, StreamKind};
use crate::settings::Settings;

/// Streams by their handles.
pub static STREAMS: Handles<Stream> = Handles::new();

/// Handle of the legacy default stream. A null handle means this stream, too.
const LEGACY_HANDLE: usize = 1;

/// A stream that a program created.
pub struct Stream {
    /// Context of the stream.
    pub context: Arc<Context>,
    /// Number of the stream's line in the context's queue.
    pub line: u64,
    /// Flags that the program passed to `cuStreamCreate`.
    pub flags: u32,
}

/// A device's primary context.
pub struct Context {
    /// Handle of the context.
    pub handle: usize,
    /// Index among the devices that the process sees.
    pub ordinal: usize,
    /// Index among all devices of the machine, used in reports and by the rules of faults.
    pub device: usize,
    /// Settings of the process.
    pub settings: &'static Settings,
    /// Device memory.
    pub memory: Memory,
    /// Streams and their work.
    pub queue: Arc<Queue>,
}

impl Context {
    /// Creates the context of the visible device `ordinal`.
    pub fn new(settings: &'static Settings, ordinal: usize) -> Self {
        let device = settings.devices[ordinal];
        let watched = settings.races || settings.uninitialised;
        // Each device has its own seed, so that the devices run work in different orders.
        let order = settings.seed.map(|seed| Order {
            seed: seed.wrapping_mul(1_000_003).wrapping_add(device as u64),
            patience: settings.patience,
        });
        Context {
            handle: crate::handles::unused(),
            ordinal,
            device,
            settings,
            memory: Memory::new(settings.memory_bytes, watched),
            queue: Queue::start(order),
        }
    }

    /// Allocates memory. If too little is free, waits for the pending frees and tries again.
    ///
    /// # Errors
    ///
    /// `OUT_OF_MEMORY` if too little memory is free or a rule of `EMULATED_GPU_FAULTS` applies, and the sticky error.
    pub fn allocate(&self, bytes: u64) -> Outcome<u64> {
        self.queue.check()?;
        if self.settings.faults.next(&[FaultKind::OutOfMemory], self.device, "").is_some() {
            return Err(Error::OUT_OF_MEMORY);
        }
        if let Ok(address) = self.memory.allocate(bytes) {
            return Ok(address);
        }
        if self.memory.has_pending_frees() {
            self.queue.wait_for_all()?;
        }
        self.memory.allocate(bytes)
    }

    /// Enqueues work in a stream. While the work runs, the device computes nothing else.
    ///
    /// # Errors
    ///
    /// The sticky error, or `INVALID_HANDLE` for a closed stream.
    pub fn submit(
        self: &Arc<Self>,
        line: u64,
        work: impl FnOnce(&Context) -> Outcome + Send + 'static,
    ) -> Outcome {
        let context = self.clone();
        self.queue.submit(line, Entry::Run(Box::new(move || work(&context))))
    }

    /// Enqueues work in a stream and waits until the work has run.
    ///
    /// # Errors
    ///
    /// As for [`Context::submit`], and the errors of work that was enqueued earlier.
    pub fn run(
        self: &Arc<Self>,
        line: u64,
        work: impl FnOnce(&Context) -> Outcome + Send + 'static,
    ) -> Outcome {
        self.submit(line, work)?;
        let point = Arc::new(Point::default());
        self.queue.submit(line, Entry::Record(point.clone()))?;
        self.queue.wait_for_point(&point)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.queue.shut();
    }
}

/// Returns the context and the line of a stream's handle. The legacy default stream belongs to the current context.
///
/// # Errors
///
/// `INVALID_HANDLE` for an unknown stream, `INVALID_CONTEXT` without a current context, `NOT_SUPPORTED` for the
/// per-thread default stream.
pub fn stream(handle: *mut c_void) -> Outcome<(Arc<Context>, u64)> {
    match handle.addr() {
        0 | LEGACY_HANDLE => Ok((crate::state::current()?, LEGACY)),
        2 => Err(Error::NOT_SUPPORTED),
        _ => STREAMS.get(handle).map(|stream| (stream.context.clone(), stream.line)),
    }
}

/// Creates a stream of the current context.
///
/// # Errors
///
/// `INVALID_CONTEXT` without a current context, `INVALID_VALUE` for unknown flags, and the sticky error.
pub fn create_stream(flags: u32) -> Outcome<*mut c_void> {
    let context = crate::state::current()?;
    context.queue.check()?;
    let kind = match flags {
        0 => StreamKind::Blocking,
        1 => StreamKind::NonBlocking,
        _ => return Err(Error::INVALID_VALUE),
    };
    let line = context.queue.open(kind);
    Ok(STREAMS.insert(Arc::new(Stream { context, line, flags })))
}
