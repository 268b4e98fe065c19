//! The id by which a client, all processes and all logs name one request: the value of the header `x-request-id`.
//!
//! A router takes the id from the client, or makes one. It sends the id to conductors, and they to workers, as a field
//! of messages that are sent in any case. Each process writes it in its log lines about the request, as
//! [`FIELD`](XRequestId::FIELD).

mod graphs;

use std::{fmt, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue};

pub(crate) use self::graphs::of_graph;
pub use self::graphs::{forget_graphs, graph_ended, graph_launched};

/// Maximum length of an id in bytes.
const MAX_BYTES: usize = 128;

/// A request's id. Clones share the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XRequestId(Arc<str>);

impl XRequestId {
    /// The header, and the key of gRPC metadata.
    pub const HEADER: HeaderName = HeaderName::from_static("x-request-id");
    /// The field of log lines and spans, and of errors.
    pub const FIELD: &str = "request_id";

    /// An id of a router's own, from random bits.
    pub fn random(bits: u128) -> Self {
        Self(format!("{bits:032x}").into())
    }

    /// Returns the id in a request's headers. `None` if there is none, or if it is not valid.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        Self::parse(headers.get(Self::HEADER)?.to_str().ok()?)
    }

    /// Parses an id: 1 to 128 visible ASCII characters other than quotation marks and backslashes, which log lines
    /// would escape.
    pub fn parse(text: &str) -> Option<Self> {
        let is_valid = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\'' | b'\\');
        ((1..=MAX_BYTES).contains(&text.len()) && text.bytes().all(is_valid)).then(|| Self(text.into()))
    }

    /// The id's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id as a header's value.
    pub fn to_header(&self) -> Option<HeaderValue> {
        HeaderValue::from_str(&self.0).ok()
    }
}

impl fmt::Display for XRequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests;
