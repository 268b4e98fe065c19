//! Conductors that are lost while they run requests.

use std::time::Duration;

use axum::http::StatusCode;
use serde_json::json;
use tutti_router::FleetSettings;

use crate::support::{Fake, Router, ask, expected, impatient, settings};

const PROMPT: [u32; 3] = [5, 6, 7];

/// A router with two conductors, and a stream that has received three tokens from the first conductor.
async fn running(
    body: &serde_json::Value,
    settings: FleetSettings,
) -> (Router, Fake, Fake, crate::support::Events) {
    let (a, b) = (Fake::with_tokens(3), Fake::start());
    *b.behaviour.unready.lock().unwrap() = Some("not yet".into());
    let router = Router::to(&[a.url.clone(), b.url.clone()], settings).await;
    router.until("a is in", || router.health.remarks() == [format!("{}: not yet", b.url)]).await;
    let mut stream = router.stream(body).await;
    assert_eq!(stream.tokens(3).await, expected(&PROMPT, 3));
    *b.behaviour.unready.lock().unwrap() = None;
    router.all_in_use().await;
    (router, a, b, stream)
}

#[tokio::test]
async fn a_stream_continues_after_its_tokens_when_its_conductor_dies() {
    let mut body = ask(&PROMPT, 10);
    body["prompt_logprobs"] = json!(0);
    body["logprobs"] = json!(0);
    body["seed"] = json!(9);
    let (router, mut a, b, stream) = running(&body, settings()).await;
    a.kill();
    let (tokens, errors) = stream.rest(1).await;
    assert_eq!((tokens, errors), (vec![expected(&PROMPT, 10)[3..].to_vec()], vec![]));
    // The request to `b` equals the request to `a`, plus the tokens from `a`. It does not ask for prompt logprobs
    // again, because the client already has them.
    let (first, second) = (a.last(), b.last());
    assert_eq!((second.generated, a.count(), b.count()), (expected(&PROMPT, 3), 1, 1));
    let (mut wanted, got) = (first.spec.unwrap(), second.spec.unwrap());
    assert_eq!((wanted.prompt_logprobs.take(), got.prompt_logprobs), (Some(0), None));
    assert_eq!(got, wanted);
    assert_eq!(router.metric_of("tutti_router_conductor_replays_total", &a), 1);
    assert_eq!(router.metric_of("tutti_router_conductor_retries_total", &a), 0);
}

#[tokio::test]
async fn tokens_that_arrive_twice_are_delivered_once() {
    let (_router, mut a, b, stream) = running(&ask(&PROMPT, 10), settings()).await;
    *b.behaviour.starts_over.lock().unwrap() = true;
    a.kill();
    assert_eq!(stream.rest(1).await, (vec![expected(&PROMPT, 10)[3..].to_vec()], vec![]));
}

#[tokio::test]
async fn many_streams_lose_nothing_when_one_of_two_dies() {
    let (mut a, b) = (Fake::with_tokens(30), Fake::with_tokens(30));
    let router = Router::before(&[&a, &b], settings()).await;
    let mut streams = Vec::new();
    for kind in 0..20u32 {
        let stream = router.stream(&ask(&[kind; 40], 12)).await;
        streams.push((kind, tokio::spawn(stream.rest(1))));
    }
    router.until("tokens have come", || router.metric("tutti_router_generated_tokens_total") == 60).await;
    a.kill();
    b.allow(1000);
    for (kind, stream) in streams {
        assert_eq!(stream.await.unwrap(), (vec![expected(&[kind; 40], 12)], vec![]), "stream {kind}");
    }
    // Some streams of `a` may have ended before `a` is killed. All its other streams continue on `b`.
    let moved = ["retries", "replays"]
        .map(|what| router.metric_of(&format!("tutti_router_conductor_{what}_total"), &a))
        .iter()
        .sum::<u64>();
    assert!(a.count() == 10 && moved > 0 && b.count() as u64 == 10 + moved, "{} {moved}", b.count());
}

