//! The selection of a conductor for a request.

use axum::http::StatusCode;
use serde_json::json;
use tonic::Status;
use tutti_router::FleetSettings;
use tutti_runtime::{Error, health::State};

use crate::support::{Fake, Router, ask, expected, settings, token_ids};

/// A prompt that shares its first 64 tokens with all prompts of the same `kind`.
fn prompt(kind: u32, last: u32) -> Vec<u32> {
    let mut prompt = vec![kind; 64];
    prompt.push(last);
    prompt
}

#[tokio::test]
async fn requests_that_share_a_prefix_go_to_one_conductor_and_others_take_turns() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    for last in 0..6 {
        let (status, answer) = router.complete(&ask(&prompt(1, last), 3)).await;
        assert_eq!((status, token_ids(&answer, 0)), (StatusCode::OK, expected(&prompt(1, last), 3)));
    }
    assert_eq!([a.count(), b.count()].iter().max(), Some(&6), "one of them has the prefix");
    for kind in 10..20 {
        router.complete(&ask(&prompt(kind, 0), 3)).await;
    }
    assert_eq!(a.count().abs_diff(b.count()), 6, "prompts that share nothing are spread evenly");
    let (hits, blocks) = (
        router.metric("tutti_router_prefix_hit_blocks_total"),
        router.metric("tutti_router_prefix_blocks_total"),
    );
    assert_eq!((hits, blocks), (5 * 4, 16 * 4));
    assert_eq!(router.metric("tutti_router_prefix_index_entries"), 11 * 4);
    assert!(router.metric("tutti_router_prefix_index_bytes") > 11 * 4 * 64);
    let picks = router.metric_of("tutti_router_conductor_picks_total", &a);
    assert_eq!(picks, a.count() as u64);
}

#[tokio::test]
async fn a_busy_holder_of_a_prefix_is_passed_over() {
    let (a, b) = (Fake::with_tokens(0), Fake::with_tokens(0));
    let router = Router::before(&[&a, &b], settings()).await;
    let mut streams = Vec::new();
    for last in 0..8 {
        streams.push(router.stream(&ask(&prompt(1, last), 2)).await);
    }
    assert_eq!((a.count(), b.count()), (4, 4), "a prefix is worth no more than the wait for it");
    a.allow(100);
    b.allow(100);
    for (last, stream) in streams.into_iter().enumerate() {
        assert_eq!(stream.rest(1).await, (vec![expected(&prompt(1, last as u32), 2)], vec![]));
    }
}

#[tokio::test]
async fn the_choices_of_one_request_are_spread() {
    let (a, b) = (Fake::with_tokens(0), Fake::with_tokens(0));
    let router = Router::before(&[&a, &b], settings()).await;
    let mut body = ask(&[], 2);
    body["prompt"] = json!([prompt(1, 0), prompt(2, 0)]);
    body["n"] = json!(2);
    let stream = router.stream(&body).await;
    assert_eq!((a.count(), b.count()), (2, 2));
    a.allow(4);
    b.allow(4);
    let (first, second) = (expected(&prompt(1, 0), 2), expected(&prompt(2, 0), 2));
    assert_eq!(stream.rest(4).await, (vec![first.clone(), first, second.clone(), second], vec![]));
}

#[tokio::test]
async fn a_conductor_with_another_model_gets_no_requests_and_is_named() {
    let (a, b, c) = (Fake::start(), Fake::start(), Fake::start());
    b.behaviour.model.lock().unwrap().0 = "other".into();
    c.behaviour.model.lock().unwrap().1 = true;
    let urls = [a.url.clone(), b.url.clone(), c.url.clone()];
    let router = Router::to(&urls, settings()).await;
    let asked =
        || router.health.remarks().iter().all(|remark| !remark.contains("no answer from the conductor yet"));
    router.until("two are out", || router.health.remarks().len() == 2 && asked()).await;
    // The first conductor to answer decides the served model. The other conductors get no requests, and remarks say how
    // their models differ.
    let served =
        [&a, &b, &c].into_iter().find(|fake| router.metric_of("tutti_router_conductor_up", fake) == 1);
    let served = served.unwrap();
    for _ in 0..6 {
        assert_eq!(router.complete(&ask(&[1, 2, 3], 3)).await.0, StatusCode::OK);
    }
    assert_eq!(served.count(), 6);
    for remark in router.health.remarks() {
        let differs = ["serves \"", "has another tokenizer"].iter().any(|why| remark.contains(why));
        assert!(differs && !remark.contains(&served.url), "{remark}");
    }
}

#[tokio::test]
async fn a_conductor_that_is_not_ready_gets_no_requests_until_it_is() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    *a.behaviour.unready.lock().unwrap() = Some("draining".into());
    router.until("a is out", || router.health.remarks() == [format!("{}: draining", a.url)]).await;
    for _ in 0..4 {
        assert_eq!(router.complete(&ask(&[1], 1)).await.0, StatusCode::OK);
    }
    assert_eq!((a.count(), b.count()), (0, 4));
    *b.behaviour.unready.lock().unwrap() = Some("draining too".into());
    router.until("neither is ready", || router.health.ready() != State::Ok).await;
    let State::Not(why) = router.health.ready() else { panic!("ready") };
    assert!(why.contains(&a.url) && why.contains("draining too"), "{why}");
    *a.behaviour.unready.lock().unwrap() = None;
    router.until("a is in", || router.health.ready() == State::Ok).await;
    assert_eq!(router.complete(&ask(&[1], 1)).await.0, StatusCode::OK);
    assert_eq!(a.count(), 1);
}

#[tokio::test]
async fn refusals_for_load_use_up_no_retry() {
    let fakes = [(); 4].map(|()| Fake::start());
    let [a, b, c, d] = &fakes;
    let router = Router::before(&[a, b, c, d], FleetSettings { max_retries: 1, ..settings() }).await;
    for full in [a, b, c] {
        let error = Error::overloaded("8 requests are in flight", std::time::Duration::from_secs(1));
        full.refuse(Status::from(error));
    }
    for kind in 0..8 {
        assert_eq!(router.complete(&ask(&[kind], 1)).await.0, StatusCode::OK);
    }
    assert_eq!(d.count(), 8);
}

#[tokio::test]
async fn a_full_conductor_does_not_count_as_broken() {
    let (a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    let full =
        || Status::from(Error::overloaded("8 requests are in flight", std::time::Duration::from_secs(1)));
    a.refuse(full());
    for _ in 0..8 {
        assert_eq!(router.complete(&ask(&[1], 1)).await.0, StatusCode::OK);
    }
    assert_eq!(b.count(), 8, "requests that a refuses go to b");
    assert_eq!(router.metric_of("tutti_router_conductor_breaker", &a), 0);
    b.refuse(full());
    assert_eq!(router.complete(&ask(&[1], 1)).await.0, StatusCode::SERVICE_UNAVAILABLE);
}
