//! A bounded lane of CPU-bound work: a number of closures run on blocking threads, a number wait, and callers get
//! threads by deficit round robin. A full lane refuses further closures at once.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tutti_runtime::Error;

use crate::{
    bound::{Bound, Held},
    fair_queue::FairQueue,
    keys::Share,
};

/// Runs closures on blocking threads, within the bounds of one lane.
pub struct WorkLane {
    state: Arc<LaneState>,
}

/// An error of a closure that did not run.
#[derive(Debug)]
pub enum NotRun {
    /// The lane is full.
    Full {
        /// Number of closures that run or wait.
        ahead: u64,
        /// Maximum number of closures that run or wait.
        limit: u64,
    },
    /// A fault of the lane, or a panic of the closure.
    Failed(Error),
}

/// The size of a lane.
#[derive(Clone, Copy, Debug)]
pub struct LaneSize {
    /// Number of closures that run at a time.
    pub threads: usize,
    /// Number of closures that wait.
    pub queue: usize,
    /// Cost that each turn of a caller may use; see [`FairQueue`].
    pub quantum: u64,
}

impl WorkLane {
    /// An empty lane.
    pub fn new(size: LaneSize) -> Self {
        Self { state: LaneState::new(size) }
    }

    /// Runs a closure when it is the caller's turn. `cost` is what the closure uses of the turn.
    pub async fn run<T, F>(&self, share: Share, cost: u64, closure: F) -> Result<T, NotRun>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let limit = self.state.limit;
        let (_admitted, thread) =
            self.state.enter(share, cost).map_err(|ahead| NotRun::Full { ahead, limit })?;
        let failed = |message: String| NotRun::Failed(Error::internal(message));
        let thread = thread.await.map_err(|_| failed("a lane of work is closed".to_owned()))?;
        // The thread moves into the closure. If the request is cancelled, the closure still keeps the thread busy until
        // it returns.
        let done = tokio::task::spawn_blocking(move || {
            let _thread = thread;
            closure()
        });
        done.await.map_err(|e| failed(format!("a task failed: {e}")))
    }
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
    fn new(LaneSize { threads, queue, quantum }: LaneSize) -> Arc<Self> {
        let limit = threads.saturating_add(queue) as u64;
        let waiting = FairQueue::new(quantum);
        let queue = LaneQueue { admitted: Bound::default(), free: threads, waiting };
        Arc::new(Self { queue: Mutex::new(queue), limit })
    }

    /// Admits a closure to the lane. The receiver gets a thread when it is the caller's turn. If the lane is full,
    /// `Err` is the number of closures that run or wait.
    fn enter(
        self: &Arc<Self>,
        share: Share,
        cost: u64,
    ) -> Result<(Admitted, oneshot::Receiver<Thread>), u64> {
        let (sender, receiver) = oneshot::channel();
        let mut queue = self.queue.lock();
        let held = queue.admitted.enter(self.limit, share, 1).ok_or_else(|| queue.admitted.held())?;
        let admitted = Admitted { lane: self.clone(), held: Some(held) };
        if queue.free == 0 {
            queue.waiting.push(share, cost, sender);
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
