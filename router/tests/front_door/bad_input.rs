//! Every bad request is refused with its status and the field at fault, and the next good request is served.

use axum::{
    body::{Body, Bytes},
    http::{Method, Request, StatusCode, header},
};
use serde_json::{Value, json};
use tonic::Status;
use tutti_router::RouterSettings;
use tutti_runtime::Error;

use crate::support::{self, Setup, Step, post, ready, ready_with};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Checks the shape of an error and returns the error's `param`.
fn param(answer: &support::Answer) -> Value {
    let mut body = answer.json();
    let error = body["error"].as_object_mut().unwrap_or_else(|| panic!("{}", answer.text));
    let keys: Vec<_> = error.keys().cloned().collect();
    assert_eq!(keys, ["message", "type", "param", "code", "request_id"]);
    assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()));
    error["param"].take()
}

async fn still_serves(setup: &Setup) {
    let answer = setup.post(COMPLETIONS, &json!({ "prompt": "hello" })).await;
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (StatusCode::OK, &json!("ok")));
}

/// A good request with these members replaced or added.
fn with(path: &str, members: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "x" }] }),
        _ => json!({ "prompt": "hello" }),
    };
    body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn every_bad_member_is_named_and_the_next_request_is_served() {
    let setup = ready().await;
    let many: Vec<String> = (0..17).map(|i| i.to_string()).collect();
    let biases: Value = (0..300).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into();
    let cases = [
        // Cases for both routes.
        ("", json!({ "temperature": -0.1 }), "temperature"),
        ("", json!({ "temperature": 2.5 }), "temperature"),
        ("", json!({ "temperature": "hot" }), "temperature"),
        ("", json!({ "temperature": 1e300 }), "temperature"),
        ("", json!({ "top_p": 0 }), "top_p"),
        ("", json!({ "top_p": 1.5 }), "top_p"),
        ("", json!({ "top_k": -2 }), "top_k"),
        ("", json!({ "top_k": 1.5 }), "top_k"),
        ("", json!({ "min_p": 2 }), "min_p"),
        ("", json!({ "repetition_penalty": 0 }), "repetition_penalty"),
        ("", json!({ "presence_penalty": 3 }), "presence_penalty"),
        ("", json!({ "frequency_penalty": -3 }), "frequency_penalty"),
        ("", json!({ "logit_bias": { "1": 101 } }), "logit_bias"),
        ("", json!({ "logit_bias": { "999": 1 } }), "logit_bias"),
        ("", json!({ "logit_bias": { "x": 1 } }), "logit_bias"),
        ("", json!({ "logit_bias": [1] }), "logit_bias"),
        ("", json!({ "logit_bias": biases }), "logit_bias"),
        ("", json!({ "seed": 1.5 }), "seed"),
        ("", json!({ "n": 0 }), "n"),
        ("", json!({ "n": 129 }), "n"),
        ("", json!({ "n": -1 }), "n"),
        ("", json!({ "stop": "" }), "stop"),
        ("", json!({ "stop": 5 }), "stop"),
        ("", json!({ "stop": many }), "stop"),
        ("", json!({ "stop": ["x".repeat(1025)] }), "stop"),
        ("", json!({ "stop_token_ids": [270] }), "stop_token_ids"),
        ("", json!({ "stop_token_ids": vec![1; 129] }), "stop_token_ids"),
        ("", json!({ "max_tokens": -1 }), "max_tokens"),
        ("", json!({ "max_tokens": 64 }), "max_tokens"),
        ("", json!({ "max_tokens": 0 }), "max_tokens"),
        ("", json!({ "max_tokens": 4, "min_tokens": 5 }), "min_tokens"),
        ("", json!({ "stream": "yes" }), "stream"),
        ("", json!({ "stream_options": { "include_usage": true } }), "stream_options"),
        ("", json!({ "stream": true, "stream_options": { "bogus": 1 } }), "stream_options.bogus"),
        ("", json!({ "model": "gpt-9" }), "model"),
        ("", json!({ "model": 5 }), "model"),
        ("", json!({ "tempreature": 1 }), "tempreature"),
        ("", json!({ "guided_json": { "type": "object" } }), "guided_json"),
        ("", json!({ "ignore_eos": 1 }), "ignore_eos"),
        ("", json!({ "priority": 9 }), "priority"),
        ("", json!({ "priority": -9 }), "priority"),
        ("", json!({ "priority": 0.5 }), "priority"),
        ("", json!({ "timeout_ms": -1 }), "timeout_ms"),
        ("", json!({ "timeout_ms": 4_294_967_296_u64 }), "timeout_ms"),
        // Cases for completions.
        (COMPLETIONS, json!({ "prompt": null }), "prompt"),
        (COMPLETIONS, json!({ "prompt": "" }), "prompt"),
        (COMPLETIONS, json!({ "prompt": [] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": [[]] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": 5 }), "prompt"),
        (COMPLETIONS, json!({ "prompt": {} }), "prompt"),
        (COMPLETIONS, json!({ "prompt": [1, "a"] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": ["a", [1]] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": [-1] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": [270] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": ["ok", ""] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": vec![1; 64] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": vec![1; 65] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": vec!["a"; 1000], "n": 2 }), "n"),
        (COMPLETIONS, json!({ "prompt": vec!["a"; 2000] }), "prompt"),
        (COMPLETIONS, json!({ "prompt": "a".repeat(100_000) }), "prompt"),
        (COMPLETIONS, json!({ "logprobs": 21 }), "logprobs"),
        (COMPLETIONS, json!({ "logprobs": true }), "logprobs"),
        (COMPLETIONS, json!({ "prompt_logprobs": 21 }), "prompt_logprobs"),
        (COMPLETIONS, json!({ "suffix": "end" }), "suffix"),
        (COMPLETIONS, json!({ "best_of": 2 }), "best_of"),
        (COMPLETIONS, json!({ "echo": "yes" }), "echo"),
        (COMPLETIONS, json!({ "messages": [] }), "messages"),
        // Cases for chat.
        (CHAT, json!({ "messages": null }), "messages"),
        (CHAT, json!({ "messages": [] }), "messages"),
        (CHAT, json!({ "messages": "hi" }), "messages"),
        (CHAT, json!({ "messages": [{ "role": "forbidden", "content": "x" }] }), "messages"),
        (CHAT, json!({ "messages": [{ "role": "user", "content": "x".repeat(99) }] }), "messages"),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": "x", "weight": 1 }] }),
            "messages[0].weight",
        ),
        (CHAT, json!({ "max_completion_tokens": 64 }), "max_completion_tokens"),
        (CHAT, json!({ "max_completion_tokens": 4, "max_tokens": 5 }), "max_tokens"),
        (CHAT, json!({ "top_logprobs": 2 }), "top_logprobs"),
        (CHAT, json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
        (CHAT, json!({ "logprobs": 2 }), "logprobs"),
        (CHAT, json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] }), "tools"),
        (CHAT, json!({ "tool_choice": "required" }), "tool_choice"),
        (CHAT, json!({ "response_format": { "type": "json_object" } }), "response_format"),
        (CHAT, json!({ "modalities": ["text", "audio"] }), "modalities"),
        (
            CHAT,
            json!({ "continue_final_message": true, "add_generation_prompt": true }),
            "continue_final_message",
        ),
        (CHAT, json!({ "prompt": "x" }), "prompt"),
    ];
    for (path, members, expected) in cases {
        let paths = if path.is_empty() { vec![COMPLETIONS, CHAT] } else { vec![path] };
        for path in paths {
            let answer = setup.post(path, &with(path, &members)).await;
            let status = if expected == "model" && members["model"].is_string() { 404 } else { 400 };
            assert_eq!(answer.status, status, "{path} {members}: {}", answer.text);
            assert_eq!(param(&answer), expected, "{path} {members}: {}", answer.text);
        }
        assert_eq!(setup.conductor.count(), 0, "{members} reached the conductor");
    }
    still_serves(&setup).await;
}

