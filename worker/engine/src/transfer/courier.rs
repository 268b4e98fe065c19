//! The interface between an engine and the transport of its planes to and from other workers.

use std::time::Instant;

use tutti_proto::{GraphKey, cluster::v1 as pb};
use tutti_runtime::Error;
use tutti_scheduler::{OutputToken, TransferError};

/// Carries pages and embeddings between an engine and other workers. No method blocks, and no method may call
/// [`Waker::wake`](crate::Waker::wake), which takes a lock that the engine holds during the call. The courier's own
/// tasks wake the engine when an event has occurred.
pub trait Courier: Send {
    /// Number of bytes that the courier accepts now, and so does that of any other rank of the group. If the room was
    /// too small, the courier wakes the engine when room becomes free.
    fn room(&self) -> usize;
    /// Sends a run of a request's pages or embedding rows. The content of the run is final.
    fn send(&mut self, run: PageRun);
    /// Sends this rank's share of a run of a request's pages. The other ranks of the group send theirs.
    fn send_share(&mut self, run: PageRun) {
        self.send(run);
    }
    /// Announces that a request continues on another worker. All of its pages or embedding rows have been passed to
    /// [`send`](Self::send).
    fn export(&mut self, key: GraphKey, summary: ExportSummary);
    /// Announces that room for `count` pages or embedding rows is reserved for another worker to fill. The first
    /// `known` pages or rows are already valid here and must not be sent.
    fn reserved(&mut self, key: GraphKey, cargo: Cargo, count: usize, known: usize);
    /// Announces that the request has ended here. No more data of the request is sent or received. The request may be
    /// unknown to the courier.
    fn ended(&mut self, key: GraphKey);
    /// Takes the orders for the couriers of the group's other ranks, in order. They take effect before any page is
    /// copied after this call. If an order comes up outside of this trait's methods, the courier wakes the engine.
    fn orders(&mut self) -> Vec<pb::RankOrder> {
        Vec::new()
    }
    /// Takes the next arrival from other workers, in order of arrival; `None` if there is none now.
    fn take(&mut self) -> Option<Arrival>;
}

/// Kind of data that moves between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cargo {
    /// Pages of a request's planes in the layout of [`PageLayout`](tutti_models::PageLayout).
    Pages,
    /// The state of a request in all slot planes, in the same layout: one unit, which follows the pages in models that
    /// have slot planes.
    Slot,
    /// Embeddings of a request's media: one embedding row per media token, in little-endian f32.
    Embeddings,
}

/// Consecutive pages, or consecutive embedding rows, or the slot of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The request's graph.
    pub key: GraphKey,
    /// Kind of the units in the run.
    pub cargo: Cargo,
    /// Index of the first page or embedding row within the request. 0 for a slot.
    pub first: usize,
    /// Bytes of one or more whole pages or embedding rows, or of one slot. If the transfer is one of shares, the bytes
    /// of this rank's share of each.
    pub data: Vec<u8>,
}

/// Pages or the slot of a request, of which a share waits at another rank of this group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRun {
    /// The rank that holds the share.
    pub rank: usize,
    /// The request's graph.
    pub key: GraphKey,
    /// [`Cargo::Pages`] or [`Cargo::Slot`].
    pub cargo: Cargo,
    /// Index of the first page within the request. 0 for a slot.
    pub first: usize,
    /// Number of pages; 1 for a slot.
    pub count: usize,
}

/// End of a prefill or of an encoder's work, as the exporting engine reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// Token sampled at the end of the prefill. The pages do not hold this token's keys and values. `None` for
    /// embeddings.
    pub first: Option<OutputToken>,
    /// Number of tokens whose keys and values, or embeddings, the other worker now has.
    pub computed: usize,
    /// Number of pages or embedding rows that the `computed` tokens take.
    pub pages: usize,
    /// Number of slots: 1 with pages of a model that has slot planes, else 0.
    pub slots: usize,
    /// Time at which the last step of the prefill or encoding was committed. The part of the transfer after this time
    /// is not hidden behind computation.
    pub since: Instant,
}

/// A request that continues on this engine.
pub struct ImportRequest {
    /// The request's graph here.
    pub key: GraphKey,
    /// Token sampled at the end of the prefill. `None` for embeddings.
    pub first: Option<OutputToken>,
    /// Number of tokens that the sender has computed, not counting `first`.
    pub computed: usize,
    /// Number of pages or embedding rows that the `computed` tokens take, as the sender states it.
    pub pages: usize,
    /// Number of slots, as the sender states it.
    pub slots: usize,
    /// Called with the outcome of the import, which is passed on to the sender. An import that fails changes nothing
    /// here.
    pub answer: Box<dyn FnOnce(Result<(), Error>) + Send>,
}

/// An event from another worker.
pub enum Arrival {
    /// Pages or embedding rows for a request that has reserved room for them.
    Pages(PageRun),
    /// This rank's share of pages or of a slot.
    Share(PageRun),
    /// The share of another rank of this group has arrived there.
    RankShare(RankRun),
    /// A request continues here. All of its pages or embedding rows have arrived before this event. The shares of other
    /// ranks may follow.
    Import(ImportRequest),
    /// The other worker has accepted an exported request.
    Accepted(GraphKey),
    /// The request's planes cannot be sent, or will not arrive.
    Failed(GraphKey, TransferError),
}
