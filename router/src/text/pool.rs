//! A bounded pool for CPU-bound work on text, so that long prompts neither block the async threads nor pile up.
//!
//! The pool has lanes. Work of one lane never waits for work of another, so a short prompt is not stuck behind long
//! ones, and a prompt of token ids is not stuck behind texts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::Semaphore;
use tutti_runtime::Error;

/// Maximum size of a text in the short lane, in bytes.
const SHORT_BYTES: usize = 16 << 10;

/// The kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Parsing of bodies, and checks of token ids.
    Parse,
    /// Encoding of short texts.
    Short,
    /// Encoding of long texts, each of which may use all threads.
    Long,
    /// Writing of large answers.
    Render,
}

impl Lane {
    /// The lane in which a text of this many bytes is encoded.
    pub fn of_text(bytes: usize) -> Self {
        if bytes <= SHORT_BYTES { Self::Short } else { Self::Long }
    }
}

/// Runs closures on blocking threads. Each lane bounds the number of closures that run and the number that wait. It
/// refuses further closures at once.
pub struct TextPool {
    /// In the order of [`Lane`].
    lanes: [LaneState; 4],
    /// Threads among which the segments of long texts are divided.
    threads: Arc<ThreadPool>,
}

struct LaneState {
    running: Arc<Semaphore>,
    /// Number of closures that run or wait.
    admitted: AtomicUsize,
    /// Maximum of `admitted`.
    limit: usize,
}

impl LaneState {
    fn new(threads: usize, queue: usize) -> Self {
        let limit = threads.saturating_add(queue);
        Self { running: Arc::new(Semaphore::new(threads)), admitted: AtomicUsize::new(0), limit }
    }
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
    /// Creates a pool with `threads` threads per lane, half of them for long texts, and up to `queue` further closures
    /// waiting per lane. Answers are written for admitted requests only, so any number of them may wait.
    pub fn new(threads: usize, queue: usize) -> Result<Self, Error> {
        let half = threads.div_ceil(2);
        let shared = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("tokenise-{index}"))
            .build()
            .map_err(|e| Error::internal(format!("cannot start {threads} tokenising threads: {e}")))?;
        let lane = |threads| LaneState::new(threads, queue);
        let lanes = [lane(threads), lane(threads), lane(half), LaneState::new(half, usize::MAX)];
        Ok(Self { lanes, threads: Arc::new(shared) })
    }

    /// Runs `work`, or refuses it at once if the lane's queue is full.
    pub async fn run<T, F>(&self, lane: Lane, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let state = &self.lanes[lane as usize];
        let ahead = state.admitted.fetch_add(1, Ordering::Relaxed);
        let _permit = Permit(&state.admitted);
        if ahead >= state.limit {
            let message = format!("{ahead} texts are waiting to be processed, the limit is {}", state.limit);
            return Err(Error::overloaded(message, Duration::from_secs(1)));
        }
        let closed = |_| Error::internal("the text pool is closed");
        let permit = state.running.clone().acquire_owned().await.map_err(closed)?;
        let threads = (lane == Lane::Long).then(|| self.threads.clone());
        // The permit moves into the closure, because the closure of a cancelled request keeps a thread busy until the
        // closure returns.
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            match threads {
                Some(threads) => threads.install(work),
                None => work(),
            }
        });
        done.await.map_err(|e| Error::internal(format!("a text task failed: {e}")))
    }
}

#[cfg(test)]
mod tests;