#[tokio::test]
async fn harmless_members_of_openai_clients_are_taken() {
    let setup = ready().await;
    let members = json!({ "user": "me", "metadata": {}, "store": false, "service_tier": "auto", "seed": -1,
        "top_k": -1, "temperature": null, "stop": null, "logit_bias": { "5": -100 } });
    for path in [COMPLETIONS, CHAT] {
        let answer = setup.post(path, &with(path, &members)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    }
    let members = json!({ "response_format": { "type": "text" }, "modalities": ["text"], "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": true });
    assert_eq!(setup.post(CHAT, &with(CHAT, &members)).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_body_that_is_no_request_is_refused() {
    let setup = ready().await;
    let not_utf8 = b"{\"prompt\": \"\xff\xfe\"}".to_vec();
    for (body, expected, word) in [
        (b"".to_vec(), json!(null), "empty"),
        (b"{\"prompt\": \"x\"".to_vec(), json!(null), "column 14"),
        (b"[]".to_vec(), json!(null), "object"),
        (not_utf8, json!(null), "UTF-8"),
        (b"{\"prompt\": \"x\", \"temperature\": NaN}".to_vec(), json!("temperature"), "column"),
        (b"{\"prompt\": \"x\", \"top_p\": -Infinity}".to_vec(), json!("top_p"), "column"),
        (b"{\"prompt\": \"x\", \"top_p\": 1e999}".to_vec(), json!("top_p"), "range"),
        (b"{\"prompt\": \"\\ud800\"}".to_vec(), json!("prompt"), "escape"),
        (b"{\"prompt\": \"x\", \"prompt\": \"y\"}".to_vec(), json!("prompt"), "twice"),
    ] {
        let answer = setup.send(post(COMPLETIONS, body)).await;
        assert_eq!((answer.status, param(&answer)), (StatusCode::BAD_REQUEST, expected), "{}", answer.text);
        assert!(answer.text.contains(word), "{}", answer.text);
    }
    still_serves(&setup).await;
}

#[tokio::test]
async fn a_large_body_is_refused_before_it_is_read() {
    let setup = ready_with(RouterSettings { max_body_bytes: 1000, ..Default::default() }, true).await;
    let declared = Request::post(COMPLETIONS)
        .header(header::CONTENT_LENGTH, 50 << 20)
        // The body is never sent, so the answer must not wait for the body.
        .body(Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>()))
        .unwrap();
    let streamed: Vec<_> = (0..20).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 100]))).collect();
    let streamed = post(COMPLETIONS, Body::from_stream(futures_util::stream::iter(streamed)));
    for request in [declared, streamed] {
        let answer = setup.send(request).await;
        assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert!(param(&answer).is_null() && answer.text.contains("1000"));
    }
    still_serves(&setup).await;
}

