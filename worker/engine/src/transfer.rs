//! Transfer of divided requests: pages and embeddings move from the engine that computes them to the engine that
//! continues.
//!
//! - [`courier`]: trait of the transport between workers.
//! - [`exchange`]: decides which pages are copied and when a request leaves or arrives.
//! - [`embeddings`]: decides the same for embeddings of media, which are not stored in pages.
//! - [`page_copies`]: copies pages between device and host.
//! - [`outgoing`]: requests that leave.
//! - [`incoming`]: requests that arrive, and the received runs.
//! - [`copy_hook`]: runs page copies inside a step, between layers.

mod copy_hook;
mod courier;
mod embeddings;
mod exchange;
mod incoming;
mod outgoing;
mod page_copies;

pub use self::courier::{Arrival, Cargo, Courier, ExportSummary, ImportRequest, PageRun, RankRun};
pub(crate) use self::{
    copy_hook::{CopyHints, CopyHook, IdleModel},
    exchange::{Elsewhere, Exchange, TransferEvents},
    page_copies::PageCopies,
};
