//! Copying for other workers inside a step, so that a hand-over waits for a layer and not for a step.
//!
//! The device's thread does it itself, in the [pauses](tutti_models::StepHook) of its step. A step that computes gives up a
//! bounded share of its time to it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use tutti_kernels::DeviceError;
use tutti_models::{Model, PausedPages, StepHook};

use crate::overlap::Shared;

/// Bytes a second that are copied at the expense of a step: about a tenth of what memory of one thread does.
const RATE: f64 = 400e6;

/// What the device's thread is told between two locks.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    /// There may be something to copy or to settle now.
    pub wanted: AtomicBool,
    /// There may be before the next step is over.
    pub may_come: AtomicBool,
}

/// A model whose step is not running.
pub(crate) struct Resting<'a>(pub &'a mut dyn Model);

impl PausedPages for Resting<'_> {
    fn read_pages(&mut self, pages: &[tutti_kernels::PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.0.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[tutti_kernels::PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.0.write_pages(pages, data)
    }
}

/// Copies in the pauses of a model's steps.
pub(crate) struct Beside {
    shared: Arc<Shared>,
    /// Bytes that may be copied; below 0 after more was.
    credit: f64,
    /// When the credit was counted last.
    counted: Instant,
}

impl Beside {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, credit: 0.0, counted: Instant::now() }
    }

    /// Grows with the time that has passed, up to what a second brings.
    fn count(&mut self) {
        let now = Instant::now();
        let earned = now.duration_since(self.counted).as_secs_f64() * RATE;
        (self.credit, self.counted) = ((self.credit + earned).min(RATE), now);
    }
}

impl StepHook for Beside {
    fn may_have_work(&self) -> bool {
        self.shared.hints.may_come.load(Ordering::Relaxed)
    }

    fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError> {
        if !self.shared.hints.wanted.load(Ordering::Acquire) {
            return Ok(());
        }
        self.count();
        while self.credit > 0.0 {
            // Before the look, so that whoever rings from here on is looked after in the next pause.
            self.shared.hints.wanted.store(false, Ordering::Release);
            let mut errands = self.shared.lock().desk.errands();
            if errands.is_empty() {
                break;
            }
            self.credit -= errands.bytes() as f64;
            errands.run(pages)?;
            self.shared.lock().desk.carried(errands);
            // A piece may not have been all.
            self.shared.hints.wanted.store(true, Ordering::Release);
        }
        Ok(())
    }
}
