//! The facts of a request besides its content, which HTTP and gRPC collect on arrival.

use axum::http::{Extensions, HeaderMap};
use tutti_runtime::trace::ClientSpan;

use crate::{access::RequestRecord, keys::Entry};

/// A request's arrival at a surface.
pub struct Arrival {
    /// The request's part of its caller's limits.
    pub entry: Entry,
    /// The client's own trace span, if its headers name one.
    pub client: Option<ClientSpan>,
    /// The request's record.
    pub record: RequestRecord,
}

impl Arrival {
    /// Reads the headers of a request, or the metadata of a gRPC call, and what admission has put into its extensions.
    pub fn of(headers: &HeaderMap, extensions: &Extensions) -> Self {
        Self {
            entry: Entry::of(extensions),
            client: ClientSpan::of(headers),
            record: RequestRecord::of(extensions),
        }
    }
}
