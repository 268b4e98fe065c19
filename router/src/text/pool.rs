//! A bounded pool for CPU-bound work on text, so that long prompts neither block the async threads nor pile up.
//!
//! The pool has lanes. Work in one lane never waits for work in another lane. So a short prompt does not wait for long
//! prompts, and a prompt of token ids does not wait for texts. Within a lane, callers get threads by deficit round
//! robin over the bytes of their texts.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::oneshot;
use tutti_runtime::Error;

use crate::{
    bound::{Bound, Held},
    fair_queue::FairQueue,
    keys::Share,
};

/// Maximum size of a text in the short lane, in bytes.
const SHORT_BYTES: usize = 16 << 10;

/// Quantum of the deficit round robin, in bytes of text per turn of a caller.
const QUANTUM_BYTES: u64 = SHORT_BYTES as u64;

/// A lane of the pool, one for each kind of work.
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

/// A caller's work on a text.
#[derive(Clone, Copy, Debug)]
pub struct TextWork {
    /// The kind of work.
    pub lane: Lane,
    /// The caller's share of the lane.
    pub share: Share,
    /// Size of the text in bytes.
    pub bytes: usize,
}

/// Runs closures on blocking threads. Each lane bounds the number of closures that run and the number that wait. A full
/// lane refuses further closures at once.
pub struct TextPool {
    /// The lanes, indexed by [`Lane`].
    lanes: [Arc<LaneState>; 4],
    /// Threads among which the segments of long texts are divided.
    threads: Arc<ThreadPool>,
}

struct LaneState {
    queue: Mutex<LaneQueue>,
    /// Maximum number of closures that run or wait.
    limit: u64,
}

struct LaneQueue {
    /// Closures that run or wait.
    admitted: Bound,
    /// Number of threads that run no closure.
    free: usize,
    waiting: FairQueue<oneshot::Sender<Thread>>,
}

impl LaneState {
    fn new(threads: usize, queue: usize) -> Arc<Self> {
        let limit = threads.saturating_add(queue) as u64;
        let waiting = FairQueue::new(QUANTUM_BYTES);
        let queue = LaneQueue { admitted: Bound::default(), free: threads, waiting };
        Arc::new(Self { queue: Mutex::new(queue), limit })
    }

    /// Admits a closure to the lane. The receiver gets a thread when it is the caller's turn. If the lane is full,
    /// `Err` is the number of closures that run or wait.
    fn enter(self: &Arc<Self>, work: TextWork) -> Result<(Admitted, oneshot::Receiver<Thread>), u64> {
        let (sender, receiver) = oneshot::channel();
        let mut queue = self.queue.lock();
        let held = queue.admitted.enter(self.limit, work.share, 1).ok_or_else(|| queue.admitted.held())?;
        let admitted = Admitted { lane: self.clone(), held: Some(held) };
        if queue.free == 0 {
            queue.waiting.push(work.share, work.bytes as u64, sender);
            return Ok((admitted, receiver));
        }
        queue.free -= 1;
        drop(queue);
        // The send cannot fail, because the receiver still exists.
        let _ = sender.send(Thread { lane: self.clone() });
        Ok((admitted, receiver))
    }
}

/// A closure that runs or waits. Dropping this value makes room for another closure, also if the request is cancelled.
struct Admitted {
    lane: Arc<LaneState>,
    held: Option<Held>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.lane.queue.lock().admitted.leave(held);
        }
    }
}

/// The right to run one closure. Dropping it gives the right to the next waiting closure.
struct Thread {
    lane: Arc<LaneState>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        loop {
            let mut queue = self.lane.queue.lock();
            let Some(next) = queue.waiting.pop() else {
                queue.free += 1;
                return;
            };
            drop(queue);
            if !next.is_closed() {
                // If the receiver is dropped now, `send` returns the thread. Its drop then passes the thread to the
                // next closure.
                let _ = next.send(Self { lane: self.lane.clone() });
                return;
            }
        }
    }
}

impl TextPool {
    /// Creates a pool. The lanes for parsing and short texts have `threads` threads each; the lanes for long texts and
    /// answers have half as many. Up to `queue` further closures wait per lane. Any number of answers may wait, because
    /// only admitted requests have answers.
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

    /// Runs `closure`, or refuses it at once if the lane's queue is full.
    pub async fn run<T, F>(&self, work: TextWork, closure: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let state = &self.lanes[work.lane as usize];
        let (_admitted, thread) = state.enter(work).map_err(|ahead| {
            let message = format!("{ahead} texts are waiting to be processed, the limit is {}", state.limit);
            Error::overloaded(message, Duration::from_secs(1))
        })?;
        let thread = thread.await.map_err(|_| Error::internal("the text pool is closed"))?;
        let threads = (work.lane == Lane::Long).then(|| self.threads.clone());
        // The thread moves into the closure. If the request is cancelled, the closure still keeps the thread busy until
        // it returns.
        let done = tokio::task::spawn_blocking(move || {
            let _thread = thread;
            match threads {
                Some(threads) => threads.install(closure),
                None => closure(),
            }
        });
        done.await.map_err(|e| Error::internal(format!("a text task failed: {e}")))
    }
}

#[cfg(test)]
mod tests;
