//! Server-sent events of a generation.

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

/// How long a connection may be silent: a comment then tells proxies and clients that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Makes a route's chunks.
pub trait Render: Send + 'static {
    /// Chunks sent before any delta.
    fn opening(&mut self, generation: &Generation) -> Vec<Frame>;
    /// The chunks of a delta; none if it has nothing the client asked for.
    fn delta(&mut self, generation: &Generation, delta: Delta) -> Vec<Frame>;
    /// Chunks sent once all choices have finished.
    fn closing(&mut self, generation: &Generation) -> Vec<Frame>;
}

/// One event.
pub struct Frame(Bytes);

impl Frame {
    /// An event with this value as its data.
    pub fn json(value: &impl Serialize) -> Self {
        let mut frame = b"data: ".to_vec();
        // The values are ours, with string keys and numbers that JSON has: writing them to memory does not fail.
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

/// The generation as an answer. It ends with `[DONE]` if all went well, and with an error event if not.
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
                // Whatever still runs is cancelled here, not when the client has read the last event.
                state = State::Over;
            }
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // nginx, by default, would collect the events into larger pieces.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(frames)).into_response()
}

/// The next events, and whether they are the last.
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
