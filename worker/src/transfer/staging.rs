//! Bounded buffer of units between the engine's thread and the tasks that push the units.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;
use tutti_engine::{ExportSummary, PageRun, Waker};

/// Maximum bytes that all requests together may stage. A larger unit may be staged alone.
pub(super) const STAGED_BYTES: usize = 64 << 20;
/// If fewer bytes than this are free, the engine may have to wait.
const ENOUGH_BYTES: usize = 16 << 20;

/// Staging bytes that all requests share.
pub(super) struct StagingBudget {
    bytes: usize,
    used: AtomicUsize,
    /// Set if the engine has asked for room and may have found too little.
    wanted: AtomicBool,
    freed: Notify,
    /// Total of the bytes that were freed.
    released: AtomicU64,
    more_released: Notify,
}

impl StagingBudget {
    pub fn new(page_bytes: usize) -> Self {
        let bytes = STAGED_BYTES.max(page_bytes);
        Self {
            bytes,
            used: AtomicUsize::new(0),
            wanted: AtomicBool::new(false),
            freed: Notify::new(),
            released: AtomicU64::new(0),
            more_released: Notify::new(),
        }
    }

    /// Waits until bytes are freed after the last call, and returns the total of all bytes that were freed. Only one
    /// task may call this method.
    pub async fn released(&self) -> u64 {
        self.more_released.notified().await;
        self.released.load(Ordering::SeqCst)
    }

    /// Wakes the engine whenever bytes become free after the engine found too little room. Never returns. Runs as a
    /// separate task, because bytes are also freed inside the methods of the [`Courier`](tutti_engine::Courier), which
    /// must not wake the engine.
    pub async fn wake_when_freed(self: Arc<Self>, waker: Waker) {
        loop {
            self.freed.notified().await;
            waker.wake();
        }
    }

    /// Number of free bytes.
    pub fn left(&self) -> usize {
        // `wanted` is set before `used` is read, so that bytes that are freed after the read wake the engine.
        self.wanted.store(true, Ordering::SeqCst);
        let left = self.bytes.saturating_sub(self.used.load(Ordering::SeqCst));
        if left >= ENOUGH_BYTES {
            self.wanted.store(false, Ordering::SeqCst);
        }
        left
    }

    fn take(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Counts bytes that no queue takes as staged and freed.
    pub fn drop_bytes(&self, bytes: usize) {
        self.take(bytes);
        self.give_back(bytes);
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        self.released.fetch_add(bytes as u64, Ordering::SeqCst);
        self.more_released.notify_one();
        if self.wanted.swap(false, Ordering::SeqCst) {
            self.freed.notify_one();
        }
    }
}

/// Item of a request's queue.
pub(super) enum Parcel {
    Pages(Staged),
    End(ExportSummary),
}

/// A run of units whose bytes count against the budget until the run is dropped.
pub(super) struct Staged {
    pub run: PageRun,
    budget: Arc<StagingBudget>,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.budget.give_back(self.run.data.len());
    }
}

/// Staged items of one request, in order.
pub(super) struct Queue {
    budget: Arc<StagingBudget>,
    /// `None` once the queue is closed.
    parcels: Mutex<Option<VecDeque<Parcel>>>,
    changed: Notify,
}

impl Queue {
    pub fn new(budget: Arc<StagingBudget>) -> Self {
        Self { budget, parcels: Mutex::new(Some(VecDeque::new())), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<VecDeque<Parcel>>> {
        self.parcels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn put_pages(&self, run: PageRun) {
        self.budget.take(run.data.len());
        self.put(Parcel::Pages(Staged { run, budget: Arc::clone(&self.budget) }));
    }

    /// Queues the end of the request's units. Nothing may be queued after it.
    pub fn put_end(&self, summary: ExportSummary) {
        self.put(Parcel::End(summary));
    }

    fn put(&self, parcel: Parcel) {
        let mut parcels = self.lock();
        // If the queue is closed, the parcel is dropped below, after the lock is released. The drop frees the parcel's
        // bytes.
        let late = match &mut *parcels {
            Some(parcels) => {
                parcels.push_back(parcel);
                None
            }
            None => Some(parcel),
        };
        drop(parcels);
        drop(late);
        self.changed.notify_one();
    }

    /// Closes the queue and drops its parcels.
    pub fn close(&self) {
        let left = self.lock().take();
        drop(left);
        self.changed.notify_one();
    }

    /// Waits for the next parcel. Returns `None` once the queue is closed. Only one task may call this method.
    pub async fn next(&self) -> Option<Parcel> {
        loop {
            match self.lock().as_mut() {
                None => return None,
                Some(parcels) => {
                    if let Some(parcel) = parcels.pop_front() {
                        return Some(parcel);
                    }
                }
            }
            self.changed.notified().await;
        }
    }
}

#[cfg(test)]
mod tests;
