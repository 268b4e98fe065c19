//! Bounded buffer of units between the thread that copies units and the tasks that push them.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use tokio::sync::Notify;

use crate::{HandOver, Run};

/// Maximum bytes that all requests together may stage. A single larger unit may be staged alone.
pub(crate) const STAGED_BYTES: usize = 64 << 20;
/// Number of free bytes that is enough for the engine. If the engine finds fewer, the next bytes that become free wake
/// it.
const ENOUGH_BYTES: usize = 16 << 20;

/// The budget of staged bytes, which all requests share.
pub(crate) struct StagingBudget {
    bytes: usize,
    used: AtomicUsize,
    /// True if the engine found less room than `ENOUGH_BYTES`. The next bytes that become free wake the engine.
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

    /// Waits until bytes are freed, unless some were freed since the last call. Returns the total of all freed bytes.
    /// Only one task may call this method.
    pub async fn released(&self) -> u64 {
        self.more_released.notified().await;
        self.released.load(Ordering::SeqCst)
    }

    /// Wakes the engine whenever bytes become free after the engine found too little room. Never returns. Runs as a
    /// separate task, because bytes are also freed inside methods of the [`Connector`](crate::Connector), which must
    /// not wake the engine.
    pub async fn wake_when_freed(self: Arc<Self>, wake: impl Fn()) {
        loop {
            self.freed.notified().await;
            wake();
        }
    }

    /// Number of free bytes.
    pub fn left(&self) -> usize {
        // `wanted` is set before `used` is read. Bytes that are freed after the read therefore wake the engine.
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

    /// Accounts for bytes that are dropped because no queue takes them, as if they had been staged and then freed.
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
pub(crate) enum Queued {
    Run(Staged),
    End(HandOver, Instant),
}

/// A run whose bytes count against the budget until they are dropped.
pub(crate) struct Staged {
    pub run: Run,
    pub data: Vec<u8>,
    budget: Arc<StagingBudget>,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.budget.give_back(self.data.len());
    }
}

/// Staged items of one request, in order.
pub(crate) struct Queue {
    budget: Arc<StagingBudget>,
    /// `None` once the queue is closed.
    items: Mutex<Option<VecDeque<Queued>>>,
    changed: Notify,
}

impl Queue {
    pub fn new(budget: Arc<StagingBudget>) -> Self {
        Self { budget, items: Mutex::new(Some(VecDeque::new())), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<VecDeque<Queued>>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn put_run(&self, run: Run, data: Vec<u8>) {
        self.budget.take(data.len());
        self.put(Queued::Run(Staged { run, data, budget: Arc::clone(&self.budget) }));
    }

    /// Queues the end of the request's units. Nothing may be queued after this end.
    pub fn put_end(&self, hand_over: HandOver, since: Instant) {
        self.put(Queued::End(hand_over, since));
    }

    fn put(&self, item: Queued) {
        let mut items = self.lock();
        // An item for a closed queue is dropped below, after the lock is released, because the drop frees the item's
        // bytes.
        let late = match &mut *items {
            Some(items) => {
                items.push_back(item);
                None
            }
            None => Some(item),
        };
        drop(items);
        drop(late);
        self.changed.notify_one();
    }

    /// Closes the queue and drops its items.
    pub fn close(&self) {
        let left = self.lock().take();
        drop(left);
        self.changed.notify_one();
    }

    /// Waits for the next item. Returns `None` once the queue is closed. Only one task may call this method.
    pub async fn next(&self) -> Option<Queued> {
        loop {
            match self.lock().as_mut() {
                None => return None,
                Some(items) => {
                    if let Some(item) = items.pop_front() {
                        return Some(item);
                    }
                }
            }
            self.changed.notified().await;
        }
    }
}

#[cfg(test)]
mod tests;
