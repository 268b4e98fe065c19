//! A bounded pool for CPU-bound work on text, so that long prompts neither block the async threads nor pile up.
//!
//! The pool has lanes. Work in one lane never waits for work in another lane. So a short prompt does not wait for long
//! prompts, and a prompt of token ids does not wait for texts. Within a lane, callers get threads by deficit round
//! robin over the bytes of their texts.

use std::{sync::Arc, time::Duration};

use rayon::{ThreadPool, ThreadPoolBuilder};
use tutti_runtime::Error;

use crate::{
    keys::Share,
    work_lane::{LaneSize, NotRun, WorkLane},
};

/// Maximum size in bytes of JSON that is worked on where it arrives, without a thread of the pool.
pub const IN_PLACE_BYTES: usize = 64 << 10;

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
    lanes: [WorkLane; 4],
    /// Threads among which the segments of long texts are divided.
    threads: Arc<ThreadPool>,
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
        let of = |threads, queue| WorkLane::new(LaneSize { threads, queue, quantum: QUANTUM_BYTES });
        let lane = |threads| of(threads, queue);
        let lanes = [lane(threads), lane(threads), lane(half), of(half, usize::MAX)];
        Ok(Self { lanes, threads: Arc::new(shared) })
    }

    /// Runs `closure`, or refuses it at once if the lane's queue is full.
    pub async fn run<T, F>(&self, work: TextWork, closure: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let threads = (work.lane == Lane::Long).then(|| self.threads.clone());
        let closure = move || match threads {
            Some(threads) => threads.install(closure),
            None => closure(),
        };
        let done = self.lanes[work.lane as usize].run(work.share, work.bytes as u64, closure).await;
        done.map_err(|error| match error {
            NotRun::Full { ahead, limit } => {
                let message = format!("{ahead} texts are waiting to be processed, the limit is {limit}");
                Error::overloaded(message, Duration::from_secs(1))
            }
            NotRun::Failed(error) => error,
        })
    }
}

#[cfg(test)]
mod tests;
