//! The time limit of one mask.
//!
//! The library's limits count work and not time, so that masks are the same on every machine. The time limit ends a
//! request whose mask stays within them and takes too long. It counts the processor time of the thread that makes the
//! mask, so that a busy machine ends no request.

use std::{
    fs, io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tutti_constraints::Canceller;

/// Maximum processor time of the commit of a token and the next mask, about.
const MASK_TIME: Duration = Duration::from_millis(100);
/// Interval at which the times are looked at.
const INTERVAL: Duration = Duration::from_millis(20);

/// A thread that stops matchers that take too long.
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    lanes: Mutex<Vec<Arc<Mutex<LaneState>>>>,
    /// True while the thread sleeps until a lane has work.
    is_asleep: AtomicBool,
    is_closed: AtomicBool,
}

/// The work of one thread, as the watch sees it.
#[derive(Default)]
struct LaneState {
    working: Option<Working>,
    /// File with the thread's processor time; `None` if the system has none.
    times: Option<PathBuf>,
}

struct Working {
    canceller: Canceller,
    began: Instant,
    /// Processor time of the thread when the watch saw the work first.
    cpu: Option<Duration>,
}

/// One thread's place in the watch.
pub(super) struct Lane {
    state: Arc<Mutex<LaneState>>,
    shared: Arc<Shared>,
    watcher: Option<thread::Thread>,
    knows_thread: bool,
}

/// Ends the watch of one piece of work when it is dropped.
pub(super) struct Watched<'a>(&'a Lane);

impl Watch {
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let seen = Arc::clone(&shared);
        let thread = thread::Builder::new().name("mask-times".into()).spawn(move || seen.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// A place for a thread.
    pub fn lane(&self) -> Lane {
        let state = Arc::<Mutex<LaneState>>::default();
        lock(&self.shared.lanes).push(Arc::clone(&state));
        let watcher = self.thread.as_ref().map(|thread| thread.thread().clone());
        Lane { state, shared: Arc::clone(&self.shared), watcher, knows_thread: false }
    }

    /// Stops all work.
    pub fn cancel_all(&self) {
        for lane in lock(&self.shared.lanes).iter() {
            lock(lane).working.iter().for_each(|working| working.canceller.cancel());
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Ignored: a thread that has panicked has already said why.
            let _ = thread.join();
        }
    }
}

impl Lane {
    /// Watches work until the result is dropped. This thread does the work.
    pub fn watch(&mut self, canceller: Canceller) -> Watched<'_> {
        let working = Working { canceller, began: Instant::now(), cpu: None };
        let mut state = lock(&self.state);
        if !std::mem::replace(&mut self.knows_thread, true) {
            let own = fs::read_link("/proc/thread-self").ok();
            state.times = own.map(|own| PathBuf::from("/proc").join(own).join("schedstat"));
        }
        state.working = Some(working);
        drop(state);
        if self.shared.is_asleep.swap(false, Ordering::AcqRel) {
            self.watcher.iter().for_each(thread::Thread::unpark);
        }
        Watched(self)
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).working = None;
    }
}

impl Shared {
    fn run(&self) {
        while !self.is_closed.load(Ordering::Acquire) {
            if self.look() {
                thread::park_timeout(INTERVAL);
                continue;
            }
            self.is_asleep.store(true, Ordering::Release);
            // Work that began before the line above has not woken this thread.
            if !self.look() {
                thread::park();
            }
            self.is_asleep.store(false, Ordering::Release);
        }
    }

    /// Stops work beyond the limit. True if there is work.
    fn look(&self) -> bool {
        let lanes = lock(&self.lanes).clone();
        lanes.iter().fold(false, |any, lane| lock(lane).look() | any)
    }
}

impl LaneState {
    fn look(&mut self) -> bool {
        let Some(working) = &mut self.working else { return false };
        let now = self.times.as_ref().and_then(cpu_time);
        let used = match (now, working.cpu) {
            (Some(now), Some(before)) => now.saturating_sub(before),
            (Some(now), None) => {
                working.cpu = Some(now);
                Duration::ZERO
            }
            (None, _) => working.began.elapsed(),
        };
        if used >= MASK_TIME {
            working.canceller.cancel();
        }
        true
    }
}

/// Processor time of a thread.
fn cpu_time(times: &PathBuf) -> Option<Duration> {
    let text = fs::read_to_string(times).ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
