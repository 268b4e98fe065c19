//! A layer before a gRPC service: callers are let in by their API keys before their messages are read.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use axum::http::{HeaderMap, Request, Response};
use futures_util::future::{Either, Ready, ready};
use tonic::{Status, body::Body, server::NamedService};
use tower::Service;

use crate::{
    keys::{ApiKeys, Entry},
    metrics::RouterMetrics,
};

/// A service that serves known callers only.
#[derive(Clone)]
pub struct Guarded<S> {
    inner: S,
    keys: Arc<ApiKeys>,
    metrics: RouterMetrics,
}

impl<S> Guarded<S> {
    /// Guards a service.
    pub fn new(inner: S, keys: Arc<ApiKeys>, metrics: RouterMetrics) -> Self {
        Self { inner, keys, metrics }
    }

    fn let_in(&self, headers: &HeaderMap) -> Result<Entry, Status> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let caller = self.keys.identify(text("authorization"), text("x-api-key"))?;
        Ok(caller.enter()?)
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + NamedService,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        match self.let_in(request.headers()) {
            Ok(entry) => {
                request.extensions_mut().insert(entry);
                Either::Left(self.inner.call(request))
            }
            Err(status) => {
                self.metrics.answered(S::NAME, &format!("{:?}", status.code()));
                Either::Right(ready(Ok(status.into_http())))
            }
        }
    }
}
