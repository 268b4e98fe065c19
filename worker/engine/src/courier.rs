//! The seam between an engine and whoever carries its planes to and from other workers.

use std::time::Instant;

use tutti_proto::GraphKey;
use tutti_runtime::Error;
use tutti_scheduler::{OutputToken, TransferError};

/// Carries planes off the engine's thread. No call waits for anything; whatever comes later is announced by the engine's
/// [`Waker`](crate::Waker).
pub trait Courier: Send {
    /// Bytes of pages that it takes now. It rings when there is room again after there was none.
    fn room(&self) -> usize;
    /// Takes pages of a request that is prefilled here. They are whole: nothing will change them.
    fn send(&mut self, run: PageRun);
    /// All pages of the request have been sent; it goes on elsewhere.
    fn export(&mut self, key: GraphKey, summary: ExportSummary);
    /// Room for so many pages, or rows of embeddings, that another worker is to fill is held; the first `known` of them need
    /// not be, and must not.
    fn reserved(&mut self, key: GraphKey, cargo: Cargo, count: usize, known: usize);
    /// The request has ended here, for whatever reason: nothing of it is to be sent or taken any more. Also told of requests
    /// that the courier has never heard of.
    fn ended(&mut self, key: GraphKey);
    /// What has come from elsewhere, in order.
    fn take(&mut self) -> Option<Arrival>;
}

/// What goes from worker to worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cargo {
    /// Pages of a request's planes, as [`PageLayout`](tutti_models::PageLayout) has them.
    Pages,
    /// Embeddings of a request's media, a row for each token, in little-endian f32.
    Embeddings,
}

/// Some of a request's pages, or of its rows of embeddings, as they travel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Whose.
    pub key: GraphKey,
    /// The place of the first one in the request.
    pub first: usize,
    /// One or more whole pages or rows.
    pub data: Vec<u8>,
}

/// Where a prefill, or an encoder's work, ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// Sampled after the prefill; its keys and values are not among the planes. None behind embeddings.
    pub first: Option<OutputToken>,
    /// Tokens whose planes or embeddings were sent.
    pub computed: usize,
    /// Pages, or rows, that they take.
    pub pages: usize,
    /// When the last row was committed: what the transfer takes from then on was not hidden behind it.
    pub since: Instant,
}

/// A request that is to go on here.
pub struct ImportRequest {
    /// Whose.
    pub key: GraphKey,
    /// Sampled after the prefill. None behind embeddings.
    pub first: Option<OutputToken>,
    /// Tokens before it.
    pub computed: usize,
    /// Pages, or rows, that the sender has sent.
    pub pages: usize,
    /// Takes the outcome for the sender; nothing has changed if that is an error.
    pub answer: Box<dyn FnOnce(Result<(), Error>) + Send>,
}

/// What a courier brings.
pub enum Arrival {
    /// Pages or rows for a request that room is held for here.
    Pages(PageRun),
    /// A request goes on here behind its pages or rows, all of which have been brought before.
    Import(ImportRequest),
    /// The other side has taken over what was handed over.
    Accepted(GraphKey),
    /// The planes of this request will not come, or cannot be sent.
    Failed(GraphKey, TransferError),
}
