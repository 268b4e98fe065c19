//! The routes of the web page's data, and the right to cancel.

use axum::{
    body::Body,
    http::{Method, Request, StatusCode},
};
use serde_json::json;
use tutti_router::RouterSettings;

use crate::support::{self, Answer, Setup, ready};

/// `printf %s one | sha256sum`
const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
/// `printf %s two | sha256sum`
const TWO: &str = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

async fn send(setup: &Setup, method: Method, path: &str, key: Option<&str>) -> Answer {
    let mut request = Request::builder().method(method).uri(path).header("host", "llm.example.com");
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    setup.send(request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn only_an_operators_key_cancels() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys");
    std::fs::write(&file, format!("caller {ONE} requests-per-minute=1\noncall {TWO} operator\n")).unwrap();
    let settings = RouterSettings { api_key_file: Some(file), ..Default::default() };
    let setup = support::ready_with(settings, true).await;
    let cancel =
        async |query: &str, key| send(&setup, Method::POST, &format!("/cluster/requests/{query}"), key).await;
    for (query, key, status) in [
        ("7/cancel", None, StatusCode::UNAUTHORIZED),
        ("7/cancel", Some("one"), StatusCode::FORBIDDEN),
        ("7/cancel", Some("two"), StatusCode::NO_CONTENT),
        ("7/cancel?accepted_us=70&conductor=embedded", Some("two"), StatusCode::NO_CONTENT),
        ("7/cancel?accepted_us=71", Some("two"), StatusCode::NOT_FOUND),
        ("8/cancel", Some("two"), StatusCode::NOT_FOUND),
        ("7/cancel?conductor=another", Some("two"), StatusCode::NOT_FOUND),
    ] {
        let answer = cancel(query, key).await;
        assert_eq!(answer.status, status, "{query} with {key:?}: {}", answer.text);
    }
    let refused = cancel("7/cancel", Some("one")).await.json();
    assert!(refused["error"]["message"].as_str().unwrap().contains("operator"), "{refused}");
    for (key, may_cancel) in [("one", false), ("two", true)] {
        let state = send(&setup, Method::GET, "/cluster/state", Some(key)).await.json();
        assert_eq!(state["may_cancel"], json!(may_cancel), "{state}");
    }
}

#[tokio::test]
async fn without_keys_nobody_cancels() {
    let setup = ready().await;
    let answer = send(&setup, Method::POST, "/cluster/requests/7/cancel", None).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN, "{}", answer.text);
    assert_eq!(send(&setup, Method::GET, "/cluster/state", None).await.json()["may_cancel"], json!(false));
}

#[tokio::test]
async fn the_history_says_what_its_samples_mean_before_there_is_one() {
    let setup = support::start(RouterSettings::default(), true).await;
    let history = send(&setup, Method::GET, "/cluster/history?after=3", None).await.json();
    assert_eq!((&history["newest"], &history["samples"]), (&json!(0), &json!([])));
    assert_eq!((&history["kept_s"], history["bounds_s"].as_array().unwrap().len()), (&json!(300), 16));
}
