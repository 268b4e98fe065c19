//! The interface between an engine and the transport of its planes to and from other workers.

use std::time::Instant;

use tutti_proto::GraphKey;
use tutti_runtime::Error;
use tutti_scheduler::{OutputToken, TransferError};

/// Carries planes between an engine and other workers. No call blocks. The courier announces later events through the
/// engine's [`Waker`](crate::Waker).
pub trait Courier: Send {
    /// Bytes of pages that the courier accepts now. After it had none, it wakes the engine when it has some.
    fn room(&self) -> usize;
    /// Sends pages or rows of a request. Their content is final.
    fn send(&mut self, run: PageRun);
    /// Ends the pages of a request that continues elsewhere. All of them have been sent.
    fn export(&mut self, key: GraphKey, summary: ExportSummary);
    /// Announces that `count` pages or rows of embeddings are reserved for another worker to fill. The first `known`
    /// units are already valid here and must not be sent.
    fn reserved(&mut self, key: GraphKey, cargo: Cargo, count: usize, known: usize);
    /// Announces that the request has ended here. Nothing more of it is sent or received. The courier may never have
    /// heard of the request.
    fn ended(&mut self, key: GraphKey);
    /// Takes the next arrival from other workers, in order.
    fn take(&mut self) -> Option<Arrival>;
}

/// Kind of data that moves between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cargo {
    /// Pages of a request's planes in the layout of [`PageLayout`](tutti_models::PageLayout).
    Pages,
    /// Embeddings of a request's media: one row per token, in little-endian f32.
    Embeddings,
}

/// Consecutive pages or rows of embeddings of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The request's graph.
    pub key: GraphKey,
    /// Index of the first page or row within the request.
    pub first: usize,
    /// Bytes of one or more whole pages or rows.
    pub data: Vec<u8>,
}

/// End of a prefill or of an encoder's work, as the exporting engine reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// Token sampled after the prefill; the planes do not hold its keys and values. `None` for embeddings.
    pub first: Option<OutputToken>,
    /// Number of tokens whose planes or embeddings were sent.
    pub computed: usize,
    /// Number of pages or rows of embeddings that those tokens take.
    pub pages: usize,
    /// Commit time of the last row. The part of the transfer after it is not hidden behind computation.
    pub since: Instant,
}

/// A request that continues on this engine.
pub struct ImportRequest {
    /// The request's graph here.
    pub key: GraphKey,
    /// Token sampled after the prefill. `None` for embeddings.
    pub first: Option<OutputToken>,
    /// Number of tokens before it.
    pub computed: usize,
    /// Number of pages or rows that the sender has sent.
    pub pages: usize,
    /// Receives the outcome for the sender. After an error, nothing has changed here.
    pub answer: Box<dyn FnOnce(Result<(), Error>) + Send>,
}

/// An event from another worker.
pub enum Arrival {
    /// Pages or rows for a request that has reserved room for them.
    Pages(PageRun),
    /// A request continues here. All of its pages or rows have arrived before.
    Import(ImportRequest),
    /// The other worker has accepted an exported request.
    Accepted(GraphKey),
    /// The request's planes cannot be sent, or will not arrive.
    Failed(GraphKey, TransferError),
}
