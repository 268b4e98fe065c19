//! The facts of a request besides its content, which HTTP and gRPC collect on arrival.

use axum::http::{Extensions, HeaderMap};
use tutti_runtime::{serve::Peer, trace::ClientSpan};

use crate::{
    access::RequestRecord,
    keys::{Entry, Share},
    uploads::Upload,
};

/// A request's arrival at a surface.
pub struct Arrival {
    /// The request's part of its caller's limits.
    pub entry: Entry,
    /// The client's own trace span, if its headers name one.
    pub client: Option<ClientSpan>,
    /// The request's record.
    pub record: RequestRecord,
    /// The share of the key or, without one, of the address.
    pub share_of_checks: Share,
    /// The memory of the request's body, if the body is large. It is given back when the request no longer needs it.
    pub upload: Option<Upload>,
}

impl Arrival {
    /// Reads the headers of a request, or the metadata of a gRPC call, and what admission has put into its extensions.
    pub fn of(headers: &HeaderMap, extensions: &Extensions) -> Self {
        let entry = Entry::of(extensions);
        let share_of_checks = match (entry.share(), extensions.get::<Peer>()) {
            (Share::WITHOUT_KEY, Some(Peer::Ip(address))) => Share::of_address(*address),
            (share, _) => share,
        };
        Self {
            entry,
            client: ClientSpan::of(headers),
            record: RequestRecord::of(extensions),
            share_of_checks,
            upload: None,
        }
    }
}

#[cfg(test)]
mod tests;
