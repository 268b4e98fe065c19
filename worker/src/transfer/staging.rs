//! Pages that wait to be sent: the bounded store between the engine's thread and the tasks that push.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;
use tutti_engine::{Waker, ExportSummary, PageRun};

/// Bytes that may be staged, of all requests together; and a page, however large.
pub(super) const STAGED_BYTES: usize = 64 << 20;
/// With less than this the engine may have found too little.
const ENOUGH: usize = 16 << 20;

/// The room that all requests share.
pub(super) struct StagingBudget {
    bytes: usize,
    used: AtomicUsize,
    /// The engine has asked and may have found too little.
    wanted: AtomicBool,
    freed: Notify,
}

impl StagingBudget {
    pub fn new(page_bytes: usize) -> Self {
        let bytes = STAGED_BYTES.max(page_bytes);
        Self { bytes, used: AtomicUsize::new(0), wanted: AtomicBool::new(false), freed: Notify::new() }
    }

    /// Rings whenever there is room for whoever found too little; runs for ever. A task of its own, since room is also given
    /// back inside the engine's own calls.
    pub async fn wake_when_freed(self: Arc<Self>, waker: Waker) {
        loop {
            self.freed.notified().await;
            waker.wake();
        }
    }

    /// Bytes that are left.
    pub fn left(&self) -> usize {
        // Before the answer, so that what is given back from here on rings.
        self.wanted.store(true, Ordering::SeqCst);
        let left = self.bytes.saturating_sub(self.used.load(Ordering::SeqCst));
        if left >= ENOUGH {
            self.wanted.store(false, Ordering::SeqCst);
        }
        left
    }

    fn take(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::SeqCst);
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if self.wanted.swap(false, Ordering::SeqCst) {
            self.freed.notify_one();
        }
    }
}

/// What is to be pushed of one request, in order.
pub(super) enum Parcel {
    Pages(Staged),
    End(ExportSummary),
}

/// Pages that take room until they are dropped.
pub(super) struct Staged {
    pub run: PageRun,
    budget: Arc<StagingBudget>,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.budget.give_back(self.run.data.len());
    }
}

/// One request's share.
pub(super) struct Queue {
    budget: Arc<StagingBudget>,
    /// None once the request has ended here.
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

    /// Nothing may follow.
    pub fn put_end(&self, summary: ExportSummary) {
        self.put(Parcel::End(summary));
    }

    fn put(&self, parcel: Parcel) {
        let mut parcels = self.lock();
        // What comes after the end takes no room: it is dropped here, outside of the lock.
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

    /// The request has ended here: what is left is dropped.
    pub fn close(&self) {
        let left = self.lock().take();
        drop(left);
        self.changed.notify_one();
    }

    /// The next one, once it is there; none once the request has ended here. For one task alone.
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
mod tests {
    use tutti_proto::cluster::v1 as pb;

    use super::*;

    fn run(bytes: usize) -> PageRun {
        PageRun { key: pb::GraphKey::default().into(), first: 0, data: vec![0; bytes] }
    }

    #[tokio::test]
    async fn room_is_taken_until_pages_have_been_sent_or_dropped() {
        let budget = Arc::new(StagingBudget::new(16));
        let queue = Queue::new(Arc::clone(&budget));
        queue.put_pages(run(1000));
        queue.put_pages(run(24));
        assert_eq!(budget.left(), STAGED_BYTES - 1024);
        let parcel = queue.next().await;
        assert_eq!(budget.left(), STAGED_BYTES - 1024, "it is on its way");
        drop(parcel);
        assert_eq!(budget.left(), STAGED_BYTES - 24);
        queue.close();
        queue.put_pages(run(8));
        assert_eq!(budget.left(), STAGED_BYTES);
        assert!(queue.next().await.is_none());
    }
}
