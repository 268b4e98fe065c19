//! Reports of a GPU that does not answer.
//!
//! The driver's waits have no bound, and a thread that waits for a hung GPU can only be ended with its process. That is
//! the conductor's to do, whose watchdog sees a worker without progress. The thread here says before that what the GPU
//! hangs in.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::context::Gpu;

/// Number of looks at the wait within the time after which it is reported.
const LOOKS: u32 = 8;

/// The wait for the GPU that is under way. One thread at a time waits.
#[derive(Debug)]
pub(super) struct CurrentWait {
    epoch: Instant,
    /// Microseconds from the epoch to the beginning of the wait, and one; 0 without a wait.
    began: AtomicU64,
}

impl CurrentWait {
    pub(super) fn new() -> Self {
        Self { epoch: Instant::now(), began: AtomicU64::new(0) }
    }

    /// Runs `wait`, which waits for the GPU.
    pub(super) fn during<T>(&self, wait: impl FnOnce() -> T) -> T {
        let now = self.epoch.elapsed().as_micros() as u64;
        self.began.store(now + 1, Ordering::Relaxed);
        let result = wait();
        self.began.store(0, Ordering::Relaxed);
        result
    }

    /// Beginning of the wait as a number that no other wait has, and its duration so far.
    fn look(&self) -> Option<(u64, Duration)> {
        let began = self.began.load(Ordering::Relaxed);
        let since = Duration::from_micros(began.checked_sub(1)?);
        Some((began, self.epoch.elapsed().saturating_sub(since)))
    }
}

/// A thread that reports each wait longer than a limit, once. It ends with this value.
pub(super) struct Watchdog {
    _alive: Sender<()>,
}

impl Watchdog {
    /// Watches a GPU's waits. `report` gets a sentence.
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
