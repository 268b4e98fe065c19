//! Reads request bodies, with limits on the size of each body, on the size of all bodies, and on time.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{BodyDataStream, Bytes},
    extract::Request,
    http::header,
};
use futures_util::StreamExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tutti_runtime::{Error, ErrorKind};

/// Limit of the memory for all bodies together, as a multiple of the maximum size of one body.
const LARGEST_AT_ONCE: usize = 16;
/// Unit of the memory limit, in bytes.
const PIECE_BYTES: usize = 4096;
/// Maximum time that a client may take to send the next part of a body.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum number of bytes of a refused body that are still read. A client that sends its whole body before it reads
/// the answer would otherwise get a connection reset instead of the answer.
const MAX_DRAIN_BYTES: usize = 256 << 20;
/// Maximum time for which a refused body is still read.
const MAX_DRAIN_TIME: Duration = Duration::from_secs(30);

/// Reads bodies within the limits. Clones share the memory limit.
#[derive(Clone)]
pub struct BodyReader {
    /// Maximum size of a body in bytes.
    limit: usize,
    patience: Duration,
    /// One permit per `PIECE_BYTES` of memory.
    memory: Arc<Semaphore>,
}

/// A body, with its permits for memory.
pub struct RequestBody {
    /// The bytes.
    pub bytes: Bytes,
    _memory: OwnedSemaphorePermit,
}

impl BodyReader {
    /// Creates a reader of bodies of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let pieces = limit.div_ceil(PIECE_BYTES).saturating_mul(LARGEST_AT_ONCE);
        Self {
            limit,
            patience: PATIENCE,
            memory: Arc::new(Semaphore::new(pieces.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// Reads a body. A body over the limit is refused as soon as its size is known.
    pub async fn read(&self, request: Request) -> Result<RequestBody, Error> {
        let expects_continue = request.headers().contains_key(header::EXPECT);
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared: Option<usize> = declared.and_then(|value| value.to_str().ok()?.parse().ok());
        let mut body = request.into_body().into_data_stream();
        if declared.is_some_and(|length| length > self.limit) {
            // A client that sent `Expect: 100-continue` waits for an answer before it sends the body, so there is
            // nothing to drain.
            if !expects_continue {
                drain(body);
            }
            return Err(self.too_large());
        }
        let memory = self.reserve(declared.unwrap_or(self.limit))?;
        let mut bytes = Vec::with_capacity(declared.unwrap_or(0));
        while let Some(piece) = timeout(self.patience, body.next()).await.map_err(|_| self.too_slow())? {
            let piece = piece.map_err(|e| broken(format!("could not be read to its end: {e}")))?;
            if bytes.len() + piece.len() > self.limit {
                drain(body);
                return Err(self.too_large());
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(RequestBody { bytes: bytes.into(), _memory: memory })
    }

    fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Error> {
        let pieces = u32::try_from(bytes.div_ceil(PIECE_BYTES)).unwrap_or(u32::MAX);
        self.memory.clone().try_acquire_many_owned(pieces).map_err(|_| {
            let limit = self.limit.saturating_mul(LARGEST_AT_ONCE);
            let message = format!("the bodies being read reach the limit of {limit} bytes");
            Error::overloaded(message, Duration::from_secs(1))
        })
    }

    fn too_slow(&self) -> Error {
        broken(format!("stopped arriving: no data for {:?}", self.patience))
    }

    fn too_large(&self) -> Error {
        let message = format!("the body is over the limit of {} bytes", self.limit);
        Error::new(ErrorKind::TooLarge, message)
    }
}

fn broken(how: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("the body {how}"))
}

/// Reads and discards the rest of a body while the answer is being sent.
fn drain(mut body: BodyDataStream) {
    tokio::spawn(async move {
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

#[cfg(test)]
mod tests;
