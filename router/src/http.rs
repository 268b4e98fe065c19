//! The OpenAI API over HTTP: the routes and their shared state.

mod answer;
mod body;
mod chat;
mod choices;
mod cluster;
mod completions;
mod constraints;
mod cors;
mod error;
mod fields;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod history;
mod json_values;
mod logprobs;
mod media;
mod messages;
mod models;
mod origin;
mod parameters;
mod reasoning;
#[cfg(test)]
mod reference;
mod said;
mod sse;
mod tokenize;
mod tools;
mod usage;

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Router,
    body::Body,
    extract::{MatchedPath, Request, State},
    http::{Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::future::BoxFuture;
use http_body::Frame;
use tracing::Instrument;
use tutti_runtime::{CLIENT_LEFT, Error, ErrorKind, request_id::XRequestId, serve::Standing};

use self::{
    body::{BodyReader, RequestBody},
    error::ApiError,
};
use crate::{
    access::{AccessLog, NO_ROUTE, RecordedBody, RequestRecord, Status},
    generation::Generator,
    history::History,
    keys::{
        ApiKeys, Caller, Entry,
        revocation::{self, RevocableBody},
    },
    metrics::RouterMetrics,
    page,
    text::pool::{IN_PLACE_BYTES, Lane, TextWork},
    uploads::{Upload, Uploads},
};

/// State shared by all routes.
#[derive(Clone)]
struct Api {
    generator: Arc<Generator>,
    bodies: BodyReader,
    keys: Arc<ApiKeys>,
    /// Origins whose pages may send requests without a key.
    allowed_origins: Arc<[String]>,
    history: Arc<History>,
    /// Unix time at which the process began to serve, for `/v1/models`.
    since: u64,
}

impl Api {
    /// Identifies a request's caller, and admits or refuses the request.
    fn enter(&self, request: &Request) -> Result<(Caller, Entry), Error> {
        let caller = self.identify(request)?;
        let entry = caller.enter()?;
        Ok((caller, entry))
    }

    /// Finds a request's caller by its API key or, if no keys are needed, checks the request's origin.
    fn identify(&self, request: &Request) -> Result<Caller, Error> {
        let headers = request.headers();
        if !self.keys.are_needed() {
            origin::check(request.uri(), headers, &self.allowed_origins)?;
        }
        let caller = self.keys.caller(headers, request.extensions())?;
        RequestRecord::of(request.extensions()).set_caller(&caller);
        Ok(caller)
    }

    /// Reads a request's body and parses it with `parse`.
    async fn parse<T, F>(&self, request: Request, parse: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&[u8]) -> Result<T, Error> + Send + 'static,
    {
        Ok(self.parse_held(request, parse).await?.0)
    }

    /// As [`Self::parse`], with the body's reservation of memory, for what is kept of the body.
    async fn parse_held<T, F>(&self, request: Request, parse: F) -> Result<(T, Upload), Error>
    where
        T: Send + 'static,
        F: FnOnce(&[u8]) -> Result<T, Error> + Send + 'static,
    {
        let share = Entry::of(request.extensions()).share();
        let RequestBody { bytes, upload } = self.bodies.read(request).await?;
        if bytes.len() <= IN_PLACE_BYTES {
            return Ok((parse(&bytes)?, upload));
        }
        let work = TextWork { lane: Lane::Parse, share, bytes: bytes.len() };
        // A request that is cancelled drops the reservation only when its body is parsed.
        let parse = move || parse(&bytes).map(|parsed| (parsed, upload));
        self.generator.on_text(work, parse).await?
    }
}

/// The routes of a front door.
pub fn routes(
    generator: Arc<Generator>,
    uploads: Uploads,
    keys: Arc<ApiKeys>,
    allowed_origins: Arc<[String]>,
    access: AccessLog,
    history: Arc<History>,
) -> Router {
    let bodies = BodyReader::new(uploads);
    let cors = middleware::from_fn_with_state(allowed_origins.clone(), cors::answer);
    let api = Api { generator, bodies, keys, allowed_origins, history, since: unix_seconds() };
    // Routes of the web page's data. They check the caller's key, but requests to them count against no limit of the
    // key.
    let cluster = Router::new()
        .route("/cluster/state", get(cluster::state))
        .route("/cluster/steps", get(cluster::steps))
        .route("/cluster/requests", get(cluster::requests))
        .route("/cluster/requests/{id}", get(cluster::one_request))
        .route("/cluster/requests/{id}/cancel", post(cluster::cancel))
        .route("/cluster/history", get(cluster::history))
        .route_layer(middleware::from_fn_with_state(api.clone(), let_look))
        .with_state(api.clone());
    Router::new()
        .route("/v1/completions", post(completions::create))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::get))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .method_not_allowed_fallback(wrong_method)
        .route_layer(middleware::from_fn_with_state(api.clone(), let_in))
        .fallback(no_route)
        .with_state(api)
        .merge(cluster)
        .layer(cors)
        .merge(page::routes())
        .layer(middleware::from_fn_with_state(access, record))
}

