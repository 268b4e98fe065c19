//! Conductors that fail requests, and their circuit breakers.

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tokio::net::TcpListener;
use tonic::Status;
use tutti_router::FleetSettings;
use tutti_runtime::{Error, health::State};

use crate::support::{Fake, Router, ask, expected, impatient, settings, token_ids};

fn broken() -> Status {
    Error::internal("the device is lost").into()
}

#[tokio::test]
async fn an_unavailable_conductor_costs_a_retry_and_no_request() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    a.refuse(Status::from(Error::unavailable("draining")));
    for kind in 0..8 {
        let (status, answer) = router.complete(&ask(&[kind; 20], 3)).await;
        assert_eq!((status, token_ids(&answer, 0)), (StatusCode::OK, expected(&[kind; 20], 3)));
    }
    assert_eq!(b.count(), 8);
    assert_eq!(a.count() as u64, router.metric_of("tutti_router_conductor_retries_total", &a));
}

#[tokio::test]
async fn clients_that_leave_never_cost_the_others_their_connection() {
    let fake = Fake::start();
    let router = Router::before(&[&fake], settings()).await;
    // By default, the HTTP/2 library closes a connection after 1024 errors on streams that it has reset.
    for kind in 0..3000 {
        let mut left = router.stream(&ask(&[kind % 256; 20], 60)).await;
        left.next().await.unwrap();
    }
    let (status, answer) = router.complete(&ask(&[1; 20], 3)).await;
    assert_eq!((status, token_ids(&answer, 0)), (StatusCode::OK, expected(&[1; 20], 3)));
    for name in ["retries", "replays"] {
        let name = format!("tutti_router_conductor_{name}_total");
        assert_eq!(router.metric_of(&name, &fake), 0, "{name}");
    }
}

#[tokio::test]
async fn a_conductor_s_refusal_is_final_and_opens_no_breaker() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    for fake in [&a, &b] {
        fake.refuse(Status::from(Error::invalid("max_tokens", "is too many")));
    }
    for _ in 0..10 {
        assert_eq!(router.complete(&ask(&[1], 1)).await.0, StatusCode::BAD_REQUEST);
    }
    assert_eq!(a.count() + b.count(), 10, "each request goes to one conductor");
    let positions = [&a, &b].map(|fake| router.metric_of("tutti_router_conductor_breaker", fake));
    assert_eq!((positions, router.health.remarks().len()), ([0, 0], 0));
}

#[tokio::test]
async fn a_conductor_that_fails_requests_gets_none_and_is_then_probed() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    a.refuse(broken());
    let (began, mut failed) = (Instant::now(), 0);
    for kind in 0..20 {
        failed +=
            usize::from(router.complete(&ask(&[kind; 20], 1)).await.0 == StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(failed, a.count(), "a request that a conductor failed is not sent to another");
    // If twenty requests take longer than the breaker's pause of at least a second, some of them are probes.
    let probes = began.elapsed().as_secs() as usize;
    assert!((3..=3 + probes).contains(&failed), "{failed} failed in {:?}", began.elapsed());
    router.until("a's breaker shows", || router.health.remarks().len() == 1).await;
    assert_eq!(router.metric_of("tutti_router_conductor_up", &a), 0);
    a.refuse(None);
    // After the pause, a request is sent as a probe. Its success closes the breaker.
    while a.count() == failed {
        assert_eq!(router.complete(&ask(&[9], 1)).await.0, StatusCode::OK);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    router.all_in_use().await;
    assert_eq!(router.metric_of("tutti_router_conductor_breaker", &a), 0);
}

#[tokio::test]
async fn all_breakers_open_is_no_reason_to_refuse() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    a.refuse(broken());
    b.refuse(broken());
    for kind in 0..12 {
        let (status, answer) = router.complete(&ask(&[kind; 20], 1)).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(answer.to_string().contains("the device is lost"), "{answer}");
    }
    assert_eq!(a.count() + b.count(), 12, "each was tried, since no conductor was better");
    assert_eq!([&a, &b].map(|fake| router.metric_of("tutti_router_conductor_up", fake)), [0, 0]);
    a.refuse(None);
    b.refuse(None);
    assert_eq!(router.complete(&ask(&[1], 1)).await.0, StatusCode::OK);
}

#[tokio::test]
async fn an_address_that_accepts_connections_and_never_answers_delays_no_request() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let a = Fake::start();
    let router = Router::to(&[url.clone(), a.url.clone()], impatient()).await;
    router.until("a is in", || router.health.ready() == State::Ok).await;
    let silence = format!("{url}: the conductor does not answer");
    router.until("the silent one is reported", || router.health.remarks().first() == Some(&silence)).await;
    for _ in 0..5 {
        assert_eq!(router.complete(&ask(&[1], 2)).await.0, StatusCode::OK);
    }
    assert_eq!(a.count(), 5);
}

#[tokio::test]
async fn a_dead_fleet_refuses_once_the_time_for_recovery_is_over() {
    let (mut a, mut b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], FleetSettings { recovery_ms: 50, ..settings() }).await;
    a.kill();
    b.kill();
    for _ in 0..5 {
        let (status, _) = router.complete(&ask(&[1], 2)).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    }
    router.until("it says so", || router.health.ready() != State::Ok).await;
}

#[tokio::test]
async fn a_router_whose_choices_are_not_retried_refuses_at_once() {
    let mut a = Fake::start();
    let router =
        Router::before(&[&a], FleetSettings { max_retries: 0, recovery_ms: u32::MAX, ..settings() }).await;
    a.kill();
    assert_eq!(router.complete(&ask(&[1], 2)).await.0, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn a_new_request_waits_for_the_only_conductor_as_running_ones_do() {
    let a = Fake::start();
    let router = Router::before(&[&a], settings()).await;
    *a.behaviour.unready.lock().unwrap() = Some("no worker has joined".into());
    a.refuse(Status::from(Error::unavailable("no worker has joined")));
    router.until("it is out", || router.health.ready() != State::Ok).await;
    let body = ask(&[1], 2);
    let recover = async {
        router.until("it was asked", || a.count() == 1).await;
        a.refuse(None);
        *a.behaviour.unready.lock().unwrap() = None;
    };
    let ((status, _), ()) = tokio::join!(router.complete(&body), recover);
    assert_eq!((status, a.count()), (StatusCode::OK, 2));
}

#[tokio::test]
async fn a_conductor_that_is_ready_and_refuses_each_choice_gets_it_as_often_as_it_may_be_retried() {
    let a = Fake::start();
    let settings = FleetSettings { max_retries: 2, recovery_ms: u32::MAX, ..settings() };
    let router = Router::before(&[&a], settings).await;
    a.refuse(Status::from(Error::unavailable("no worker has joined")));
    assert_eq!(router.complete(&ask(&[1], 2)).await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(a.count(), 3);
}

#[tokio::test]
async fn a_conductor_that_does_not_answer_delays_requests_until_its_breaker_opens() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], FleetSettings { accept_timeout_ms: 1_000, ..settings() }).await;
    *a.behaviour.ignores.lock().unwrap() = true;
    for kind in 0..10 {
        assert_eq!(router.complete(&ask(&[kind; 20], 2)).await.0, StatusCode::OK);
    }
    // On a slow machine, the breaker's pause may be over before the last requests are sent. Some of them are then
    // probes.
    assert!((3..6).contains(&a.count()) && b.count() == 10, "{}", a.count());
    // `a` still answers polls with "ready", but its breaker is open.
    assert_eq!(router.metric_of("tutti_router_conductor_breaker", &a), 2);
}