#[tokio::test]
async fn a_value_of_megabytes_is_not_sent_back() {
    let setup = ready().await;
    let long = "x".repeat(4 << 20);
    let mut unknown = json!({ "prompt": "a" });
    unknown[&long] = json!(1);
    let cases = [
        (COMPLETIONS, json!({ "prompt": "a", "model": long }), "model"),
        (COMPLETIONS, json!({ "prompt": "a", "temperature": long }), "temperature"),
        (COMPLETIONS, json!({ "prompt": "a", "logit_bias": { &long: 1 } }), "logit_bias"),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": [{ "type": long }] }] }),
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": "x" }], "chat_template_kwargs": { "a": long } }),
            "chat_template_kwargs",
        ),
    ];
    for (path, body, expected) in cases {
        let answer = setup.post(path, &body).await;
        assert_eq!(param(&answer), expected);
        assert!(answer.text.len() < 4096, "{expected}: {} bytes", answer.text.len());
    }
    let answer = setup.post(COMPLETIONS, &unknown).await;
    assert!(answer.status == 400 && answer.text.len() < 4096);
    still_serves(&setup).await;
}

#[tokio::test]
async fn texts_far_over_the_limit_are_refused_on_every_route() {
    let setup = ready().await;
    // The context has 64 tokens, for which texts of up to 64 KiB are encoded.
    let words = "hello ".repeat(12_000);
    for (path, body, expected) in [
        (COMPLETIONS, json!({ "prompt": words }), "prompt"),
        (CHAT, json!({ "messages": [{ "role": "user", "content": words }] }), "messages"),
        ("/tokenize", json!({ "prompt": words }), "prompt"),
        ("/tokenize", json!({ "messages": [{ "role": "user", "content": words }] }), "messages"),
        ("/detokenize", json!({ "tokens": vec![1; 65] }), "tokens"),
    ] {
        let answer = setup.post(path, &body).await;
        assert_eq!((answer.status, param(&answer)), (StatusCode::BAD_REQUEST, json!(expected)), "{path}");
    }
    // `/tokenize` counts the tokens of texts that are too long for a request.
    let answer = setup.post("/tokenize", &json!({ "prompt": "hello ".repeat(1000) })).await;
    assert_eq!(answer.json()["count"], 2000);
    still_serves(&setup).await;
}

