//! Work on a thread with a stack of known size, with a time limit.

use std::{
    sync::{Mutex, mpsc},
    thread,
    time::Instant,
};

use crate::{
    error::{ConstraintError, TOO_LONG_TO_COMPILE},
    matcher::Canceller,
};

/// Runs work on a thread with this much stack, and waits for it.
pub(crate) fn on_stack<T: Send>(bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, ConstraintError> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("constraint".to_owned()).stack_size(bytes);
        let running = builder.spawn_scoped(scope, work).map_err(|_| no_thread())?;
        running.join().map_err(|_| panicked())
    })
}

/// A time limit that work on another thread observes.
pub(crate) struct Deadline {
    at: Instant,
    /// The matcher that works now. It stops when the time is over.
    working: Mutex<Option<Canceller>>,
}

impl Deadline {
    pub(crate) fn at(at: Instant) -> Self {
        Self { at, working: Mutex::new(None) }
    }

    /// Runs work like [`on_stack`]. This thread waits, and stops the work's matcher when the time is over.
    pub(crate) fn run<T: Send>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, ConstraintError> {
        let (done, wait) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let builder = thread::Builder::new().name("constraint".to_owned()).stack_size(bytes);
            let running = builder
                .spawn_scoped(scope, move || {
                    // Dropped at the end, or when the work panics.
                    let _done = done;
                    work()
                })
                .map_err(|_| no_thread())?;
            let left = self.at.saturating_duration_since(Instant::now());
            if wait.recv_timeout(left) == Err(mpsc::RecvTimeoutError::Timeout) {
                self.stop();
            }
            running.join().map_err(|_| panicked())
        })
    }

    /// Lets the time limit stop this matcher from now on.
    pub(crate) fn watch(&self, canceller: Canceller) -> Result<(), ConstraintError> {
        *self.working.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(canceller);
        self.check()
    }

    /// Fails if the time is over. A compilation cannot be stopped, but its work is bounded; the time is checked behind
    /// it.
    pub(crate) fn check(&self) -> Result<(), ConstraintError> {
        match Instant::now() < self.at {
            true => Ok(()),
            false => Err(ConstraintError::at("", TOO_LONG_TO_COMPILE)),
        }
    }

    fn stop(&self) {
        let working = self.working.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(canceller) = working.as_ref() {
            canceller.cancel();
        }
    }
}

fn no_thread() -> ConstraintError {
    ConstraintError::of_process("cannot be compiled: no thread can be started")
}

fn panicked() -> ConstraintError {
    ConstraintError::of_process("cannot be compiled")
}

#[cfg(test)]
mod tests;
