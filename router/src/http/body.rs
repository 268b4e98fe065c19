//! Reads request bodies within the limits of [`Uploads`].

use std::{net::IpAddr, sync::Arc, time::Duration};

use axum::{
    body::{BodyDataStream, Bytes},
    extract::Request,
    http::{Extensions, header},
};
use futures_util::StreamExt;
use tokio::{
    sync::Semaphore,
    time::{timeout, timeout_at},
};
use tutti_runtime::{Error, serve::Peer};

use crate::uploads::{Upload, Uploads, broken};

/// Size of the first allocation for a body, in bytes. The rest of a larger body is allocated when this many bytes have
/// arrived.
const FIRST_BYTES: usize = 64 << 10;
/// Maximum number of bytes that are read from a refused body and discarded. Without this reading, a client that sends
/// its whole body before it reads the answer would get a connection reset.
const MAX_DRAIN_BYTES: usize = 256 << 20;
/// Maximum time for which a refused body is still read.
const MAX_DRAIN_TIME: Duration = Duration::from_secs(30);
/// Maximum number of refused bodies that are read at once. The connections of further refused bodies are closed.
const MAX_DRAINS: usize = 64;

/// Reads bodies within the limits. Clones share the limits.
#[derive(Clone)]
pub struct BodyReader {
    uploads: Uploads,
    /// One permit per refused body that is still read.
    drains: Arc<Semaphore>,
}

/// A body, with its reservation of memory.
pub struct RequestBody {
    /// The bytes.
    pub bytes: Bytes,
    _upload: Upload,
}

impl BodyReader {
    /// Creates a reader.
    pub fn new(uploads: Uploads) -> Self {
        Self { uploads, drains: Arc::new(Semaphore::new(MAX_DRAINS)) }
    }

    /// Reads a body. A body over the size limit is refused as soon as its size is known. A slow body is refused at its
    /// deadline.
    pub async fn read(&self, request: Request) -> Result<RequestBody, Error> {
        let expects_continue = request.headers().contains_key(header::EXPECT);
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared: Option<usize> = declared.and_then(|value| value.to_str().ok()?.parse().ok());
        let mut upload = self.uploads.begin(peer(request.extensions()));
        let mut body = request.into_body().into_data_stream();
        if declared.is_some_and(|length| length > self.uploads.limit()) {
            // A client that sent `Expect: 100-continue` waits for an answer before it sends the body, so there is
            // nothing to drain.
            if !expects_continue {
                self.drain(body);
            }
            return Err(upload.too_large());
        }
        let mut bytes = Vec::with_capacity(declared.unwrap_or(0).min(FIRST_BYTES));
        while let Some(piece) = timeout_at(upload.due(), body.next()).await.map_err(|_| upload.too_slow())? {
            let piece = piece.map_err(|e| broken(format!("could not be read to its end: {e}")))?;
            if let Err(error) = upload.take(piece.len()) {
                self.drain(body);
                return Err(error);
            }
            if bytes.len() + piece.len() > bytes.capacity() {
                bytes.reserve_exact(declared.unwrap_or(0).saturating_sub(bytes.len()));
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(RequestBody { bytes: bytes.into(), _upload: upload })
    }

    /// Reads and discards the rest of a body while the answer is being sent.
    fn drain(&self, mut body: BodyDataStream) {
        let Ok(permit) = self.drains.clone().try_acquire_owned() else { return };
        tokio::spawn(async move {
            let _permit = permit;
            let all = async {
                let mut left = MAX_DRAIN_BYTES;
                while let Some(Ok(piece)) = body.next().await {
                    left = match left.checked_sub(piece.len()) {
                        Some(left) => left,
                        None => break,
                    };
                }
            };
            // After the timeout the body is dropped, which closes the connection.
            let _ = timeout(MAX_DRAIN_TIME, all).await;
        });
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
