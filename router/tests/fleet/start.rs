//! A router whose conductor is still starting, and a poll on request.

use std::sync::atomic::Ordering::Relaxed;

use axum::http::StatusCode;
use serde_json::json;
use tutti_router::FleetSettings;
use tutti_runtime::health::State;

use crate::support::{Fake, Router, settings};

#[tokio::test]
async fn the_tokenizer_is_parsed_while_the_conductor_loads() {
    let fake = Fake::start();
    *fake.behaviour.loads.lock().unwrap() = true;
    let router = Router::to(std::slice::from_ref(&fake.url), settings()).await;
    let fetched = || fake.behaviour.fetched.load(Relaxed);
    router.until("its files are fetched", || fetched() == 1).await;
    assert_ne!(router.health.ready(), State::Ok, "the model is not known yet");
    let (status, _) = router.complete(&json!({ "prompt": "hello", "max_tokens": 3 })).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);

    // The files are fetched again when the conductor is ready, since they may have changed.
    *fake.behaviour.loads.lock().unwrap() = false;
    router.all_in_use().await;
    assert_eq!(fetched(), 2);
    let (status, _) = router.complete(&json!({ "prompt": "hello", "max_tokens": 3 })).await;
    assert_eq!((status, fake.last().spec.unwrap().prompt), (StatusCode::OK, vec![259]));
}

#[tokio::test]
async fn ask_again_finds_a_change_at_once() {
    let fake = Fake::start();
    let hourly = FleetSettings { poll_ms: 3_600_000, ..settings() };
    let router = Router::before(&[&fake], hourly).await;
    *fake.behaviour.unready.lock().unwrap() = Some("draining".into());
    router.front_door.ask_again();
    router.until("it has asked", || router.health.ready() == State::Not("draining".into())).await;
}
