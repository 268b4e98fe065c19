//! Ends running requests whose key is revoked, if the setting `revoked_requests` says so.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::{Bytes, HttpBody};
use futures_util::future::BoxFuture;
use http_body::{Frame, SizeHint};
use tokio::sync::watch;
use tutti_runtime::{Error, ErrorKind};

/// The state of a key: accepted, or revoked for ever.
#[derive(Debug)]
pub struct Revocation(watch::Sender<bool>);

impl Default for Revocation {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Revocation {
    /// Revokes the key.
    pub fn revoke(&self) {
        self.0.send_replace(true);
    }

    /// Completes once the key is revoked.
    pub fn revoked(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut state = self.0.subscribe();
        async move {
            // An error means that the key was dropped without being revoked, so the future never completes.
            if state.wait_for(|revoked| *revoked).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// The error of a request that ends because its key is revoked.
pub fn error() -> Error {
    Error::new(ErrorKind::Unauthenticated, "the API key of this request is no longer accepted")
}

/// A body that ends early when its request's key is revoked. A last frame then tells the client the reason.
pub struct RevocableBody<B> {
    body: B,
    /// A future that completes when the request must end; `None` once the future has completed.
    revoked: Option<BoxFuture<'static, ()>>,
    last: Option<Frame<Bytes>>,
}

impl<B> RevocableBody<B> {
    /// Wraps a body. `last` is the last frame if the body ends early.
    pub fn new(body: B, revoked: BoxFuture<'static, ()>, last: Frame<Bytes>) -> Self {
        Self { body, revoked: Some(revoked), last: Some(last) }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for RevocableBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Some(revoked) = &mut self.revoked else { return Poll::Ready(None) };
        if revoked.as_mut().poll(context).is_ready() {
            self.revoked = None;
            return Poll::Ready(self.last.take().map(Ok));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.revoked.is_none() || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
