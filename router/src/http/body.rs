//! Request bodies, up to a limit.

use std::time::Duration;

use axum::{
    body::{BodyDataStream, Bytes},
    extract::Request,
    http::header,
};
use futures_util::StreamExt;
use tutti_runtime::{Error, ErrorKind};

/// How much of a refused body is still taken off the connection, so that a client that sends all before it reads gets
/// the answer instead of a reset, and for how long.
const MAX_DRAIN_BYTES: usize = 256 << 20;
const MAX_DRAIN_TIME: Duration = Duration::from_secs(30);

/// Reads a body of at most `limit` bytes. A larger one is refused as soon as it is known to be.
pub async fn read(request: Request, limit: usize) -> Result<Bytes, Error> {
    let expects_continue = request.headers().contains_key(header::EXPECT);
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared: Option<usize> = declared.and_then(|value| value.to_str().ok()?.parse().ok());
    let mut body = request.into_body().into_data_stream();
    if declared.is_some_and(|length| length > limit) {
        // A client that waits for leave to send gets the refusal in its place.
        if !expects_continue {
            drain(body);
        }
        return Err(too_large(limit));
    }
    let mut bytes = Vec::with_capacity(declared.unwrap_or(0));
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|e| {
            Error::new(ErrorKind::InvalidArgument, format!("the body could not be read to its end: {e}"))
        })?;
        if bytes.len() + piece.len() > limit {
            drain(body);
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.into())
}

fn too_large(limit: usize) -> Error {
    Error::new(ErrorKind::TooLarge, format!("the body is over the limit of {limit} bytes"))
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
        let _ = tokio::time::timeout(MAX_DRAIN_TIME, all).await;
    });
}
