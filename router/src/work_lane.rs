//! A bounded lane of CPU-bound work: a number of closures run on threads, a number wait, and callers get threads by
//! deficit round robin. A full lane refuses further closures at once.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::oneshot;
use tutti_runtime::Error;

use crate::{
    bound::{Bound, Held},
    fair_queue::FairQueue,
    keys::Share,
};

/// Nice value of threads in the background. The kernel gives such a thread about a tenth of the time of a processor on
/// which another thread is busy, so work in the background goes on, and hardly delays a step of a worker on the same
/// machine.
const BACKGROUND_NICE: i32 = 10;

/// Runs closures on threads, within the bounds of one lane.
pub struct WorkLane {
    state: Arc<LaneState>,
    /// Threads of the lane's own; `None` to use the runtime's blocking threads.
    threads: Option<Arc<ThreadPool>>,
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
    /// An empty lane, whose closures run on the runtime's blocking threads.
    pub fn new(size: LaneSize) -> Self {
        Self { state: LaneState::new(size), threads: None }
    }

    /// An empty lane whose closures run on threads of its own, named `name`, to which the kernel prefers all threads of
    /// usual priority.
    pub fn in_background(size: LaneSize, name: &'static str) -> Result<Self, Error> {
        let threads = ThreadPoolBuilder::new()
            .num_threads(size.threads)
            .thread_name(move |index| format!("{name}-{index}"))
            .start_handler(|_| yield_to_others())
            .build()
            .map_err(|e| Error::internal(format!("cannot start {} {name} threads: {e}", size.threads)))?;
        Ok(Self { state: LaneState::new(size), threads: Some(Arc::new(threads)) })
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
        let work = move || {
            let _thread = thread;
            closure()
        };
        let Some(threads) = &self.threads else {
            return tokio::task::spawn_blocking(work)
                .await
                .map_err(|e| failed(format!("a task failed: {e}")));
        };
        let (sender, receiver) = oneshot::channel();
        // A panic would end the process. The sender is gone after one, which the receiver notices.
        threads.spawn(move || {
            if let Ok(done) = catch_unwind(AssertUnwindSafe(work)) {
                // Nobody waits for the result of a cancelled request.
                let _ = sender.send(done);
            }
        });
        receiver.await.map_err(|_| failed("a task failed: it panicked".to_owned()))
    }
}

/// Makes the kernel prefer other threads to this one. On systems other than Linux, a nice value is that of the whole
/// process, so it stays.
fn yield_to_others() {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{getpriority_process, setpriority_process};
        // A process that was started with a greater value keeps it.
        let nice = getpriority_process(None).map(|usual| usual.max(BACKGROUND_NICE));
        if let Err(error) = nice.and_then(|nice| setpriority_process(None, nice)) {
            tracing::warn!(%error, nice = BACKGROUND_NICE, "a thread in the background keeps the usual priority");
        }
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

#[cfg(test)]
mod tests;
