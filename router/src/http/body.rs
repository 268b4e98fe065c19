//! Request bodies: up to a limit each, up to a limit together, and not for ever.

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

/// How many bodies of the largest size may be in memory at once, or smaller ones that come to the same.
const LARGEST_AT_ONCE: usize = 16;
/// Room is counted in pieces of this size.
const PIECE_BYTES: usize = 4096;
/// How long a client may take to send the next piece.
const PATIENCE: Duration = Duration::from_secs(30);
/// How much of a refused body is still taken off the connection, so that a client that sends all before it reads gets
/// the answer instead of a reset, and for how long.
const MAX_DRAIN_BYTES: usize = 256 << 20;
const MAX_DRAIN_TIME: Duration = Duration::from_secs(30);

/// Reads bodies within the limits; clones share the room.
#[derive(Clone)]
pub struct BodyReader {
    limit: usize,
    patience: Duration,
    room: Arc<Semaphore>,
}

/// A body, with its share of the room.
pub struct RequestBody {
    /// The bytes.
    pub bytes: Bytes,
    _room: OwnedSemaphorePermit,
}

impl BodyReader {
    /// A reader of bodies of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        let pieces = limit.div_ceil(PIECE_BYTES).saturating_mul(LARGEST_AT_ONCE);
        Self { limit, patience: PATIENCE, room: Arc::new(Semaphore::new(pieces.min(Semaphore::MAX_PERMITS))) }
    }

    /// Reads a body. A larger one is refused as soon as it is known to be.
    pub async fn read(&self, request: Request) -> Result<RequestBody, Error> {
        let expects_continue = request.headers().contains_key(header::EXPECT);
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared: Option<usize> = declared.and_then(|value| value.to_str().ok()?.parse().ok());
        let mut body = request.into_body().into_data_stream();
        if declared.is_some_and(|length| length > self.limit) {
            // A client that waits for leave to send gets the refusal in its place.
            if !expects_continue {
                drain(body);
            }
            return Err(self.too_large());
        }
        let room = self.take_room(declared.unwrap_or(self.limit))?;
        let mut bytes = Vec::with_capacity(declared.unwrap_or(0));
        while let Some(piece) = timeout(self.patience, body.next()).await.map_err(|_| self.too_slow())? {
            let piece = piece.map_err(|e| broken(format!("could not be read to its end: {e}")))?;
            if bytes.len() + piece.len() > self.limit {
                drain(body);
                return Err(self.too_large());
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(RequestBody { bytes: bytes.into(), _room: room })
    }

    fn take_room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Error> {
        let pieces = u32::try_from(bytes.div_ceil(PIECE_BYTES)).unwrap_or(u32::MAX);
        self.room.clone().try_acquire_many_owned(pieces).map_err(|_| {
            let limit = self.limit.saturating_mul(LARGEST_AT_ONCE);
            let message = format!("the bodies being read come to {limit} bytes, which is the limit");
            Error::overloaded(message, Duration::from_secs(1))
        })
    }

    fn too_slow(&self) -> Error {
        broken(format!("stopped coming: nothing for {:?}", self.patience))
    }

    fn too_large(&self) -> Error {
        let message = format!("the body is over the limit of {} bytes", self.limit);
        Error::new(ErrorKind::TooLarge, message)
    }
}

fn broken(how: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("the body {how}"))
}

/// Throws the rest of a body away while the answer is already on its way.
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
        // Out of time, the body is dropped and the connection with it.
        let _ = timeout(MAX_DRAIN_TIME, all).await;
    });
}

#[cfg(test)]
mod tests;