#[tokio::test]
async fn unknown_routes_and_methods_have_openai_s_shape() {
    let setup = ready().await;
    for (method, path, status) in [
        (Method::GET, "/v1/nothing", StatusCode::NOT_FOUND),
        (Method::POST, "/v1/embeddings", StatusCode::NOT_FOUND),
        (Method::GET, COMPLETIONS, StatusCode::METHOD_NOT_ALLOWED),
        (Method::DELETE, "/v1/models", StatusCode::METHOD_NOT_ALLOWED),
        (Method::GET, "/v1/models/gpt-9", StatusCode::NOT_FOUND),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let answer = setup.send(request).await;
        assert_eq!(answer.status, status, "{path}");
        param(&answer);
    }
    still_serves(&setup).await;
}

#[tokio::test]
async fn the_conductor_s_refusal_keeps_its_field_and_status() {
    let setup = ready().await;
    for (error, status) in [
        (Error::invalid("max_tokens", "is over the KV pool"), StatusCode::BAD_REQUEST),
        (
            Error::overloaded("512 are waiting", std::time::Duration::from_secs(3)),
            StatusCode::SERVICE_UNAVAILABLE,
        ),
        (
            Error::rate_limited("60 requests in a minute", std::time::Duration::from_secs(30)),
            StatusCode::TOO_MANY_REQUESTS,
        ),
        (Error::unavailable("no worker is ready"), StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let sent = error.clone();
        setup.conductor.play(move |_| vec![Step::Fail(Status::from(sent.clone()))]);
        let answer = setup.post(COMPLETIONS, &json!({ "prompt": "x", "stream": true })).await;
        assert_eq!(answer.status, status);
        assert_eq!(param(&answer), json!(error.field()));
        let after = answer.headers.get(header::RETRY_AFTER).map(|v| v.to_str().unwrap().to_owned());
        assert_eq!(after, error.retry_after().map(|d| d.as_secs().to_string()));
    }
    setup.conductor.play(|_| support::says("ok"));
    still_serves(&setup).await;
}

#[tokio::test]
async fn before_the_model_is_known_clients_get_503_with_retry_after() {
    let setup = support::start(RouterSettings::default(), true).await;
    let answer = setup.post(COMPLETIONS, &json!({ "prompt": "x" })).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers[header::RETRY_AFTER], "1");
    assert!(param(&answer).is_null());
}
