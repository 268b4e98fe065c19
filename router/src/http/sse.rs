//! Writes a generation as server-sent events.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Serialize;
use tutti_runtime::Error;

use super::error::ErrorBody;
use crate::generation::{Delta, Generation};

/// Time without events after which a comment line is sent, so that proxies and clients keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Writes the chunks of a streamed answer, in the format of one route.
pub trait Render: Send + 'static {
    /// Chunks sent before the first delta.
    fn opening(&mut self, generation: &Generation) -> Vec<Frame>;
    /// Chunks of a delta; empty if the delta has nothing that the client requested.
    fn delta(&mut self, generation: &Generation, delta: Delta) -> Vec<Frame>;
    /// Chunks sent after all choices have finished.
    fn closing(&mut self, generation: &Generation) -> Vec<Frame>;
}

/// One event, as the bytes that are sent.
pub struct Frame(Bytes);

impl Frame {
    /// An event with this value as its data.
    pub fn json(value: &impl Serialize) -> Self {
        let mut frame = b"data: ".to_vec();
        // Serialisation into memory does not fail: all keys are strings, and all numbers are finite.
        if let Err(error) = serde_json::to_writer(&mut frame, value) {
            tracing::error!(%error, "an event does not serialise");
        }
        frame.extend_from_slice(b"\n\n");
        Self(frame.into())
    }
}

const DONE: Frame = Frame(Bytes::from_static(b"data: [DONE]\n\n"));
const COMMENT: Frame = Frame(Bytes::from_static(b": waiting\n\n"));

enum State<R> {
    Running(Box<Generation>, R),
    Over,
}

/// Streams the generation as an answer. The stream ends with `[DONE]`, or with an error event after a failure.
pub fn respond<R: Render>(generation: Generation, mut render: R) -> Response {
    let opening = VecDeque::from(render.opening(&generation));
    let start = (State::Running(Box::new(generation), render), opening);
    let frames = stream::unfold(start, |(mut state, mut ready)| async move {
        loop {
            if let Some(Frame(bytes)) = ready.pop_front() {
                return Some((Ok::<_, Infallible>(bytes), (state, ready)));
            }
            let State::Running(generation, render) = &mut state else { return None };
            let (frames, over) = next(generation, render).await;
            ready.extend(frames);
            if over {
                // The new state drops the generation now, which cancels the running choices before the client reads the
                // last event.
                state = State::Over;
            }
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // By default nginx buffers the events. This header turns the buffering off.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(frames)).into_response()
}

/// Returns the next events, and true if these events are the stream's last.
async fn next(generation: &mut Generation, render: &mut impl Render) -> (Vec<Frame>, bool) {
    match tokio::time::timeout(KEEP_ALIVE, generation.next()).await {
        Err(_) => (vec![COMMENT], false),
        Ok(Some(Ok(delta))) => (render.delta(generation, delta), false),
        Ok(Some(Err(error))) => (vec![failed(&error)], true),
        Ok(None) => {
            let mut frames = render.closing(generation);
            frames.push(DONE);
            (frames, true)
        }
    }
}

fn failed(error: &Error) -> Frame {
    tracing::warn!(%error, "a stream ends with an error");
    Frame::json(&ErrorBody::from(error))
}
