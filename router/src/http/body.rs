//! Reads request bodies within the limits of [`Uploads`].

use std::net::IpAddr;

use axum::{
    body::Bytes,
    extract::Request,
    http::{Extensions, header},
};
use futures_util::StreamExt;
use tokio::time::timeout_at;
use tutti_runtime::{Error, serve::Peer};

use crate::uploads::{Upload, Uploads, broken};

/// Size of the first allocation for a body, in bytes. The rest of a larger body is allocated when this many bytes have
/// arrived.
const FIRST_BYTES: usize = 64 << 10;

/// Reads bodies within the limits. Clones share the limits.
#[derive(Clone)]
pub struct BodyReader {
    uploads: Uploads,
}

/// A body, with its reservation of memory.
pub struct RequestBody {
    /// The bytes.
    pub bytes: Bytes,
    /// The reservation, which ends when it is dropped.
    pub upload: Upload,
}

impl BodyReader {
    /// Creates a reader.
    pub fn new(uploads: Uploads) -> Self {
        Self { uploads }
    }

    /// Maximum size of a body in bytes.
    pub fn limit(&self) -> usize {
        self.uploads.limit()
    }

    /// Reads a body. A body over the size limit is refused as soon as its size is known. A slow body is refused at its
    /// deadline.
    pub async fn read(&self, request: Request) -> Result<RequestBody, Error> {
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared: Option<usize> = declared.and_then(|value| value.to_str().ok()?.parse().ok());
        let mut upload = self.uploads.begin(peer(request.extensions()));
        let mut body = request.into_body().into_data_stream();
        if declared.is_some_and(|length| length > self.uploads.limit()) {
            return Err(upload.too_large());
        }
        let mut bytes = Vec::with_capacity(declared.unwrap_or(0).min(FIRST_BYTES));
        while let Some(piece) = timeout_at(upload.due(), body.next()).await.map_err(|_| upload.too_slow())? {
            let piece = piece.map_err(|e| broken(format!("could not be read to its end: {e}")))?;
            upload.take(piece.len())?;
            if bytes.len() + piece.len() > bytes.capacity() {
                bytes.reserve_exact(declared.unwrap_or(0).saturating_sub(bytes.len()));
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(RequestBody { bytes: bytes.into(), upload })
    }
}

/// The address of the peer, which the server puts into a request's extensions. `None` for a Unix socket.
fn peer(extensions: &Extensions) -> Option<IpAddr> {
    match extensions.get::<Peer>() {
        Some(Peer::Ip(address)) => Some(*address),
        Some(Peer::Local) | None => None,
    }
}

#[cfg(test)]
mod tests;
