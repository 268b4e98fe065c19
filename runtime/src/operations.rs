//! HTTP routes for operators and probes: `/health`, `/ready`, `/metrics`.

use axum::{
    Json, Router,
    extract::State as Shared,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;

use crate::{
    health::{Health, State},
    metrics::{self, Metrics},
};

/// The routes, to be served alone or merged with others.
pub fn routes(health: Health, metrics: Metrics) -> Router {
    Router::new()
        .route(
            "/health",
            get(|Shared(health): Shared<Health>| async move { answer(health.live(), "live", &[]) }),
        )
        .route("/ready", get(ready))
        .with_state(health)
        .route(
            "/metrics",
            get(move || async move { ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics.encode()) }),
        )
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
