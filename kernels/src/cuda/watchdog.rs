//! Reports of a GPU that does not answer.
//!
//! The driver's waits have no time limit, and a thread that waits for a hung GPU ends only with its process. The
//! conductor's watchdog detects a worker without progress and ends it. The thread of this module reports earlier, and
//! names the kernel in which the GPU hangs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::context::Gpu;

/// Number of checks per time limit of a wait.
const LOOKS: u32 = 8;

/// The current wait for the GPU. Only one thread waits at a time.
#[derive(Debug)]
pub(super) struct CurrentWait {
    epoch: Instant,
    /// Time from the epoch to the beginning of the wait, in microseconds plus one; 0 without a wait.
    began: AtomicU64,
}

impl CurrentWait {
    pub(super) fn new() -> Self {
        Self { epoch: Instant::now(), began: AtomicU64::new(0) }
    }

    /// Calls `wait`, a function that waits for the GPU, and records the wait.
    pub(super) fn during<T>(&self, wait: impl FnOnce() -> T) -> T {
        let now = self.epoch.elapsed().as_micros() as u64;
        self.began.store(now + 1, Ordering::Relaxed);
        let result = wait();
        self.began.store(0, Ordering::Relaxed);
        result
    }

    /// Returns the beginning of the wait, as a number that identifies it, and its duration so far.
    fn look(&self) -> Option<(u64, Duration)> {
        let began = self.began.load(Ordering::Relaxed);
        let since = Duration::from_micros(began.checked_sub(1)?);
        Some((began, self.epoch.elapsed().saturating_sub(since)))
    }
}

/// A thread that reports each wait longer than a limit once. The thread ends when this value is dropped.
pub(super) struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    /// Starts to watch a GPU's waits. `report` is called with a sentence.
    pub(super) fn start(
        gpu: &Arc<Gpu>,
        limit: Duration,
        report: impl Fn(&str) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (alive, ended) = mpsc::channel();
        let gpu = Arc::downgrade(gpu);
        thread::Builder::new().name("gpu-watchdog".into()).spawn(move || {
            let mut reported = 0;
            while ended.recv_timeout(limit / LOOKS) == Err(RecvTimeoutError::Timeout) {
                let Some(sentence) = look(&gpu, limit, &mut reported) else { continue };
                report(&sentence);
            }
        })?;
        Ok(Self { _alive: alive })
    }
}

fn look(gpu: &Weak<Gpu>, limit: Duration, reported: &mut u64) -> Option<String> {
    let gpu = gpu.upgrade()?;
    let (wait, lasts) = gpu.wait.look()?;
    if lasts < limit || wait == *reported {
        return None;
    }
    *reported = wait;
    Some(format!("the GPU has not answered for {lasts:.1?}; {}", gpu.last_kernel()))
}

#[cfg(test)]
mod tests;
