//! The interface between an engine, or a rank that follows a leader, and the transport of units to other workers.

use std::time::Instant;

use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, RankOrder},
};
use tutti_runtime::Error;
use tutti_scheduler::{OutputToken, TransferError};

use crate::{Run, UnitKind};

/// Moves units between this process and others. The engine of a worker, or of a group's leader, decides which runs are
/// sent and where received runs are stored. A rank that follows a leader has a connector, too, and moves its own share
/// by the leader's [orders](Self::order).
///
/// No method blocks. No method may wake the engine, because the engine holds its lock during the call. The connector's
/// own tasks wake the engine when an event has occurred.
///
/// [`StreamConnector`](crate::StreamConnector) moves bytes over streams and shared memory. Other connectors can
/// implement this trait, such as a connector from device to device (CUDA IPC), or a connector that keeps pages in host
/// memory or on a disk. A [`Run`] says which units move; only the connector knows their destination and the transport.
pub trait Connector: Send {
    /// Number of bytes that the connector accepts now, both at this rank and at every other rank of the group. If there
    /// was little room, the connector wakes the engine when bytes become free.
    fn room(&self) -> usize {
        usize::MAX
    }
    /// Sends this rank's part of a run. The content of the units no longer changes.
    fn send(&mut self, run: Run, data: Vec<u8>);
    /// Announces that a request continues on another worker. All of its units have been passed to [`send`](Self::send).
    /// `since` is the time at which the last step of the prefill or encoding was committed. The part of the transfer
    /// after this time is not hidden behind computation.
    fn export(&mut self, key: GraphKey, hand_over: HandOver, since: Instant) {
        let _ = (key, hand_over, since);
    }
    /// Announces that room for `count` pages or embedding rows is reserved for another worker to fill. This worker
    /// already holds the first `known` pages or rows, which must not be sent.
    fn reserve(&mut self, key: GraphKey, kind: UnitKind, count: usize, known: usize) {
        let _ = (key, kind, count, known);
    }
    /// Announces that the request has ended on this worker. No more data of the request is sent or received. The
    /// request may be unknown to the connector.
    fn end(&mut self, key: GraphKey) {
        let _ = key;
    }
    /// Takes the next event, in order of occurrence; `None` if no event is waiting.
    fn next_event(&mut self) -> Option<Event> {
        None
    }
    /// Takes the leader's orders for the connectors of its group's other ranks, in order. The orders take effect before
    /// any page is copied after this call. If an order is made outside of this trait's methods, the connector wakes the
    /// engine.
    fn orders(&mut self) -> Vec<RankOrder> {
        Vec::new()
    }
    /// Takes an order of this rank's leader. An error means that the leader can no longer learn the outcome of this
    /// rank's shares. The error ends the rank.
    fn order(&mut self, order: RankOrder) -> Result<(), String> {
        let _ = order;
        Ok(())
    }
    /// Takes this follower's share of a run. The share has arrived and was reported to the leader. `None` if there is
    /// no such share.
    fn take(&mut self, run: &Run) -> Option<Vec<u8>> {
        let _ = run;
        None
    }
}

/// The connector of a rank whose group exchanges no shares: it sends nothing.
impl Connector for () {
    fn send(&mut self, _: Run, _: Vec<u8>) {}
}

/// The hand-over of a request to another worker, at the end of a prefill or of an encoder's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandOver {
    /// Token sampled at the end of the prefill. The pages do not hold this token's keys and values. `None` for
    /// embeddings.
    pub first: Option<OutputToken>,
    /// Number of tokens whose keys and values, or embeddings, the other worker now has, not counting `first`.
    pub computed: usize,
    /// Number of pages or embedding rows that the `computed` tokens take.
    pub pages: usize,
    /// Number of slots. It is 1 if pages are handed over and the model has planes in slots, and 0 otherwise.
    pub slots: usize,
}

impl HandOver {
    /// Number of units of each kind, in the order of the message field `counts`.
    pub(crate) fn counts(&self) -> Vec<u32> {
        let slots = (self.slots > 0).then_some(self.slots as u32);
        std::iter::once(self.pages as u32).chain(slots).collect()
    }

    pub(crate) fn message(&self) -> pb::HandOver {
        let sampled = |first: OutputToken| pb::SampledToken {
            token_id: first.token,
            index: first.index,
            logprob: None,
        };
        pb::HandOver {
            first: self.first.map(sampled),
            computed_tokens: self.computed as u32,
            counts: self.counts(),
            checksum: 0,
        }
    }

    /// Reads a message. `None` unless the message has counts of one or two kinds of units.
    pub(crate) fn of_message(message: &pb::HandOver) -> Option<Self> {
        let (pages, slots) = match message.counts[..] {
            [pages] => (pages as usize, 0),
            [pages, slots] => (pages as usize, slots as usize),
            _ => return None,
        };
        let first = message.first.as_ref();
        let first = first.map(|first| OutputToken { token: first.token_id, index: first.index });
        Some(Self { first, computed: message.computed_tokens as usize, pages, slots })
    }
}

/// A request that continues on this engine.
pub struct Import {
    /// The request's graph on this worker.
    pub key: GraphKey,
    /// The hand-over, as the sending worker states it.
    pub hand_over: HandOver,
    /// Reports the outcome of the import to the sender. A failed import changes nothing on this engine.
    pub answer: Box<dyn FnOnce(Result<(), Error>) + Send>,
}

/// The rank at which a run has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// This rank. The bytes are the run's units or, in a group, this rank's share of them.
    Here(Vec<u8>),
    /// Another rank of this group, which holds its share.
    Rank(usize),
}

/// An event of a transfer.
pub enum Event {
    /// A run has arrived for a request that has reserved room for the run.
    Arrived(Run, Source),
    /// A request continues on this worker. All pages or embedding rows that come to this rank have arrived before this
    /// event. The shares of other ranks may follow.
    Import(Import),
    /// The other worker has accepted an exported request.
    Accepted(GraphKey),
    /// The request's units cannot be sent, or will not arrive.
    Failed(GraphKey, TransferError),
}
