//! Watches the readers of answers, which are the clients. A reader that stops reading loses its request. The bytes of
//! large answers that wait for their readers are limited.
//!
//! The HTTP server polls a stream for its next item only while the connection has room. So a stream waits for its
//! reader from the time at which it yields an item, or wakes the server for a new item, until the server polls it
//! again. An inspection of all streams at fixed intervals measures this waiting, so that an item costs two counter
//! updates and no clock read.

use std::{
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use axum::body::Bytes;
use futures_util::{Stream, StreamExt, task::AtomicWaker};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tracing::Span;
use tutti_runtime::{
    Error,
    command_line::processes::ROUTER,
    declare_metrics,
    metrics::Metrics,
    output_room::{OutputRoom, OutputRoomMetrics},
};
use tutti_settings::RouterSettings;

/// Unit of the memory limit of large answers, in bytes.
const PIECE_BYTES: usize = 1024;
/// Number of inspections in the time `patience`.
const INSPECTIONS: u32 = 8;

/// Watches readers. Clones share the state.
#[derive(Clone)]
pub struct Readers {
    shared: Arc<Shared>,
}

struct Shared {
    /// Time that a reader may keep its stream waiting, in addition to one second for each `bytes_per_second` bytes
    /// read.
    patience: Duration,
    bytes_per_second: u32,
    /// One permit per `PIECE_BYTES` of large answers that are being written or wait for their readers.
    room: Arc<Semaphore>,
    pieces: u32,
    /// Room for output that is not written yet.
    output: OutputRoom,
    watched: Mutex<Watched>,
    metrics: ReaderMetrics,
}

declare_metrics! {
    struct ReaderMetrics {
        lost: Counter, "readers_lost", "Answers ended because their readers took nothing, or took it too slowly";
    }
}

#[derive(Default)]
struct Watched {
    streams: Vec<Weak<dyn Inspect>>,
    /// True while a task inspects the streams.
    inspecting: bool,
}

impl Readers {
    /// Creates the state, and registers its metric.
    pub fn new(settings: &RouterSettings, metrics: &Metrics) -> Self {
        let pieces = (settings.max_unread_bytes / PIECE_BYTES).clamp(1, Semaphore::MAX_PERMITS);
        let pieces = u32::try_from(pieces).unwrap_or(u32::MAX);
        let shared = Shared {
            patience: settings.reader_timeout(),
            bytes_per_second: settings.reader_bytes_per_second.max(1),
            room: Arc::new(Semaphore::new(pieces as usize)),
            pieces,
            output: OutputRoom::new(
                settings.max_unread_bytes,
                metrics.register_of(ROUTER.name, OutputRoomMetrics::register),
            ),
            watched: Mutex::default(),
            metrics: metrics.register_of(ROUTER.name, ReaderMetrics::register),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Watches the reader of a stream. `bytes` returns the size of an item. When the reader is lost, the stream is
    /// dropped at once, although its server may still wait for the reader. The item from `ending` then ends the watched
    /// stream. Must be called inside a Tokio runtime.
    pub fn watch<S>(
        &self,
        stream: S,
        bytes: fn(&S::Item) -> usize,
        ending: fn() -> S::Item,
    ) -> WatchedStream<S>
    where
        S: Stream + Send + Unpin + 'static,
    {
        let woken = Arc::new(Woken::default());
        let slot = Arc::new(Slot {
            stream: Mutex::new(Some(stream)),
            asked: AtomicU64::new(0),
            waker: woken.clone().into(),
            woken,
            taken: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            inspected: Mutex::default(),
            span: Span::current(),
        });
        let watched: Weak<Slot<S>> = Arc::downgrade(&slot);
        self.enter(watched);
        WatchedStream { slot, bytes, ending }
    }

    fn enter(&self, stream: Weak<dyn Inspect>) {
        let mut watched = self.shared.watched.lock();
        watched.streams.push(stream);
        if !std::mem::replace(&mut watched.inspecting, true) {
            tokio::spawn(inspect(Arc::downgrade(&self.shared)));
        }
    }

    /// The room for the output of all requests that is not written yet.
    pub fn output_room(&self) -> &OutputRoom {
        &self.shared.output
    }

    /// Reserves memory for a large answer of about this many bytes, and waits for the memory if necessary.
    pub async fn room(&self, bytes: usize) -> Result<Room, Error> {
        let shared = &self.shared;
        let pieces = u32::try_from(bytes.div_ceil(PIECE_BYTES)).unwrap_or(u32::MAX).clamp(1, shared.pieces);
        // The wait is twice `patience`: readers that stop reading are lost within that time, and release their memory.
        let acquired = timeout(2 * shared.patience, shared.room.clone().acquire_many_owned(pieces)).await;
        match acquired {
            Ok(Ok(permit)) => Ok(Room(permit)),
            _ => {
                let limit = shared.pieces as usize * PIECE_BYTES;
                let message = format!("answers of {limit} bytes wait for their readers, which is the limit");
                Err(Error::overloaded(message, Duration::from_secs(1)))
            }
        }
    }
}

/// Reserved memory for a large answer.
pub struct Room(OwnedSemaphorePermit);

impl Room {
    /// Attaches the reservation to the answer's bytes. The reservation is released when the bytes are dropped after
    /// they are written to the connection. Memory that the answer does not need is released now.
    pub fn hold(self, bytes: Vec<u8>) -> Bytes {
        let mut permit = self.0;
        let unneeded = permit.num_permits().saturating_sub(bytes.len().div_ceil(PIECE_BYTES));
        drop(permit.split(unneeded));
        Bytes::from_owner(Held { bytes, _permit: permit })
    }
}

struct Held {
    bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A stream whose reader is watched.
pub struct WatchedStream<S: Stream> {
    slot: Arc<Slot<S>>,
    bytes: fn(&S::Item) -> usize,
    ending: fn() -> S::Item,
}

struct Slot<S> {
    /// `None` after the end, and once the reader is lost.
    stream: Mutex<Option<S>>,
    /// Number of times that the server has polled for an item.
    asked: AtomicU64,
    woken: Arc<Woken>,
    /// Waker of `woken`, made once for all polls.
    waker: Waker,
    /// Number of bytes of the items that the server has taken.
    taken: AtomicU64,
    /// True once the reader is lost, until its stream has reported the loss.
    lost: AtomicBool,
    inspected: Mutex<Inspected>,
    /// The span in which the stream began, for the log line about a lost reader.
    span: Span,
}

/// Forwards a stream's wake-ups to its server, and records them.
#[derive(Default)]
struct Woken {
    /// True if the server has taken an item, or was woken for one, and has not polled since.
    waits: AtomicBool,
    server: AtomicWaker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.waits.store(true, Relaxed);
        self.server.wake();
    }
}

/// Results of the inspections of one stream.
#[derive(Default)]
struct Inspected {
    /// The value of `asked` at the last inspection.
    asked: u64,
    /// Time for which the stream has waited for its reader.
    waited: Duration,
}

impl<S: Stream + Unpin> Stream for WatchedStream<S> {
    type Item = S::Item;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let slot = &*self.slot;
        slot.asked.fetch_add(1, Relaxed);
        slot.woken.waits.store(false, Relaxed);
        slot.woken.server.register(context.waker());
        let mut held = slot.stream.lock();
        let Some(stream) = held.as_mut() else {
            return Poll::Ready(slot.lost.swap(false, Relaxed).then(self.ending));
        };
        let item = std::task::ready!(stream.poll_next_unpin(&mut Context::from_waker(&slot.waker)));
        match &item {
            Some(item) => {
                slot.taken.fetch_add((self.bytes)(item) as u64, Relaxed);
                slot.woken.waits.store(true, Relaxed);
            }
            None => *held = None,
        }
        Poll::Ready(item)
    }
}

/// A stream under inspection.
trait Inspect: Send + Sync {
    /// Adds `interval` to the stream's waiting time if the stream has waited since the last inspection. Returns true if
    /// the reader is lost now.
    fn inspect(&self, interval: Duration, limits: &Shared) -> bool;

    /// The span of the stream's request.
    fn span(&self) -> &Span;
}

impl<S: Send> Inspect for Slot<S> {
    fn inspect(&self, interval: Duration, limits: &Shared) -> bool {
        let mut inspected = self.inspected.lock();
        let asked = self.asked.load(Relaxed);
        if std::mem::replace(&mut inspected.asked, asked) != asked || !self.woken.waits.load(Relaxed) {
            return false;
        }
        inspected.waited += interval;
        let earned = self.taken.load(Relaxed) / u64::from(limits.bytes_per_second);
        if inspected.waited <= limits.patience + Duration::from_secs(earned) {
            return false;
        }
        // A locked stream is being polled now, so it does not wait for its reader.
        let Some(mut stream) = self.stream.try_lock() else { return false };
        self.lost.store(true, Relaxed);
        stream.take().is_some()
    }

    fn span(&self) -> &Span {
        &self.span
    }
}

/// Inspects all streams at intervals, until there are none.
async fn inspect(shared: Weak<Shared>) {
    loop {
        let Some(interval) = shared.upgrade().map(|shared| shared.patience / INSPECTIONS) else { return };
        tokio::time::sleep(interval.max(Duration::from_millis(1))).await;
        let Some(shared) = shared.upgrade() else { return };
        // The streams are collected, so that none of them is dropped while the list is locked.
        let streams: Vec<Arc<dyn Inspect>> = {
            let mut watched = shared.watched.lock();
            watched.streams.retain(|stream| stream.strong_count() > 0);
            if watched.streams.is_empty() {
                watched.inspecting = false;
                return;
            }
            watched.streams.iter().filter_map(Weak::upgrade).collect()
        };
        for stream in streams {
            if stream.inspect(interval, &shared) {
                shared.metrics.lost.inc();
                stream.span().in_scope(|| {
                    tracing::debug!("the reader of an answer takes nothing, or too little: its request ends");
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
