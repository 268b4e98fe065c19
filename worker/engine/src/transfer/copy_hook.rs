//! Page copies inside a step, so that a transfer waits for a layer and not for a whole step.
//!
//! The device's thread runs the copies in the [hook](tutti_models::StepHook) between layers. Copies take a bounded
//! share of a step's time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tutti_kernels::DeviceError;
use tutti_models::{PausedPages, StepHook};

use crate::overlap::Shared;

/// Bytes that copies inside a step may move per second of the step's time: about a tenth of one thread's memory
/// bandwidth.
const COPY_BYTES_PER_SECOND: f64 = 400e6;

/// Lock-free hints to the device's thread about page copies.
#[derive(Debug, Default)]
pub(crate) struct CopyHints {
    /// True if there may be pages to copy or imports to finish now.
    pub due: AtomicBool,
    /// True if there may be pages to copy or imports to finish before the next step ends.
    pub expected: AtomicBool,
}

/// Runs page copies between the layers of a model's steps.
pub(crate) struct CopyHook {
    shared: Arc<Shared>,
    /// Number of bytes that may be copied now. Negative after a batch that was larger than the credit.
    credit: f64,
    /// Time at which `credit` was last updated.
    updated: Instant,
}

impl CopyHook {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, credit: 0.0, updated: Instant::now() }
    }

    /// Adds to `credit` the bytes that `COPY_BYTES_PER_SECOND` allows for the time since the last update. `credit`
    /// never exceeds the bytes of one second.
    fn earn_credit(&mut self) {
        let now = Instant::now();
        let earned = now.duration_since(self.updated).as_secs_f64() * COPY_BYTES_PER_SECOND;
        (self.credit, self.updated) = ((self.credit + earned).min(COPY_BYTES_PER_SECOND), now);
    }
}

impl StepHook for CopyHook {
    fn may_have_work(&self) -> bool {
        self.shared.hints.expected.load(Ordering::Relaxed)
    }

    fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError> {
        if !self.shared.hints.due.load(Ordering::Acquire) {
            return Ok(());
        }
        self.earn_credit();
        while self.credit > 0.0 {
            // `due` is cleared before the copies are taken, so that a later wake-up is seen in the next pause.
            self.shared.hints.due.store(false, Ordering::Release);
            let mut copies = self.shared.lock().core.start_copies();
            if copies.is_empty() {
                break;
            }
            self.credit -= copies.bytes() as f64;
            copies.run(pages)?;
            self.shared.lock().core.finish_copies(copies);
            // A further batch of copies may be due, so `due` is set again.
            self.shared.hints.due.store(true, Ordering::Release);
        }
        Ok(())
    }
}
