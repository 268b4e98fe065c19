//! Limits that callers share: no request and no key can use up a limit alone.

use axum::{
    body::Body,
    http::{Request, StatusCode, header},
    response::Response,
};
use serde_json::{Value, json};
use tower::ServiceExt;
use tutti_router::RouterSettings;

use crate::support::{self, Setup, Step, post, ready_with, tokens};

const PATH: &str = "/v1/completions";
/// `printf %s one | sha256sum`
const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
/// `printf %s two | sha256sum`
const TWO: &str = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

/// Starts a front door for 16 concurrent choices. Its API keys are `one`, with `limits`, and `two`.
async fn with_keys(limits: &str) -> (Setup, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys");
    std::fs::write(&file, format!("alice {ONE} {limits}\nbob {TWO}\n")).unwrap();
    let settings =
        RouterSettings { api_key_file: Some(file), max_concurrent_choices: 16, ..Default::default() };
    (ready_with(settings, true).await, directory)
}

fn request(key: Option<&'static str>, path: &str, body: &Value) -> Request<Body> {
    let mut request = post(path, body.to_string());
    if let Some(key) = key {
        request.headers_mut().insert("x-api-key", header::HeaderValue::from_static(key));
    }
    request
}

async fn send(setup: &Setup, key: Option<&'static str>, body: &Value) -> Response {
    setup.front_door.http_routes().oneshot(request(key, PATH, body)).await.unwrap()
}

#[tokio::test]
async fn each_key_has_prefixes_of_its_own_and_so_has_each_salt_in_it() {
    let (setup, _directory) = with_keys("").await;
    let salt_of = async |key, body: Value| {
        assert_eq!(send(&setup, Some(key), &body).await.status(), StatusCode::OK);
        let salts = setup.conductor.submitted.lock().unwrap().split_off(0);
        let mut salts: Vec<_> =
            salts.into_iter().map(|submitted| submitted.spec.unwrap().cache_salt).collect();
        salts.dedup();
        assert_eq!((salts.len(), salts[0].len()), (1, 16), "choices share");
        salts.remove(0)
    };
    let plain = json!({ "prompt": "a", "n": 3 });
    let salted = json!({ "prompt": "a", "n": 3, "cache_salt": "bob" });
    let mut salts = Vec::new();
    for key in ["one", "two"] {
        salts.extend([salt_of(key, plain.clone()).await, salt_of(key, salted.clone()).await]);
        assert_eq!(salts.last(), Some(&salt_of(key, salted.clone()).await));
    }
    salts.sort_unstable();
    salts.dedup();
    assert_eq!(salts.len(), 4);
}

#[tokio::test]
async fn an_oversized_request_runs_beside_others() {
    let settings = RouterSettings { max_concurrent_choices: 16, ..Default::default() };
    let setup = ready_with(settings, true).await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let oversized = send(&setup, None, &json!({ "prompt": "a", "n": 16, "stream": true })).await;
    assert_eq!((oversized.status(), setup.conductor.count()), (StatusCode::OK, 16));
    let one = json!({ "prompt": "a", "stream": true });
    let mut others = Vec::new();
    for _ in 0..4 {
        let answer = send(&setup, None, &one).await;
        assert_eq!(answer.status(), StatusCode::OK);
        others.push(answer);
    }
    assert_eq!(send(&setup, None, &one).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    let beyond = send(&setup, None, &json!({ "prompt": "a", "n": 17 })).await;
    assert_eq!(beyond.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_flood_of_one_key_leaves_room_for_another_and_conductors_know_the_share() {
    let (setup, _directory) = with_keys("").await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let one = json!({ "prompt": "a", "stream": true });
    let mut running = Vec::new();
    let refused = loop {
        let answer = send(&setup, Some("one"), &one).await;
        match answer.status() {
            StatusCode::OK => running.push(answer),
            status => break status,
        }
    };
    assert_eq!((refused, running.len()), (StatusCode::SERVICE_UNAVAILABLE, 12));
    let alice = setup.conductor.last().share;
    let other = send(&setup, Some("two"), &one).await;
    assert_eq!(other.status(), StatusCode::OK);
    let bob = setup.conductor.last().share;
    assert!(alice != 0 && bob != 0 && alice != bob);
    let open = support::ready().await;
    assert_eq!(send(&open, None, &json!({ "prompt": "a" })).await.status(), StatusCode::OK);
    assert_eq!(open.conductor.last().share, 0);
}

#[tokio::test]
async fn all_routes_with_text_use_the_tokens_of_a_key() {
    let (setup, _directory) = with_keys("tokens-per-minute=20").await;
    let ask = async |path: &str, body: Value| setup.send(request(Some("one"), path, &body)).await;
    // Each letter of this text is one token.
    let text = "a".repeat(12);
    assert_eq!(ask("/tokenize", json!({ "prompt": text })).await.status, StatusCode::OK);
    let tokens = json!({ "tokens": vec![97; 9] });
    let refused = ask("/detokenize", tokens.clone()).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS, "{}", refused.text);
    assert_eq!(setup.send(request(Some("two"), "/detokenize", &tokens)).await.status, StatusCode::OK);
    let metrics = setup.metrics.encode();
    let line = r#"tutti_router_key_tokens_total{key="alice"} 12"#;
    assert!(metrics.lines().any(|other| other == line), "{metrics}");
}

#[tokio::test]
async fn a_request_reserves_what_it_may_use_and_gives_the_rest_back() {
    let (setup, _directory) = with_keys("tokens-per-minute=60 most-urgent=0 concurrent=4").await;
    let ask = async |body: Value| setup.send(request(Some("one"), PATH, &body)).await;
    // This request uses one prompt token and three output tokens.
    let small = json!({ "prompt": "a", "max_tokens": 40 });
    assert_eq!(ask(small.clone()).await.status, StatusCode::OK);
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let body = json!({ "prompt": "a", "max_tokens": 20, "n": 2, "stream": true });
    let running = send(&setup, Some("one"), &body).await;
    assert_eq!(running.status(), StatusCode::OK);
    let refused = ask(small.clone()).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.text.contains("41 tokens") && refused.text.contains("60"), "{}", refused.text);
    drop(running);
    for (body, param) in [
        (json!({ "prompt": "a", "n": 5, "max_tokens": 1 }), "n"),
        (json!({ "prompt": "a", "priority": -1 }), "priority"),
    ] {
        let refused = ask(body).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text);
        assert_eq!(refused.json()["error"]["param"], param);
    }
}
