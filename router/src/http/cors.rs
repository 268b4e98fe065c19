//! Cross-origin requests of web pages (CORS), for the origins in `allowed_origins`.
//!
//! A browser lets a page of another origin read an answer only if the answer names the page's origin. Before a request
//! with a key or with JSON, the browser asks for leave by an `OPTIONS` request, which has no key.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::origin;

const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, OPTIONS");
/// Headers of answers that pages may read, besides the simple ones.
const EXPOSED: HeaderValue = HeaderValue::from_static("retry-after, www-authenticate, x-request-id");
/// Seconds for which a browser may keep the leave.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
const TRUE: HeaderValue = HeaderValue::from_static("true");
/// Asked by browsers before requests of public pages to local addresses.
const REQUEST_PRIVATE: HeaderName = HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// Middleware: gives leave to pages of allowed origins, and names them in their answers.
pub async fn answer(State(allowed): State<Arc<[String]>>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).cloned();
    let origin =
        origin.filter(|origin| origin.to_str().is_ok_and(|origin| origin::is_allowed(origin, &allowed)));
    let asks = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &origin {
        Some(_) if asks => leave(request.headers()),
        _ => next.run(request).await,
    };
    let headers = response.headers_mut();
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    // A cache must not give the answer for one origin to another.
    if !allowed.is_empty() {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// The answer to a browser that asks for leave.
fn leave(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    // Clients send headers of their own, such as those with the version of a library, which mean nothing here.
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    if asked.contains_key(REQUEST_PRIVATE) {
        headers.insert(ALLOW_PRIVATE, TRUE);
    }
    response
}
