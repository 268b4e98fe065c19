//! Fork and join over threads that persist between operations.
//!
//! A step runs about two hundred operations back to back, and during decodes each operation takes tens of microseconds,
//! so a waiting thread spins before it parks. The caller's thread runs tasks too. A thread that wakes late finds the
//! operation closed, and the caller does not wait for that thread.
//!
//! Each thread has a share of consecutive tasks, which it runs from the front, so that its reads form one stream. If
//! the same thread wrote the data in an earlier operation, the data is in the memory of the thread's NUMA node. A
//! thread whose share is empty takes tasks from the back of the other threads' shares.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::DeviceError;
use crate::cpu::threads::cores;

/// Duration for which an idle thread polls for work without yielding its core.
const SPIN: Duration = Duration::from_micros(50);
/// Total duration for which an idle thread polls before it parks. After [`SPIN`] it yields between polls. The duration
/// covers the pause between two steps. A host takes idle cores away from a virtual machine, and waking a parked thread
/// then takes a millisecond.
const STAY: Duration = Duration::from_millis(2);
/// Flag in [`Common::gate`] that is set while threads may not enter an operation.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// The functions of one operation.
trait Operation: Sync {
    /// Each thread that runs tasks calls this function once, before its first task.
    fn prepare(&self, thread: usize);
    /// Runs one task.
    fn run(&self, index: usize, thread: usize);
}

/// An operation of two closures.
struct Closures<P, T> {
    prepare: P,
    task: T,
}

impl<P: Fn(usize) + Sync, T: Fn(usize, usize) + Sync> Operation for Closures<P, T> {
    fn prepare(&self, thread: usize) {
        (self.prepare)(thread);
    }

    fn run(&self, index: usize, thread: usize) {
        (self.task)(index, thread);
    }
}

