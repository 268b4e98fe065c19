//! HTTP routes for operators and probes: `/health`, `/ready`, `/metrics`.

use axum::{
    Json, Router,
    extract::{Request, State as Shared},
    http::{HeaderMap, HeaderValue, StatusCode, Version, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;

use crate::{
    health::{Health, State},
    metrics::{self, Metrics},
};

/// The reader of a listener's metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Viewer {
    /// Anyone who reaches the ports for clients. Metrics whose labels name callers are left out.
    Anyone,
    /// An operator, who reads all metrics at the address for operations.
    Operator,
}

/// The routes, to be served alone or merged with others.
pub fn routes(health: Health, metrics: Metrics, viewer: Viewer) -> Router {
    Router::new()
        .route(
            "/health",
            get(|Shared(health): Shared<Health>| async move { answer(health.live(), "live", &[]) }),
        )
        .route("/ready", get(ready))
        .with_state(health)
        .route(
            "/metrics",
            get(move |headers: HeaderMap| async move {
                let metrics = match viewer {
                    Viewer::Anyone => metrics.without_names(),
                    Viewer::Operator => metrics.clone(),
                };
                let text = if takes_exemplars(&headers) {
                    metrics.encode_with_exemplars()
                } else {
                    metrics.encode()
                };
                ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text)
            }),
        )
}

/// True if the request's `Accept` header asks for OpenMetrics. Prometheus's older text format has no exemplars, and
/// some clients parse every answer as that format.
fn takes_exemplars(headers: &HeaderMap) -> bool {
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.any(|types| types.contains("application/openmetrics-text"))
}

/// Makes a draining process close each HTTP/1 connection after its next response, with `connection: close` in that
/// response. The client then sends its next request over a new connection, which a load balancer gives to another
/// process. Without the header, a client could send a request just as the process closes the idle connection. HTTP/2
/// has GOAWAY for this.
pub fn moving_clients(routes: Router, health: Health) -> Router {
    routes.layer(from_fn_with_state(health, close_when_draining))
}

async fn close_when_draining(Shared(health): Shared<Health>, request: Request, next: Next) -> Response {
    let is_http1 = request.version() <= Version::HTTP_11;
    let mut response = next.run(request).await;
    if is_http1 && health.is_draining() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn ready(Shared(health): Shared<Health>) -> Response {
    answer(health.ready(), "ready", &health.remarks())
}

fn answer(state: State, word: &str, remarks: &[String]) -> Response {
    match state {
        State::Ok if remarks.is_empty() => Json(json!({ "status": word })).into_response(),
        State::Ok => Json(json!({ "status": word, "remarks": remarks })).into_response(),
        State::Not(reason) => {
            let body = Json(json!({ "status": format!("not {word}"), "reason": reason }));
            (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
        }
    }
}
