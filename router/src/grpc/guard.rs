//! A layer in front of a gRPC service. The layer checks the callers' API keys before their messages are read.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::http::{HeaderMap, Request, Response};
use futures_util::future::{self, BoxFuture, Either};
use http_body::Frame;
use tonic::{Code, Status, body::Body, server::NamedService};
use tower::Service;
use tracing::Instrument;
use tutti_runtime::{Error, request_id::XRequestId, serve::Standing};

use crate::{
    access::{self, AccessLog, RecordedBody, RequestRecord},
    keys::{
        ApiKeys, Caller, Entry,
        revocation::{self, RevocableBody},
    },
    metrics::RouterMetrics,
};

/// A service that serves known callers only.
#[derive(Clone)]
pub struct Guarded<S> {
    inner: S,
    keys: Arc<ApiKeys>,
    metrics: RouterMetrics,
    access: AccessLog,
}

impl<S> Guarded<S> {
    /// Guards a service.
    pub fn new(inner: S, keys: Arc<ApiKeys>, metrics: RouterMetrics, access: AccessLog) -> Self {
        Self { inner, keys, metrics, access }
    }

    fn let_in(&self, request: &Request<Body>) -> Result<(Caller, Entry), Error> {
        let caller = self.keys.caller(request.headers(), request.extensions())?;
        RequestRecord::of(request.extensions()).set_caller(&caller);
        let entry = caller.enter()?;
        Ok((caller, entry))
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + NamedService,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let record = self.access.begin(None, request.headers(), request.extensions());
        record.set_route(route::<S>(request.uri().path()));
        request.extensions_mut().insert(record.clone());
        let span = record.span();
        // Lines that the service logs before its first await name the request, too.
        let _entered = span.enter();
        let answer = match self.let_in(&request) {
            Ok((caller, entry)) => {
                Standing::vouch(request.extensions());
                request.extensions_mut().insert(entry);
                let answer = self.inner.call(request);
                Either::Left(match self.keys.revoked(&caller) {
                    None => Either::Left(answer),
                    Some(revoked) => {
                        Either::Right(UnlessRevoked { answer: Box::pin(answer), revoked: Some(revoked) })
                    }
                })
            }
            Err(error) => {
                record.answered(access::Status::Grpc(Code::Ok), Some(error.kind().label()));
                let status = Status::from(error);
                self.metrics.answered(S::NAME, &format!("{:?}", status.code()));
                Either::Right(future::ready(Ok(status.into_http())))
            }
        };
        let answer = async move { Ok(identify(answer.await?, record)) };
        Box::pin(answer.instrument(span.clone()))
    }
}

/// Maximum length of the name of a method in a record. A client may call methods that do not exist.
const MAX_RPC_NAME_BYTES: usize = 32;

/// The route of a call, for its record.
fn route<S: NamedService>(path: &str) -> String {
    let method = path.rsplit('/').next().unwrap_or_default();
    let is_name =
        method.len() <= MAX_RPC_NAME_BYTES && method.bytes().all(|byte| byte.is_ascii_alphanumeric());
    format!("{}/{}", S::NAME, if is_name { method } else { "unknown" })
}

/// Adds the request's id to the metadata of an answer, and notes the answer in the record.
fn identify(mut answer: Response<Body>, record: RequestRecord) -> Response<Body> {
    // An answer without a message has its status in the headers, any other behind its body.
    let status = answer.headers().get(Status::GRPC_STATUS);
    let code = status.map_or(Code::Ok, |status| Code::from_bytes(status.as_bytes()));
    record.answered(access::Status::Grpc(code), None);
    if let Some(id) = record.id().to_header() {
        answer.headers_mut().insert(XRequestId::HEADER, id);
    }
    answer.map(|body| Body::new(RecordedBody::new(body, record)))
}

/// A future that yields an answer. If the caller's key is revoked before the answer ends, the client gets an error.
pub struct UnlessRevoked<F> {
    answer: Pin<Box<F>>,
    /// Completes when the key is revoked. `None` once moved into the answer's body.
    revoked: Option<BoxFuture<'static, ()>>,
}

impl<F, E> Future for UnlessRevoked<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let status = || Status::from(revocation::error());
        if let Some(revoked) = &mut self.revoked
            && revoked.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Ok(status().into_http()));
        }
        let answer = ready!(self.answer.as_mut().poll(context));
        let Some(revoked) = self.revoked.take() else { return Poll::Ready(answer) };
        let mut trailers = HeaderMap::new();
        // If the message is not a valid header, the body ends without a status.
        let _ = status().add_header(&mut trailers);
        let last = Frame::trailers(trailers);
        Poll::Ready(
            answer.map(|answer| answer.map(|body| Body::new(RevocableBody::new(body, revoked, last)))),
        )
    }
}