/// The current operation.
#[derive(Clone, Copy)]
struct Job(*const (dyn Operation + 'static));

struct Common {
    /// The current operation. Threads inside the gate read this field. The caller writes it while the gate is closed
    /// and empty.
    job: UnsafeCell<Option<Job>>,
    /// Number of threads inside the current operation, and the flag [`CLOSED`].
    gate: AtomicUsize,
    /// The share of each thread.
    shares: Box<[Share]>,
    /// Number of operations so far. A change signals a new operation.
    epoch: AtomicU64,
    stopping: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `job` is the only field that is not `Sync`. The gate orders the reads and writes of `job` (see the doc of
// `job`).
unsafe impl Sync for Common {}
// SAFETY: the pointer in `job` is dereferenced only inside the gate, while the closure that it points to is borrowed.
unsafe impl Send for Common {}

/// The remaining tasks of a thread's share: `first` in the high half and `end` in the low half of one word. Each share
/// has its own pair of cache lines.
#[repr(align(128))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, first: usize, end: usize) {
        self.0.store((first as u64) << 32 | end as u64, Ordering::Relaxed);
    }

    /// Applies `take` to the share and returns its old value; `None` if no task is left.
    fn take(&self, take: impl Fn(u64) -> u64) -> Option<u64> {
        let left = |share: u64| share >> 32 < share & u64::from(u32::MAX);
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |share| left(share).then(|| take(share)))
            .ok()
    }

    /// Takes the first remaining task.
    fn take_first(&self) -> Option<usize> {
        self.take(|share| share + (1 << 32)).map(|share| (share >> 32) as usize)
    }

    /// Takes the last remaining task.
    fn take_last(&self) -> Option<usize> {
        self.take(|share| share - 1).map(|share| (share & u64::from(u32::MAX)) as usize - 1)
    }
}

struct Helper {
    thread: Thread,
    asleep: Arc<AtomicBool>,
    join: Option<JoinHandle<()>>,
}

/// Persistent threads that run the tasks of one operation at a time.
pub(in crate::cpu) struct ThreadPool {
    common: Arc<Common>,
    helpers: Vec<Helper>,
}

impl ThreadPool {
    /// Starts a pool of `threads` threads, including the caller's.
    pub(in crate::cpu) fn new(threads: usize) -> Result<Self, DeviceError> {
        Self::start(threads, |_| Ok(()))
    }

    /// Starts a pool with one thread pinned to each of these cores. The caller's thread counts as the first; the caller
    /// must pin it.
    pub(in crate::cpu) fn on_cores(numbers: &[usize]) -> Result<Self, DeviceError> {
        let numbers = numbers.to_vec();
        Self::start(numbers.len(), move |thread| cores::pin(numbers[thread]))
    }

    /// Starts a pool. Each thread except the caller's calls `begin` first.
    fn start(
        threads: usize,
        begin: impl Fn(usize) -> Result<(), DeviceError> + Clone + Send + 'static,
    ) -> Result<Self, DeviceError> {
        let common = Arc::new(Common {
            job: UnsafeCell::new(None),
            gate: AtomicUsize::new(CLOSED),
            shares: (0..threads.max(1)).map(|_| Share(AtomicU64::new(0))).collect(),
            epoch: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let mut pool = Self { common, helpers: Vec::new() };
        for index in 1..threads {
            let common = Arc::clone(&pool.common);
            let asleep = Arc::new(AtomicBool::new(false));
            let (flag, begin) = (Arc::clone(&asleep), begin.clone());
            let (tell, begun) = mpsc::sync_channel(1);
            let join = std::thread::Builder::new()
                .name(format!("kernel-{index}"))
                .spawn(move || {
                    let begins = begin(index);
                    let works = begins.is_ok();
                    // Ignored: sending cannot fail, because `start` keeps the receiver and waits for this message.
                    let _ = tell.send(begins);
                    if works {
                        help(&common, &flag, index);
                    }
                })
                .map_err(|error| DeviceError::Lost(format!("cannot start kernel thread {index}: {error}")))?;
            pool.helpers.push(Helper { thread: join.thread().clone(), asleep, join: Some(join) });
            begun.recv().map_err(|_| DeviceError::Lost(format!("kernel thread {index} ended")))??;
        }
        Ok(pool)
    }

    /// Number of threads, including the caller's.
    pub(in crate::cpu) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `task(i, thread)` for every i below `tasks`, in any order and on any thread. `thread` is below
    /// [`Self::threads`], and calls with the same `thread` do not overlap. Returns when all calls are done. If a task
    /// panics, the device is lost.
    pub(in crate::cpu) fn run(
        &mut self,
        tasks: usize,
        task: impl Fn(usize, usize) + Sync,
    ) -> Result<(), DeviceError> {
        self.run_prepared(tasks, |_| (), task)
    }

    /// Does the same as [`Self::run`], but each thread that runs tasks calls `prepare(thread)` before its first task.
    pub(in crate::cpu) fn run_prepared(
        &mut self,
        tasks: usize,
        prepare: impl Fn(usize) + Sync,
        task: impl Fn(usize, usize) + Sync,
    ) -> Result<(), DeviceError> {
        if tasks == 0 {
            return Ok(());
        }
        let operation = Closures { prepare, task };
        if self.helpers.is_empty() || tasks == 1 {
            let inline = AssertUnwindSafe(|| {
                operation.prepare(0);
                (0..tasks).for_each(|index| operation.run(index, 0));
            });
            return catch_unwind(inline).map_err(|panic| lost(panic.as_ref()));
        }
        let operation: &(dyn Operation + '_) = &operation;
        // SAFETY: only the lifetime changes. Only threads inside the gate dereference the pointer, and this call
        // returns after the gate is closed and empty, so the operation outlives every use.
        let operation: &(dyn Operation + 'static) = unsafe { std::mem::transmute(operation) };
        // SAFETY: the gate is closed and empty between operations, and `&mut self` excludes another caller.
        unsafe { *self.common.job.get() = Some(Job(operation)) };
        // Only the caller and the threads that are woken below get a share: at most one thread per task. Other threads
        // that are awake may take tasks from these shares.
        let sharing = tasks.min(self.threads());
        for (thread, share) in self.common.shares.iter().enumerate() {
            let first = |thread: usize| tasks * thread.min(sharing) / sharing;
            share.set(first(thread), first(thread + 1));
        }
        self.common.gate.store(0, Ordering::Release);
        // The accesses to the epoch and to `asleep` are sequentially consistent, so either the helper sees the new
        // epoch, or the caller sees the helper asleep.
        self.common.epoch.fetch_add(1, Ordering::SeqCst);
        for helper in self.helpers.iter().take(tasks - 1) {
            if helper.asleep.load(Ordering::SeqCst) {
                helper.thread.unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| take_tasks(&self.common, 0)));
        self.common.gate.fetch_or(CLOSED, Ordering::AcqRel);
        let mut turns = 0u32;
        while self.common.gate.load(Ordering::Acquire) != CLOSED {
            turns += 1;
            // A helper may have lost its core to another process. Yielding lets it run on the caller's core.
            if turns.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        own.map_err(|panic| lost(panic.as_ref()))?;
        if self.common.panicked.swap(false, Ordering::AcqRel) {
            return Err(DeviceError::Lost("a kernel thread panicked".to_owned()));
        }
        Ok(())
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.common.stopping.store(true, Ordering::SeqCst);
        self.common.epoch.fetch_add(1, Ordering::SeqCst);
        for helper in &mut self.helpers {
            helper.thread.unpark();
            if let Some(join) = helper.join.take() {
                let _ = join.join();
            }
        }
    }
}

/// The error for a panic in a task.
fn lost(panic: &(dyn Any + Send)) -> DeviceError {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    DeviceError::Lost(format!("a kernel panicked: {text}"))
}

/// Runs tasks of the open operation until none is left.
fn take_tasks(common: &Common, thread: usize) {
    // SAFETY: the calling thread is inside the gate or has opened it, so `job` is set and not being written.
    let Some(job) = (unsafe { *common.job.get() }) else { return };
    // SAFETY: the calling thread is inside the gate or has opened it, and `run` keeps the closure until the gate is
    // closed and empty.
    let operation = unsafe { &*job.0 };
    let mut prepared = false;
    let mut run = |index| {
        if !prepared {
            operation.prepare(thread);
            prepared = true;
        }
        operation.run(index, thread);
    };
    while let Some(index) = common.shares[thread].take_first() {
        run(index);
    }
    let others = common.shares.iter().cycle().skip(thread + 1).take(common.shares.len() - 1);
    for share in others {
        while let Some(index) = share.take_last() {
            run(index);
        }
    }
}

/// The loop of a helper thread: waits for an epoch, enters the gate, runs tasks, leaves.
fn help(common: &Common, asleep: &AtomicBool, thread: usize) {
    let mut seen = 0;
    loop {
        seen = wait_for_change(common, asleep, seen);
        if common.stopping.load(Ordering::SeqCst) {
            return;
        }
        let enter = |inside: usize| (inside & CLOSED == 0).then_some(inside + 1);
        if common.gate.fetch_update(Ordering::AcqRel, Ordering::Relaxed, enter).is_err() {
            continue;
        }
        if catch_unwind(AssertUnwindSafe(|| take_tasks(common, thread))).is_err() {
            common.panicked.store(true, Ordering::Release);
        }
        common.gate.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits until the epoch differs from `seen`, and returns the new epoch.
fn wait_for_change(common: &Common, asleep: &AtomicBool, seen: u64) -> u64 {
    let began = Instant::now();
    let mut turns = 0u32;
    loop {
        let epoch = common.epoch.load(Ordering::Acquire);
        if epoch != seen {
            return epoch;
        }
        turns = turns.wrapping_add(1);
        if !turns.is_multiple_of(64) {
            std::hint::spin_loop();
            continue;
        }
        let waited = began.elapsed();
        if waited < STAY {
            if waited > SPIN {
                std::thread::yield_now();
            }
            continue;
        }
        asleep.store(true, Ordering::SeqCst);
        if common.epoch.load(Ordering::SeqCst) == seen {
            std::thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
