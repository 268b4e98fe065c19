//! HTTP as browsers and other tools speak it: cross-origin requests, encodings of bodies, names of the model.

use axum::{
    body::Body,
    http::{Method, Request, StatusCode},
};
use serde_json::json;
use tower::ServiceExt;
use tutti_router::RouterSettings;

use crate::support::{self, Answer, Setup, post, ready};

const PAGE: &str = "https://chat.example.com";
/// `printf %s one | sha256sum`
const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";

async fn with_keys(keys: bool) -> (Setup, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let mut settings = RouterSettings { allowed_origins: vec![PAGE.into()], ..Default::default() };
    if keys {
        let file = directory.path().join("keys");
        std::fs::write(&file, format!("page {ONE}\n")).unwrap();
        settings.api_key_file = Some(file);
    }
    (support::ready_with(settings, true).await, directory)
}

async fn ask_leave(setup: &Setup, origin: &str) -> Answer {
    let request = Request::builder()
        .method(Method::OPTIONS)
        .uri("/v1/chat/completions")
        .header("host", "llm.example.com")
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type,x-stainless-lang")
        .body(Body::empty());
    setup.send(request.unwrap()).await
}

#[tokio::test]
async fn pages_of_allowed_origins_get_leave_and_may_read_answers_with_keys_and_without() {
    for keys in [false, true] {
        let (setup, _directory) = with_keys(keys).await;
        let leave = ask_leave(&setup, PAGE).await;
        assert_eq!(leave.status, StatusCode::NO_CONTENT, "{}", leave.text);
        let header = |answer: &Answer, name: &str| {
            answer.headers.get(name).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(header(&leave, "access-control-allow-origin").as_deref(), Some(PAGE));
        let asked = header(&leave, "access-control-allow-headers").unwrap();
        assert!(asked.contains("authorization") && asked.contains("x-stainless-lang"), "{asked}");
        assert!(header(&leave, "access-control-allow-methods").unwrap().contains("POST"));

        let body = json!({ "messages": [{ "role": "user", "content": "hello" }] }).to_string();
        for (key, expected) in [(Some("one"), 200), (None, if keys { 401 } else { 200 })] {
            let mut request = post("/v1/chat/completions", body.clone());
            request.headers_mut().insert("origin", PAGE.parse().unwrap());
            if let Some(key) = key {
                request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
            }
            let answer = setup.send(request).await;
            assert_eq!(answer.status.as_u16(), expected, "{}", answer.text);
            assert_eq!(
                header(&answer, "access-control-allow-origin").as_deref(),
                Some(PAGE),
                "refusals, too"
            );
            if expected == 401 {
                assert!(answer.text.contains("authorization: Bearer") && answer.text.contains("x-api-key"));
            }
        }
    }
}

#[tokio::test]
async fn pages_of_allowed_origins_may_read_that_a_process_drains() {
    let (setup, _directory) = with_keys(true).await;
    let refuses = |origin: &'static str| {
        let refusals = setup.front_door.front(setup.health.clone()).unwrap().refusals;
        let mut request = post("/v1/completions", "{}".to_owned());
        request.headers_mut().insert("origin", origin.parse().unwrap());
        async move { refusals.oneshot(request).await.unwrap() }
    };
    let answer = refuses(PAGE).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers()["access-control-allow-origin"], PAGE);
    assert_eq!(answer.headers()["vary"], "origin");
    let answer = refuses("https://evil.example.com").await;
    assert!(!answer.headers().contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn pages_of_other_origins_get_no_leave() {
    for keys in [false, true] {
        let (setup, _directory) = with_keys(keys).await;
        for origin in ["https://evil.example.com", "https://chat.example.com.evil.com", "null"] {
            let answer = ask_leave(&setup, origin).await;
            assert!(!answer.status.is_success(), "{origin}");
            assert!(!answer.headers.contains_key("access-control-allow-origin"), "{origin}");
        }
    }
}

#[tokio::test]
async fn an_encoded_body_is_refused_by_name() {
    let setup = ready().await;
    let body = json!({ "prompt": "hello" }).to_string();
    for (encoding, expected) in [("gzip", 415), ("br", 415), ("identity", 200), ("Identity", 200)] {
        let mut request = post("/v1/completions", body.clone());
        request.headers_mut().insert("content-encoding", encoding.parse().unwrap());
        let answer = setup.send(request).await;
        assert_eq!(answer.status.as_u16(), expected, "{encoding}: {}", answer.text);
        assert!(expected == 200 || answer.text.contains(encoding), "{}", answer.text);
    }
}

#[tokio::test]
async fn a_model_has_aliases() {
    let setup = support::ready_as(&["gpt-4", "org/alias"]).await;
    let models = setup.send(Request::get("/v1/models").body(Body::empty()).unwrap()).await.json();
    let names: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny", "gpt-4", "org/alias"]);
    for name in names {
        let answer = setup.post("/v1/completions", &json!({ "model": name, "prompt": "hello" })).await;
        assert_eq!((answer.status, &answer.json()["model"]), (StatusCode::OK, &json!("tiny")));
        let described =
            setup.send(Request::get(format!("/v1/models/{name}")).body(Body::empty()).unwrap()).await;
        assert_eq!(described.json()["id"], name);
    }
    let other = setup.post("/v1/completions", &json!({ "model": "gpt-5", "prompt": "hello" })).await;
    assert_eq!(other.status, StatusCode::NOT_FOUND);
    assert!(other.text.contains("org/alias"), "{}", other.text);
}

#[tokio::test]
async fn values_that_ask_for_nothing_pass() {
    let setup = ready().await;
    let both = json!({ "best_of": 1, "echo": false, "logit_bias": {}, "stop": [], "stop_token_ids": [], "suffix": "",
        "guided_json": {}, "guided_choice": [], "guided_regex": "", "structured_outputs": {}, "bad_words": [],
        "allowed_token_ids": [], "logits_processors": [], "length_penalty": 1.0, "early_stopping": false,
        "spaces_between_special_tokens": true, "use_beam_search": false, "n": 1 });
    let chat = json!({ "tools": [], "functions": {}, "documents": [], "response_format": {}, "modalities": [],
        "mm_processor_kwargs": {}, "top_logprobs": 0, "chat_template_kwargs": {},
        "messages": [{ "role": "user", "content": "hello" },
            { "role": "assistant", "content": null, "tool_calls": [], "tool_call_id": "", "function_call": {} }] });
    let merged = |more: &serde_json::Value| {
        let mut body = both.as_object().unwrap().clone();
        body.extend(more.as_object().unwrap().clone());
        json!(body)
    };
    for (path, body) in
        [("/v1/completions", merged(&json!({ "prompt": "hello" }))), ("/v1/chat/completions", merged(&chat))]
    {
        let answer = setup.post(path, &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text);
    }
}
