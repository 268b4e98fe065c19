//! Bodies of requests that were answered before their end, such as those of a refused caller.
//!
//! Over HTTP/1 the next request follows the body on the same connection. A small rest of a body is read and dropped, so
//! that the connection can be used again. Otherwise the answer says `connection: close`: a client that keeps
//! connections open would send its next request to one that ends. The rest is then read while the answer is sent,
//! within bounds, because a client that sends its whole body before it reads would get a connection reset and no
//! answer.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::timeout};

use super::standing::Standing;

/// Maximum rest of a body that is read for the connection's sake, in bytes.
const SMALL_BYTES: usize = 64 << 10;
/// Maximum time for which an answer waits for a small rest. A client sends it at once, if at all.
const SMALL_TIME: Duration = Duration::from_secs(1);
/// Maximum number of bytes that are read while an answer is sent.
const MAX_DRAIN_BYTES: usize = 256 << 20;
/// Maximum number of bytes of a stranger's body that are read while an answer is sent.
const MAX_STRANGER_DRAIN_BYTES: usize = 1 << 20;
/// Maximum time for which a body is read while its answer is sent.
const MAX_DRAIN_TIME: Duration = Duration::from_secs(30);
/// Maximum number of bodies of strangers that are read at once, and the same for known callers. The connections of
/// further ones are closed without a reading.
const MAX_DRAINS: usize = 64;

/// The bodies of one listener that are read while their answers are sent. Clones share the bounds.
#[derive(Clone)]
pub(super) struct Drains {
    known: Arc<Semaphore>,
    strangers: Arc<Semaphore>,
}

impl Drains {
    pub fn new() -> Self {
        let permits = || Arc::new(Semaphore::new(MAX_DRAINS));
        Self { known: permits(), strangers: permits() }
    }

    /// Reads and drops the rest of a body while its answer is sent.
    fn drain(&self, mut body: Body, standing: &Standing) {
        let (permits, bytes) = match standing.is_known() {
            true => (&self.known, MAX_DRAIN_BYTES),
            false => (&self.strangers, MAX_STRANGER_DRAIN_BYTES),
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else { return };
        tokio::spawn(async move {
            let _permit = permit;
            // If the body is dropped before its end, the connection is closed.
            let _ = timeout(MAX_DRAIN_TIME, read(&mut body, bytes)).await;
        });
    }
}

/// The body of one request on its way through the handlers.
pub(super) struct Unread {
    /// The body, once a handler has dropped it before its end.
    returned: Arc<Mutex<Option<Returned>>>,
    version: Version,
    /// True if the client waits until it is asked for the body (RFC 9110 §10.1.1).
    expects_continue: bool,
}

struct Returned {
    body: Body,
    /// True if a handler has asked for a part of the body.
    is_asked: bool,
}

impl Unread {
    /// Lends a request's body to the handlers. `None` if there is no body.
    pub fn lend(request: Request<Body>) -> (Request<Body>, Option<Self>) {
        if request.body().is_end_stream() {
            return (request, None);
        }
        let returned = Arc::default();
        let expects_continue = request.headers().contains_key(header::EXPECT);
        let unread = Self { returned, version: request.version(), expects_continue };
        let returned = unread.returned.clone();
        let request =
            request.map(|body| Body::new(LentBody { body, is_over: false, is_asked: false, returned }));
        (request, Some(unread))
    }

    /// Settles what becomes of the connection once there is an answer.
    pub async fn settle(self, response: &mut Response<Body>, drains: &Drains, standing: &Standing) {
        let Some(Returned { mut body, is_asked }) = self.returned.lock().take() else { return };
        // A client that waits to be asked sends nothing, and one that was too slow sends too little.
        let sends = (is_asked || !self.expects_continue) && response.status() != StatusCode::REQUEST_TIMEOUT;
        if self.version <= Version::HTTP_11 {
            let is_small = body.size_hint().lower() <= SMALL_BYTES as u64;
            if sends && is_small && timeout(SMALL_TIME, read(&mut body, SMALL_BYTES)).await == Ok(true) {
                return;
            }
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if sends {
            drains.drain(body, standing);
        }
    }
}

/// Reads and drops at most about `limit` bytes of a body. Returns true at its end.
async fn read(body: &mut Body, limit: usize) -> bool {
    let mut left = limit;
    while let Some(frame) = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
        let Ok(frame) = frame else { return false };
        match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
            Some(rest) => left = rest,
            None => return false,
        }
    }
    true
}

/// A body that returns to its connection if it is dropped before its end.
struct LentBody {
    body: Body,
    /// True after the end, and after an error.
    is_over: bool,
    is_asked: bool,
    returned: Arc<Mutex<Option<Returned>>>,
}

impl Drop for LentBody {
    fn drop(&mut self) {
        if !self.is_over && !self.body.is_end_stream() {
            let body = std::mem::take(&mut self.body);
            *self.returned.lock() = Some(Returned { body, is_asked: self.is_asked });
        }
    }
}

impl http_body::Body for LentBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.is_asked = true;
        let polled = Pin::new(&mut self.body).poll_frame(context);
        self.is_over |= matches!(&polled, Poll::Ready(None | Some(Err(_))));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
