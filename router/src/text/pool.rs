//! A bounded pool for CPU-bound work on text, so that long prompts neither block the async threads nor pile up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Semaphore;
use tutti_runtime::Error;

/// Runs closures on blocking threads. The pool bounds the number of closures that run and the number that wait. It
/// refuses further closures at once.
pub struct TextPool {
    running: Arc<Semaphore>,
    /// Number of closures that run or wait.
    admitted: AtomicUsize,
    /// Maximum of `admitted`.
    limit: usize,
}

/// Counts one closure in `admitted`. Dropping the permit removes the closure from the count, also if the request is
/// cancelled.
struct Permit<'a>(&'a AtomicUsize);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl TextPool {
    /// Creates a pool of `threads` threads for which up to `queue` further closures may wait.
    pub fn new(threads: usize, queue: usize) -> Self {
        Self {
            running: Arc::new(Semaphore::new(threads)),
            admitted: AtomicUsize::new(0),
            limit: threads + queue,
        }
    }

    /// Runs `work`, or refuses it at once if the queue is full.
    pub async fn run<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let ahead = self.admitted.fetch_add(1, Ordering::Relaxed);
        let _permit = Permit(&self.admitted);
        if ahead >= self.limit {
            let message = format!("{ahead} texts are waiting to be tokenised, the limit is {}", self.limit);
            return Err(Error::overloaded(message, Duration::from_secs(1)));
        }
        let closed = |_| Error::internal("the tokenising pool is closed");
        let permit = self.running.clone().acquire_owned().await.map_err(closed)?;
        // The permit moves into the closure, because the closure of a cancelled request keeps a thread busy until the
        // closure returns.
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        done.await.map_err(|e| Error::internal(format!("a text task failed: {e}")))
    }
}

#[cfg(test)]
mod tests;
