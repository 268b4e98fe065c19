//! Errors in OpenAI's shape.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tutti_runtime::{Error, ErrorKind};

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
}

impl<'a> From<&'a Error> for ErrorBody<'a> {
    fn from(error: &'a Error) -> Self {
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
        Self { error: ErrorObject { message: error.to_string(), r#type, param: error.field(), code } }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        respond(self.0.kind().http(), &self.0)
    }
}

/// Turns an error into an answer with the given status. The status need not follow from the error's kind.
pub fn respond(status: StatusCode, error: &Error) -> Response {
    if error.kind() == ErrorKind::Internal {
        tracing::error!(%error, "answering with an internal error");
    }
    let mut response = (status, Json(ErrorBody::from(error))).into_response();
    if error.kind() == ErrorKind::Unauthenticated {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if matches!(error.kind(), ErrorKind::Overloaded | ErrorKind::RateLimited | ErrorKind::Unavailable) {
        let seconds = error.retry_after().map_or(1, |after| after.as_secs().max(1));
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
