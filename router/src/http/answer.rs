//! Sends an answer that is not streamed. A large answer is written in the text pool. Its memory counts towards the
//! limit of all large answers until the client has read it.

use std::io;

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use tutti_runtime::Error;

use super::Api;
use crate::text::pool::TextWork;

/// Size in bytes above which an answer is large.
pub const LARGE_BYTES: usize = 64 << 10;
/// Size in bytes of the pieces in which a large answer is passed to its connection.
const PIECE_BYTES: usize = 64 << 10;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Sends the JSON that `write` returns. `work.bytes` is the approximate size of the JSON.
pub async fn send(
    api: &Api,
    work: TextWork,
    write: impl FnOnce() -> Result<Vec<u8>, Error> + Send + 'static,
) -> Result<Response, Error> {
    if work.bytes <= LARGE_BYTES {
        return Ok(([(header::CONTENT_TYPE, JSON)], write()?).into_response());
    }
    let room = api.generator.readers().room(work.bytes).await?;
    let bytes = room.hold(api.generator.on_text(work, write).await??);
    let headers = [(header::CONTENT_TYPE, JSON), (header::CONTENT_LENGTH, HeaderValue::from(bytes.len()))];
    let pieces = stream::unfold(bytes, |mut rest| {
        let piece = rest.split_to(rest.len().min(PIECE_BYTES));
        std::future::ready((!piece.is_empty()).then_some((Ok::<_, io::Error>(piece), rest)))
    });
    let lost = || Err(io::Error::other("the reader takes nothing"));
    let watched =
        api.generator.readers().watch(Box::pin(pieces), |piece| piece.as_ref().map_or(0, Bytes::len), lost);
    Ok((headers, Body::from_stream(watched)).into_response())
}

/// Writes a value as JSON.
pub fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(value).map_err(|e| Error::internal(format!("an answer does not serialise: {e}")))
}