/// The routes for clients that connect while the process drains. Every request is refused. Pages of allowed origins may
/// read the refusal.
pub fn refusals(access: AccessLog, allowed_origins: Arc<[String]>) -> Router {
    let refuse =
        || async { ApiError(Error::unavailable("this process is draining and takes no more requests")) };
    Router::new()
        .fallback(refuse)
        .layer(middleware::from_fn_with_state(allowed_origins, cors::answer))
        .layer(middleware::from_fn_with_state(access, record))
}

/// Middleware of all routes: gives the request its id and its record, and the answer the id.
async fn record(State(access): State<AccessLog>, mut request: Request, next: Next) -> Response {
    let record = access.begin(Some(request.method().clone()), request.headers(), request.extensions());
    if let Some(path) = request.extensions().get::<MatchedPath>() {
        record.set_route(path.as_str());
    }
    request.extensions_mut().insert(record.clone());
    let answer = next.run(request).instrument(record.span()).await;
    let (answer, error) = error::identify(answer, record.id());
    record.answered(Status::Http(answer.status().as_u16()), error);
    answer.map(|body| Body::new(RecordedBody::new(body, record)))
}

/// Middleware of the API's routes: admits or refuses a request, and counts the answer.
async fn let_in(State(api): State<Api>, path: MatchedPath, mut request: Request, next: Next) -> Response {
    let answered = Answered { metrics: api.generator.metrics().clone(), path, done: false };
    let response = match api.enter(&request) {
        Ok((caller, entry)) => {
            Standing::vouch(request.extensions());
            if let Some(encoding) = encoding(&request) {
                let message = format!("the body is encoded as {encoding:?}, but must be plain JSON");
                let error = Error::new(ErrorKind::InvalidArgument, message);
                return answered.with(error::respond(StatusCode::UNSUPPORTED_MEDIA_TYPE, error));
            }
            request.extensions_mut().insert(entry);
            let record = RequestRecord::of(request.extensions());
            match api.keys.revoked(&caller) {
                None => next.run(request).await,
                Some(revoked) => run_unless_revoked(next.run(request), revoked, record.id()).await,
            }
        }
        Err(error) => ApiError(error).into_response(),
    };
    answered.with(response)
}

/// The encoding of a body that is not plain, such as `gzip`.
fn encoding(request: &Request) -> Option<String> {
    let given = request.headers().get_all(header::CONTENT_ENCODING).iter();
    let given = given.map(|value| String::from_utf8_lossy(value.as_bytes()).trim().to_owned());
    given.into_iter().find(|encoding| !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity"))
}

/// Answers a request. If its key is revoked before the answer, or during a streamed answer, the client gets an error.
async fn run_unless_revoked(
    answer: impl Future<Output = Response>,
    mut revoked: BoxFuture<'static, ()>,
    id: &XRequestId,
) -> Response {
    let response = tokio::select! {
        biased;
        () = &mut revoked => return ApiError(revocation::error()).into_response(),
        response = answer => response,
    };
    if !sse::is_stream(&response) {
        return response;
    }
    let last = Frame::data(sse::error_event(&revocation::error(), id));
    response.map(|body| Body::new(RevocableBody::new(body, revoked, last)))
}

/// Middleware of the `/cluster` routes: identifies the caller, and counts the answer.
async fn let_look(State(api): State<Api>, path: MatchedPath, mut request: Request, next: Next) -> Response {
    let answered = Answered { metrics: api.generator.metrics().clone(), path, done: false };
    let response = match api.identify(&request) {
        Ok(caller) => {
            Standing::vouch(request.extensions());
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => ApiError(error).into_response(),
    };
    answered.with(response)
}

/// Counts the answer to a request. A value that is dropped before there is an answer counts a disconnected client.
struct Answered {
    metrics: RouterMetrics,
    path: MatchedPath,
    done: bool,
}

impl Answered {
    fn with(mut self, response: Response) -> Response {
        self.metrics.answered(self.path.as_str(), response.status().as_str());
        self.done = true;
        response
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        if !self.done {
            self.metrics.answered(self.path.as_str(), &CLIENT_LEFT.to_string());
        }
    }
}

async fn no_route(State(api): State<Api>, method: Method, uri: Uri) -> Response {
    let status = StatusCode::NOT_FOUND;
    api.generator.metrics().answered(NO_ROUTE, status.as_str());
    let message = format!("there is no route {method} {}", uri.path());
    error::respond(status, Error::new(ErrorKind::NotFound, message))
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let message = format!("{} does not take {method}", uri.path());
    error::respond(StatusCode::METHOD_NOT_ALLOWED, Error::new(ErrorKind::InvalidArgument, message))
}

/// Seconds since the Unix epoch, the unit of OpenAI's `created`.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A response id: a prefix and 128 random bits.
fn response_id(prefix: &str) -> String {
    format!("{prefix}-{:032x}", fastrand::u128(..))
}
