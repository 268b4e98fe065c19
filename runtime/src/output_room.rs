//! The room of a process for output that waits for its readers: one bound in bytes for all requests together.
//!
//! Each request holds a part of the room. Where a request's output finds the room full, the request that holds most of
//! it ends, which is the one whose reader is slowest, until the rest fits. All others go on. The count of a part is two
//! additions; the parts are searched only when the room is full.

use std::{
    collections::HashMap,
    fmt, mem,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use tutti_proto::cluster::v1 as pb;

use crate::{Error, ErrorKind, declare_metrics};

/// The room of a process. Clones share it.
#[derive(Clone, Debug)]
pub struct OutputRoom(Arc<Room>);

#[derive(Debug)]
struct Room {
    limit: usize,
    /// Bytes of all parts, except those whose requests have been ended.
    held: AtomicUsize,
    parts: Mutex<HashMap<u64, Weak<RequestOutput>>>,
    next: AtomicU64,
    metrics: OutputRoomMetrics,
}

declare_metrics! {
    /// Metrics of the room.
    #[derive(Clone, Debug, Default)]
    pub struct OutputRoomMetrics {
        held: Gauge, "unread_output_bytes", "Bytes of output that wait for their readers";
        ended: Counter, "unread_output_ended",
            "Requests ended because they held most of the room for output when it was full";
    }
}

/// The part of one request. Dropping it gives its room back.
#[derive(Clone)]
pub struct HeldOutput {
    part: Arc<RequestOutput>,
}

struct RequestOutput {
    room: Arc<Room>,
    key: u64,
    bytes: AtomicUsize,
    is_ended: AtomicBool,
    /// Drops the request's output. It is called once, when the room is full and this part is the largest.
    end: Box<dyn Fn(Error) + Send + Sync>,
}

/// A room without a limit.
impl Default for OutputRoom {
    fn default() -> Self {
        Self::new(usize::MAX, OutputRoomMetrics::default())
    }
}

impl OutputRoom {
    /// A room for this many bytes.
    pub fn new(limit: usize, metrics: OutputRoomMetrics) -> Self {
        let (held, parts, next) = (AtomicUsize::new(0), Mutex::default(), AtomicU64::new(0));
        Self(Arc::new(Room { limit, held, parts, next, metrics }))
    }

    /// The part of a new request, empty at first. `end` ends the request and drops its output; it is called with no
    /// lock held.
    pub fn enter(&self, end: impl Fn(Error) + Send + Sync + 'static) -> HeldOutput {
        let room = self.0.clone();
        let key = room.next.fetch_add(1, Relaxed);
        let (bytes, is_ended) = (AtomicUsize::new(0), AtomicBool::new(false));
        let part = Arc::new(RequestOutput { room: room.clone(), key, bytes, is_ended, end: Box::new(end) });
        room.parts.lock().insert(key, Arc::downgrade(&part));
        HeldOutput { part }
    }
}

impl HeldOutput {
    /// Adds output of this many bytes. If the room is full then, the requests with the largest parts end, which may be
    /// this one.
    pub fn add(&self, bytes: usize) {
        let RequestOutput { room, .. } = &*self.part;
        if self.is_ended() {
            return;
        }
        self.part.bytes.fetch_add(bytes, Relaxed);
        let held = room.held.fetch_add(bytes, Relaxed) + bytes;
        room.metrics.held.inc_by(bytes as i64);
        if held > room.limit {
            room.end_largest();
        }
    }

    /// Gives back the room of output that its reader has taken.
    pub fn remove(&self, bytes: usize) {
        if !self.is_ended() {
            self.part.give_back(|held| bytes.min(held));
        }
    }

    /// True if the request has been ended because of this part.
    pub fn is_ended(&self) -> bool {
        self.part.is_ended.load(Relaxed)
    }

    /// The error of a request that has been ended because of this part.
    pub fn error(&self) -> Option<Error> {
        self.is_ended().then(|| self.part.room.error())
    }
}

impl fmt::Debug for HeldOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldOutput").field("bytes", &self.part.bytes).finish_non_exhaustive()
    }
}

impl fmt::Debug for RequestOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestOutput").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl RequestOutput {
    /// Takes bytes off the part: those that `amount` returns for what it holds.
    fn give_back(&self, amount: impl Fn(usize) -> usize) {
        let mut taken = 0;
        let _ = self.bytes.fetch_update(Relaxed, Relaxed, |held| {
            taken = amount(held);
            Some(held - taken)
        });
        self.room.held.fetch_sub(taken, Relaxed);
        self.room.metrics.held.dec_by(taken as i64);
    }
}

impl Drop for RequestOutput {
    fn drop(&mut self) {
        self.give_back(|held| held);
        self.room.parts.lock().remove(&self.key);
    }
}

impl Room {
    /// Ends the requests with the largest parts until the rest is within the limit.
    fn end_largest(&self) {
        // A part that is dropped takes the lock, so the parts are kept until after it.
        let mut parts: Vec<Arc<RequestOutput>> =
            self.parts.lock().values().filter_map(Weak::upgrade).collect();
        parts.sort_unstable_by_key(|part| part.bytes.load(Relaxed));
        while self.held.load(Relaxed) > self.limit {
            let Some(largest) = parts.pop() else { return };
            if largest.is_ended.swap(true, Relaxed) {
                continue;
            }
            largest.give_back(|held| held);
            self.metrics.ended.inc();
            tracing::debug!("the room for unread output is full: the request that holds most of it ends");
            (largest.end)(self.error());
        }
    }

    fn error(&self) -> Error {
        let message = format!(
            "the output that waits for its readers is over the limit of {} bytes, and this request has most of it \
             (see max_unread_bytes)",
            self.limit
        );
        Error::new(ErrorKind::TooSlow, message)
    }
}

/// Memory of an output token with this logprob, in bytes.
pub fn output_bytes(logprob: Option<&pb::TokenLogprob>) -> usize {
    let top = logprob.map_or(0, |logprob| logprob.top.len());
    size_of::<pb::SampledToken>() + top * size_of::<pb::TopLogprob>()
}

/// Memory of output tokens, in bytes.
pub fn token_bytes(tokens: &[pb::SampledToken]) -> usize {
    tokens.iter().map(|token| output_bytes(token.logprob.as_ref())).sum()
}

/// Memory of the logprobs of prompt tokens, in bytes.
pub fn logprob_bytes(logprobs: &[pb::TokenLogprob]) -> usize {
    let top = logprobs.iter().map(|logprob| logprob.top.len());
    mem::size_of_val(logprobs) + top.sum::<usize>() * size_of::<pb::TopLogprob>()
}

#[cfg(test)]
mod tests;