#[tokio::test]
async fn a_request_without_a_token_is_sent_again() {
    let (mut a, b) = (Fake::with_tokens(0), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    // One of the two requests goes to a.
    let mut streams = vec![router.stream(&ask(&PROMPT, 4)).await, router.stream(&ask(&[9; 40], 4)).await];
    assert_eq!(a.count(), 1);
    a.kill();
    let second = streams.pop().unwrap();
    let first = streams.pop().unwrap();
    assert_eq!(first.rest(1).await, (vec![expected(&PROMPT, 4)], vec![]));
    assert_eq!(second.rest(1).await, (vec![expected(&[9; 40], 4)], vec![]));
    assert_eq!((b.count(), b.last().generated), (2, vec![]));
    assert_eq!(router.metric_of("tutti_router_conductor_retries_total", &a), 1);
}

#[tokio::test]
async fn a_conductor_that_comes_back_is_used_again() {
    let (mut a, b) = (Fake::start(), Fake::start());
    let router = Router::before(&[&a, &b], settings()).await;
    a.kill();
    router.until("a is out", || !router.health.remarks().is_empty()).await;
    for _ in 0..3 {
        assert_eq!(router.complete(&ask(&PROMPT, 2)).await.0, StatusCode::OK);
    }
    assert_eq!((a.count(), b.count()), (0, 3));
    a.revive();
    router.all_in_use().await;
    for kind in 0..4 {
        assert_eq!(router.complete(&ask(&[kind; 40], 2)).await.0, StatusCode::OK);
    }
    assert!(a.count() >= 2, "{}", a.count());
}

#[tokio::test]
async fn a_request_that_finds_a_conductor_lost_causes_a_poll_at_once() {
    let (mut a, b) = (Fake::with_tokens(0), Fake::with_tokens(0));
    let router = Router::before(&[&a, &b], FleetSettings { poll_ms: 3_600_000, ..settings() }).await;
    let streams = [router.stream(&ask(&PROMPT, 4)).await, router.stream(&ask(&PROMPT, 4)).await];
    let rest = streams.map(|stream| tokio::spawn(stream.rest(1)));
    a.kill();
    router.until("a is out", || router.health.remarks().len() == 1).await;
    b.allow(100);
    for rest in rest {
        assert_eq!(rest.await.unwrap(), (vec![expected(&PROMPT, 4)], vec![]));
    }
}

#[tokio::test]
async fn the_only_conductor_continues_its_streams_when_it_is_back() {
    let mut a = Fake::with_tokens(3);
    let router = Router::before(&[&a], settings()).await;
    let mut stream = router.stream(&ask(&PROMPT, 10)).await;
    assert_eq!(stream.tokens(3).await, expected(&PROMPT, 3));
    a.kill();
    a.allow(100);
    a.revive();
    assert_eq!(stream.rest(1).await, (vec![expected(&PROMPT, 10)[3..].to_vec()], vec![]));
    assert_eq!(a.last().generated, expected(&PROMPT, 3));
}

#[tokio::test]
async fn a_conductor_that_falls_silent_counts_as_dead() {
    let (_router, a, b, stream) = running(&ask(&PROMPT, 10), impatient()).await;
    a.freeze(Duration::from_secs(5));
    let (tokens, errors) = stream.rest(1).await;
    assert_eq!((tokens, errors), (vec![expected(&PROMPT, 10)[3..].to_vec()], vec![]));
    assert_eq!(b.count(), 1);
}

#[tokio::test]
async fn a_lost_ending_needs_no_other_conductor() {
    let (router, mut a, b, stream) = running(&ask(&PROMPT, 4), settings()).await;
    *a.behaviour.swallows_endings.lock().unwrap() = true;
    a.allow(1);
    let rest = tokio::spawn(stream.rest(1));
    router
        .until("the last token has come", || router.metric("tutti_router_generated_tokens_total") == 4)
        .await;
    a.kill();
    assert_eq!(rest.await.unwrap(), (vec![expected(&PROMPT, 4)[3..].to_vec()], vec![]));
    assert_eq!(b.count(), 0, "there was nothing left to compute");
}

#[tokio::test]
async fn after_the_last_replay_the_client_gets_the_error() {
    let none = FleetSettings { max_replays: 0, ..settings() };
    let (_router, mut a, b, stream) = running(&ask(&PROMPT, 10), none).await;
    a.kill();
    let (_, errors) = stream.rest(1).await;
    assert_eq!((errors.len(), b.count()), (1, 0));
    assert_eq!(errors[0]["type"], "server_error");
}

#[tokio::test]
async fn without_a_conductor_to_continue_the_request_fails_in_time() {
    let short = FleetSettings { recovery_ms: 200, ..settings() };
    let (_router, mut a, mut b, stream) = running(&ask(&PROMPT, 10), short).await;
    b.kill();
    a.kill();
    let (tokens, errors) = stream.rest(1).await;
    assert_eq!((tokens, errors.len()), (vec![vec![]], 1), "{errors:?}");
}

#[tokio::test]
async fn a_deadline_holds_while_a_choice_waits_for_a_conductor() {
    let mut a = Fake::with_tokens(3);
    let router = Router::before(&[&a], settings()).await;
    let mut body = ask(&PROMPT, 10);
    body["timeout_ms"] = json!(1000);
    let mut stream = router.stream(&body).await;
    assert_eq!(stream.tokens(3).await, expected(&PROMPT, 3));
    a.kill();
    let (tokens, errors) = stream.rest(1).await;
    assert_eq!((tokens, errors.len()), (vec![vec![]], 1));
    assert!(errors[0]["message"].as_str().unwrap().contains("deadline"), "{errors:?}");
}
