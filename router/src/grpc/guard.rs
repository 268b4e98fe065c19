//! A layer before a gRPC service: the messages that it receives share the room of HTTP bodies.

use std::{
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::Bytes,
    extract::ConnectInfo,
    http::{Extensions, Request, Response},
};
use futures_util::future::BoxFuture;
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::{Sleep, sleep_until};
use tonic::{Status, body::Body, server::NamedService, transport::server::TcpConnectInfo};
use tower::Service;

use crate::uploads::{Upload, Uploads};

/// Room of the message of a call, which the call's handler keeps for as long as it works on the message.
#[derive(Clone)]
pub struct MessageRoom {
    _upload: Arc<Mutex<Upload>>,
}

/// A service whose messages take room as they arrive, and must arrive at the pace of HTTP bodies.
#[derive(Clone)]
pub struct Guarded<S> {
    inner: S,
    uploads: Uploads,
}

impl<S> Guarded<S> {
    /// Guards a service.
    pub fn new(inner: S, uploads: Uploads) -> Self {
        Self { inner, uploads }
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Future: Send + 'static>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let upload = Arc::new(Mutex::new(self.uploads.begin(peer(&parts.extensions))));
        parts.extensions.insert(MessageRoom { _upload: upload.clone() });
        let body = Body::new(MeteredBody { inner: body, upload, due: None });
        Box::pin(self.inner.call(Request::from_parts(parts, body)))
    }
}

fn peer(extensions: &Extensions) -> Option<IpAddr> {
    let of_server = || extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
    let peer = extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0).or_else(of_server);
    peer.map(|address| address.ip())
}

/// A request's body that takes room as its bytes arrive, and fails when it is due.
struct MeteredBody {
    inner: Body,
    upload: Arc<Mutex<Upload>>,
    /// Timer, made when the body first has to wait.
    due: Option<Pin<Box<Sleep>>>,
}

impl http_body::Body for MeteredBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                let taken = this.upload.lock().take(bytes);
                Poll::Ready(Some(taken.map(|()| frame).map_err(Status::from)))
            }
            Poll::Ready(other) => Poll::Ready(other),
            Poll::Pending => {
                let due = this.upload.lock().due();
                let timer = this.due.get_or_insert_with(|| Box::pin(sleep_until(due)));
                if timer.deadline() != due {
                    timer.as_mut().reset(due);
                }
                std::task::ready!(timer.as_mut().poll(context));
                Poll::Ready(Some(Err(this.upload.lock().too_slow().into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests;
