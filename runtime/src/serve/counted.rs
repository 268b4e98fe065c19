//! The service of one connection. It counts the connection's requests, and passes the peer to handlers.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{BoxError, body::Body};
use bytes::Bytes;
use http::{
    HeaderValue, Request, Response, StatusCode, Version,
    header::{CONNECTION, CONTENT_TYPE, HOST},
};
use http_body::{Frame, SizeHint};
use tower::Service;

use super::{
    activity::{Activity, InFlight},
    receive::{Caller, ReceivedBody, Receiving},
    stream::Peer,
    unread::{Drains, Unread},
};

/// The routes of a listener, for one connection.
#[derive(Clone)]
pub(super) struct CountedService {
    pub routes: axum::Router,
    pub peer: Peer,
    pub activity: Arc<Activity>,
    pub bodies: Bodies,
}

/// Bounds on the bodies that arrive at a listener.
#[derive(Clone)]
pub(super) enum Bodies {
    /// Bounds on messages.
    Grpc(Arc<Receiving>),
    /// Bounds on reading a body while its answer is sent. Reading before the answer is bounded by the handlers.
    Http(Drains),
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<CountedBody>, Infallible>> + Send>>;

impl<B> Service<Request<B>> for CountedService
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<CountedBody>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Answer {
        let in_flight = self.activity.begin(request.version());
        request.extensions_mut().insert(self.peer);
        request.extensions_mut().insert(in_flight.standing.clone());
        let (version, activity) = (request.version(), self.activity.clone());
        let (request, unread) = match &self.bodies {
            Bodies::Grpc(receiving) => {
                let caller = Caller::new(self.peer, in_flight.standing.clone());
                let receive = |body| Body::new(ReceivedBody::new(body, receiving.clone(), caller));
                (request.map(receive), None)
            }
            Bodies::Http(drains) => {
                let (request, unread) = Unread::lend(request.map(Body::new));
                (request, unread.map(|unread| (unread, drains.clone())))
            }
        };
        let answer = has_one_host(&request).then(|| self.routes.call(request));
        Box::pin(async move {
            let mut response = match answer {
                Some(answer) => answer.await?,
                None => without_host(),
            };
            if let Some((unread, drains)) = unread {
                unread.settle(&mut response, &drains, &in_flight.standing).await;
            }
            if version <= Version::HTTP_11 && activity.is_retired() {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(response.map(|body| CountedBody { body, _in_flight: in_flight }))
        })
    }
}

/// False for an HTTP/1.1 request without a `Host` or with several, which a server must refuse (RFC 9112, 3.2).
fn has_one_host<B>(request: &Request<B>) -> bool {
    request.version() != Version::HTTP_11 || request.headers().get_all(HOST).iter().count() == 1
}

fn without_host() -> Response<Body> {
    let body = r#"{"error":{"message":"an HTTP/1.1 request must have one Host","type":"invalid_request_error","param":null,"code":null}}"#;
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::BAD_REQUEST;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A response's body. The request counts as in progress until the body is dropped.
pub(super) struct CountedBody {
    body: Body,
    _in_flight: InFlight,
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
