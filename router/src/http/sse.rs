//! Writes a generation as server-sent events.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Serialize;
use tutti_runtime::{Error, request_id::XRequestId};

use super::{answer::LARGE_BYTES, error::ErrorBody};
use crate::generation::{Delta, Generation, GenerationInfo, Generator, Usage};

/// Time without events after which a comment line is sent, so that proxies and clients keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The type of a streamed answer.
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");

/// Writes the chunks of a streamed answer, in the format of one route.
pub trait Render: Send + 'static {
    /// Chunk of a delta; `None` if the delta has nothing that the client requested.
    fn delta(&mut self, info: &GenerationInfo, delta: Delta) -> Option<Frame>;
    /// Chunks sent after all choices have finished.
    fn closing(&mut self, usage: Usage) -> Vec<Frame>;
}

/// One event, as the bytes that are sent.
pub struct Frame(Vec<u8>);

impl Frame {
    /// An event with this value as its data.
    pub fn json(value: &impl Serialize) -> Self {
        let mut frame = b"data: ".to_vec();
        // Serialisation into memory does not fail: all keys are strings, and all numbers are finite.
        if let Err(error) = serde_json::to_writer(&mut frame, value) {
            tracing::error!(%error, "an event does not serialise");
        }
        frame.extend_from_slice(b"\n\n");
        Self(frame)
    }

    /// This event and the next one, which are sent together.
    pub fn then(mut self, next: Self) -> Self {
        self.0.extend_from_slice(&next.0);
        self
    }
}

impl From<Frame> for Bytes {
    fn from(frame: Frame) -> Self {
        frame.0.into()
    }
}

const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");
const COMMENT: Bytes = Bytes::from_static(b": waiting\n\n");

/// A streamed answer in progress.
struct Running<R> {
    generation: Box<Generation>,
    /// `None` while a large chunk is written.
    render: Option<R>,
    generator: Arc<Generator>,
}

/// Streams the generation as an answer. The stream ends with `[DONE]`, or with an error event after a failure.
pub fn respond<R: Render>(generator: Arc<Generator>, generation: Generation, render: R) -> Response {
    let readers = generator.readers().clone();
    let running = Running { generation: Box::new(generation), render: Some(render), generator };
    let frames = stream::unfold((Some(running), VecDeque::new()), |(mut state, mut ready)| async move {
        loop {
            if let Some(bytes) = ready.pop_front() {
                return Some((Ok::<_, io::Error>(bytes), (state, ready)));
            }
            let over = state.as_mut()?.next(&mut ready).await;
            if over {
                // Drops the generation now, and not only after the client has read the last event. The drop cancels the
                // choices that still run.
                state = None;
            }
        }
    });
    let lost = || Err(io::Error::other("the reader takes nothing"));
    let frames = readers.watch(Box::pin(frames), |frame| frame.as_ref().map_or(0, Bytes::len), lost);
    let headers = [
        (header::CONTENT_TYPE, CONTENT_TYPE),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // By default nginx buffers the events. This header turns the buffering off.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(frames)).into_response()
}

impl<R: Render> Running<R> {
    /// Adds the next events to `ready`. Returns true if these events are the stream's last.
    async fn next(&mut self, ready: &mut VecDeque<Bytes>) -> bool {
        match tokio::time::timeout(KEEP_ALIVE, self.generation.next()).await {
            Err(_) => ready.push_back(COMMENT),
            Ok(Some(Ok(delta))) => match self.write(delta).await {
                Ok(frame) => ready.extend(frame),
                Err(error) => {
                    ready.push_back(self.failed(&error));
                    return true;
                }
            },
            Ok(Some(Err(error))) => {
                ready.push_back(self.failed(&error));
                return true;
            }
            Ok(None) => {
                let closing = self.render.as_mut().map(|render| render.closing(self.generation.usage()));
                ready.extend(closing.into_iter().flatten().map(Bytes::from));
                ready.push_back(DONE);
                return true;
            }
        }
        false
    }

    /// The last event of a stream that fails. This runs in the client's stream, outside of the request's span.
    fn failed(&self, error: &Error) -> Bytes {
        let name = self.generation.name();
        name.log.in_scope(|| error_event(error, &name.id))
    }

    /// Writes a delta. A large delta is written in the text pool, within the memory limit of large answers.
    async fn write(&mut self, delta: Delta) -> Result<Option<Bytes>, Error> {
        let info = &self.generation.info;
        let estimate = info.estimate(&delta);
        if estimate <= LARGE_BYTES {
            return Ok(self.render.as_mut().and_then(|render| render.delta(info, delta)).map(Bytes::from));
        }
        let room = self.generator.readers().room(estimate).await?;
        let Some(mut render) = self.render.take() else { return Ok(None) };
        let (info, work) = (info.clone(), info.writing(estimate));
        let write = move || {
            let frame = render.delta(&info, delta);
            (render, frame)
        };
        let (render, frame) = self.generator.on_text(work, write).await?;
        self.render = Some(render);
        Ok(frame.map(|frame| room.hold(frame.0)))
    }
}

/// The last event of the stream of the request with this id, which fails.
pub fn error_event(error: &Error, id: &XRequestId) -> Bytes {
    // Clients cause many such errors by deadlines and disconnects. So metrics count the errors, the access log bounds
    // its lines about them, and this line is at debug level only.
    tracing::debug!(%error, "a stream ends with an error");
    Frame::json(&ErrorBody::new(error, id)).into()
}

/// True if an answer is a stream of events.
pub fn is_stream(response: &Response) -> bool {
    response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == CONTENT_TYPE)
}
