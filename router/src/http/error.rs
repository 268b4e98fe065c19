//! Errors in OpenAI's shape. An answer gets its body in [`identify`], where the request's id is known.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tutti_runtime::{Error, ErrorKind, request_id::XRequestId};

/// An error as an HTTP answer.
#[derive(Debug)]
pub struct ApiError(pub Error);

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

/// `{"error": {…}}`: the body of an answer, or an event in a stream.
#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorObject<'a> {
    message: String,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
    /// The id by which all logs name the request.
    request_id: &'a str,
}

impl<'a> ErrorBody<'a> {
    /// The error of the request with this id.
    pub fn new(error: &'a Error, id: &'a XRequestId) -> Self {
        let code = match (error.kind(), error.field()) {
            (ErrorKind::NotFound, Some("model")) => Some("model_not_found"),
            (ErrorKind::RateLimited, _) => Some("rate_limit_exceeded"),
            (ErrorKind::Overloaded, _) => Some("server_overloaded"),
            (ErrorKind::Unauthenticated, _) => Some("invalid_api_key"),
            // This error needs a code, because a stream that has begun can no longer report it by an HTTP status.
            (ErrorKind::DeadlineExceeded, _) => Some("deadline_exceeded"),
            _ => None,
        };
        let r#type = error.kind().openai_type();
        let message = error.to_string();
        let request_id = id.as_str();
        Self { error: ErrorObject { message, r#type, param: error.field(), code, request_id } }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        respond(self.0.kind().http(), self.0)
    }
}

/// The error of an answer that has no body yet.
#[derive(Clone)]
struct Unwritten(Error);

/// Turns an error into an answer with the given status. The status need not follow from the error's kind.
pub fn respond(status: StatusCode, error: Error) -> Response {
    if error.kind() == ErrorKind::Internal {
        tracing::error!(%error, "answering with an internal error");
    }
    let mut response = status.into_response();
    if error.kind() == ErrorKind::Unauthenticated {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if matches!(error.kind(), ErrorKind::Overloaded | ErrorKind::RateLimited | ErrorKind::Unavailable) {
        let seconds = error.retry_after().map_or(1, |after| after.as_secs().max(1));
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response.extensions_mut().insert(Unwritten(error));
    response
}

/// Writes the body of an answer that is an error, and the request's id into the headers of any answer. Returns the
/// kind of the error.
pub fn identify(response: Response, id: &XRequestId) -> (Response, Option<&'static str>) {
    let (mut parts, mut body) = response.into_parts();
    let kind = parts.extensions.remove::<Unwritten>().map(|Unwritten(error)| {
        let written = Json(ErrorBody::new(&error, id)).into_response();
        parts.headers.extend(written.headers().clone());
        body = written.into_body();
        error.kind().label()
    });
    if let Some(id) = id.to_header() {
        parts.headers.insert(XRequestId::HEADER, id);
    }
    (Response::from_parts(parts, body), kind)
}
