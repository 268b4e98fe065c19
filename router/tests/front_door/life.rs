//! Requests that do not end normally: clients that leave, errors in the middle of a stream, too many requests at once.

use axum::http::StatusCode;
use futures_util::{FutureExt, StreamExt};
use serde_json::json;
use tonic::Status;
use tower::ServiceExt;
use tutti_router::{RouterSettings, check_checkpoint};
use tutti_runtime::{checkpoint::Checkpoint, health::State};

use crate::support::{self, Step, post, ready, ready_with, tokens};

const PATH: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_client_that_leaves_a_stream_cancels_all_its_choices() {
    let mut setup = ready().await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let body = json!({ "prompt": ["a", "b"], "n": 2, "stream": true }).to_string();
    let response = setup.front_door.http_routes().oneshot(post(PATH, body)).await.unwrap();
    let mut events = response.into_body().into_data_stream();
    for _ in 0..4 {
        events.next().await.unwrap().unwrap();
    }
    assert!(setup.cancelled.recv().now_or_never().is_none());
    drop(events);
    for _ in 0..4 {
        setup.cancelled.recv().await.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_whole_answer_cancels_it_too() {
    let mut setup = ready().await;
    let (submitted, mut has_submitted) = tokio::sync::mpsc::channel(1);
    setup.conductor.play(move |_| {
        submitted.try_send(()).unwrap();
        vec![tokens(0, &[97]), Step::Hang]
    });
    let mut answer = Box::pin(setup.front_door.http_routes().oneshot(post(PATH, r#"{"prompt": "a"}"#)));
    tokio::select! {
        _ = &mut answer => panic!("an answer to a request that hangs"),
        _ = has_submitted.recv() => {}
    }
    drop(answer);
    setup.cancelled.recv().await.unwrap();
}

#[tokio::test]
async fn an_error_in_a_stream_is_an_event_and_no_done_follows() {
    let mut setup = ready().await;
    setup.conductor.play(|spec| match spec.prompt[0] {
        97 => vec![tokens(0, &[104, 105]), Step::Fail(Status::internal("the worker lost its device"))],
        _ => vec![Step::Hang],
    });
    let answer = setup.post(PATH, &json!({ "prompt": ["a", "b"], "stream": true })).await;
    assert_eq!(answer.status, StatusCode::OK);
    let events = answer.events();
    assert_eq!(events[0]["choices"][0]["text"], "hi");
    assert_eq!(events[1]["error"]["type"], "server_error");
    assert_eq!(events.len(), 2, "{}", answer.text);
    // The other choice is cancelled, since the request has ended.
    setup.cancelled.recv().await.unwrap();
    let whole = setup.post(PATH, &json!({ "prompt": "a" })).await;
    assert_eq!(whole.status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn priority_and_deadline_go_to_the_conductor_from_both_routes() {
    let setup = ready().await;
    for (path, body) in [
        (PATH, json!({ "prompt": "a", "priority": -8, "timeout_ms": 60_000 })),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": "a" }], "priority": 8, "timeout_ms": 60_000 }),
        ),
    ] {
        assert_eq!(setup.post(path, &body).await.status, StatusCode::OK);
        let submitted = setup.conductor.last();
        assert_eq!(i64::from(submitted.spec.unwrap().priority), body["priority"]);
        // The conductor gets the time that remains of the client's timeout.
        assert!((1..=60_000).contains(&submitted.timeout_ms.unwrap()));
    }
    assert_eq!(setup.post(PATH, &json!({ "prompt": "a" })).await.status, StatusCode::OK);
    let submitted = setup.conductor.last();
    assert_eq!((submitted.spec.unwrap().priority, submitted.timeout_ms), (0, None));
}

#[tokio::test]
async fn a_deadline_is_a_status_or_an_event_of_a_stream_that_has_begun() {
    let setup = ready().await;
    let late = || Step::Fail(Status::deadline_exceeded("the request was not done within 60000 ms"));
    setup.conductor.play(move |_| vec![tokens(0, &[97]), late()]);
    let whole = setup.post(PATH, &json!({ "prompt": "a", "timeout_ms": 60_000 })).await;
    assert_eq!(whole.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(whole.json()["error"]["code"], "deadline_exceeded");
    let streamed = setup.post(PATH, &json!({ "prompt": "a", "timeout_ms": 60_000, "stream": true })).await;
    assert_eq!(streamed.status, StatusCode::OK);
    assert_eq!(streamed.events().last().unwrap()["error"]["code"], "deadline_exceeded");
    // A timeout of 0 is refused with a status, even for a stream, since no stream has begun.
    let submitted = setup.conductor.count();
    for stream in [false, true] {
        let body = json!({ "prompt": "a", "timeout_ms": 0, "stream": stream });
        let refused = setup.post(PATH, &body).await;
        assert_eq!(refused.status, StatusCode::GATEWAY_TIMEOUT);
        assert_eq!(refused.json()["error"]["param"], "timeout_ms");
    }
    assert_eq!(setup.conductor.count(), submitted);
    let metrics = setup.metrics.encode();
    for line in [
        r#"tutti_router_generations_total{outcome="deadline_exceeded"} 4"#,
        r#"tutti_router_generations_refused_total{reason="deadline"} 2"#,
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
}

#[tokio::test]
async fn a_stream_that_stops_without_an_end_is_an_error() {
    let setup = ready().await;
    setup.conductor.play(|_| vec![tokens(0, &[97])]);
    let answer = setup.post(PATH, &json!({ "prompt": "a", "stream": true })).await;
    assert!(answer.text.contains("\"error\"") && !answer.text.contains("[DONE]"), "{}", answer.text);
}

#[tokio::test]
async fn a_lost_token_is_an_error_and_not_a_shorter_text() {
    let setup = ready().await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), tokens(2, &[98])]);
    let answer = setup.post(PATH, &json!({ "prompt": "a" })).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer.text.contains("received output token 2, expected 1"), "{}", answer.text);
}

#[tokio::test]
async fn running_choices_are_bounded_and_permits_come_back() {
    let mut setup =
        ready_with(RouterSettings { max_concurrent_choices: 3, ..Default::default() }, true).await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let body = json!({ "prompt": "a", "n": 2, "stream": true }).to_string();
    let running = setup.front_door.http_routes().oneshot(post(PATH, body)).await.unwrap();
    let refused = setup.post(PATH, &json!({ "prompt": "a", "n": 2 })).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.json()["error"]["code"], "server_overloaded");
    // A request with more choices than the limit can never be served, so the error is an invalid argument.
    let impossible = setup.post(PATH, &json!({ "prompt": "a", "n": 4 })).await;
    assert_eq!(impossible.status, StatusCode::BAD_REQUEST);
    drop(running);
    setup.cancelled.recv().await.unwrap();
    setup.conductor.play(|_| support::says("ok"));
    assert_eq!(setup.post(PATH, &json!({ "prompt": "a", "n": 3 })).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_conductor_without_a_tokenizer_is_never_ready_and_says_why() {
    let setup = support::start(RouterSettings::default(), false).await;
    tokio::spawn(setup.front_door.clone().follow(setup.health.clone()));
    let mut state = setup.health.watch_ready();
    let names_the_file = |state: &State| matches!(state, State::Not(why) if why.contains("tokenizer.json"));
    state.wait_for(names_the_file).await.unwrap();
    let answer = setup.post(PATH, &json!({ "prompt": [1] })).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn a_front_door_is_idle_when_no_generation_is_running() {
    let setup = ready().await;
    assert!(setup.front_door.is_idle());
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let body = r#"{"prompt": "a", "stream": true}"#;
    let running = setup.front_door.http_routes().oneshot(post(PATH, body)).await.unwrap();
    assert!(!setup.front_door.is_idle());
    // The process drains. Clients that connect now get this reason, and a time after which to try again.
    let front = setup.front_door.front(setup.health.clone()).unwrap();
    assert!(!(front.is_idle)());
    let refused = front.refusals.oneshot(post(PATH, body)).await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.headers()["retry-after"], "1");
    let said = axum::body::to_bytes(refused.into_body(), usize::MAX).await.unwrap();
    assert!(String::from_utf8_lossy(&said).contains("draining"), "{said:?}");
    drop(running);
    while !(front.is_idle)() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn requests_and_tokens_are_counted() {
    let setup = ready().await;
    setup.post(PATH, &json!({ "prompt": "hello" })).await;
    setup.post(PATH, &json!({ "prompt": "" })).await;
    setup.conductor.play(|_| vec![Step::Fail(Status::internal("no")), tokens(0, &[97])]);
    setup.post(PATH, &json!({ "prompt": "hello" })).await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let body = r#"{"prompt": "hello", "stream": true}"#;
    drop(setup.front_door.http_routes().oneshot(post(PATH, body)).await.unwrap());
    let text = setup.metrics.encode();
    for line in [
        "tutti_router_generations_total{outcome=\"finished\"} 1",
        "tutti_router_generations_total{outcome=\"refused\"} 2",
        "tutti_router_generations_total{outcome=\"cancelled\"} 1",
        "tutti_router_requests_total{route=\"/v1/completions\",status=\"200\"} 2",
        "tutti_router_requests_total{route=\"/v1/completions\",status=\"400\"} 1",
        "tutti_router_requests_in_flight 0",
        "tutti_router_prompt_tokens_total 2",
        "tutti_router_generated_tokens_total 3",
        "tutti_router_time_to_first_token_seconds_count 1",
        "tutti_router_inter_token_latency_seconds_count 2",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
    }
}

#[tokio::test]
async fn models_and_tokens_are_reported() {
    let setup = ready().await;
    let get = |path: &str| axum::http::Request::get(path).body(axum::body::Body::empty()).unwrap();
    let models = setup.send(get("/v1/models")).await.json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("tiny"), &json!(64)));
    assert_eq!(models["data"][0]["input_modalities"], json!(["text"]));
    assert_eq!(models["data"][0]["max_body_bytes"], json!(32 << 20));
    assert_eq!(setup.send(get("/v1/models/tiny")).await.json()["object"], "model");
    let body = json!({ "prompt": "hello é", "return_token_strs": true });
    let tokens = setup.post("/tokenize", &body).await.json();
    let expected = json!({ "count": 4, "max_model_len": 64, "tokens": [259, 32, 195, 169],
        "token_strs": ["hello", "Ġ", "Ã", "©"] });
    assert_eq!(tokens, expected);
    let text = setup.post("/detokenize", &json!({ "tokens": [259, 262] })).await.json();
    assert_eq!(text, json!({ "prompt": "hello<|role|>" }));
    let chat = json!({ "messages": [{ "role": "user", "content": "hello" }] });
    assert_eq!(setup.post("/tokenize", &chat).await.json()["tokens"][0], 262);
    for (path, body, field) in [
        ("/tokenize", json!({}), "prompt"),
        ("/detokenize", json!({ "tokens": [270] }), "tokens"),
        ("/detokenize", json!({ "tokens": "x" }), "tokens"),
    ] {
        let answer = setup.post(path, &body).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (StatusCode::BAD_REQUEST, &json!(field))
        );
    }
}

#[tokio::test]
async fn a_front_door_with_parsed_text_fetches_no_files() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    std::fs::write(directory.path().join("tokenizer.json"), support::tokenizer::byte_level()).unwrap();
    let text =
        check_checkpoint(&Checkpoint::open(directory.path(), "tiny").unwrap(), &RouterSettings::default())
            .unwrap();
    // The conductor has no tokenizer file.
    let setup = support::start_with(RouterSettings::default(), false, Some(text)).await;
    tokio::spawn(setup.front_door.clone().follow(setup.health.clone()));
    setup.health.watch_ready().wait_for(|state| *state == State::Ok).await.unwrap();
    let answer = setup.post(PATH, &json!({ "prompt": "hello" })).await;
    assert_eq!((answer.status, setup.conductor.last().spec.unwrap().prompt), (StatusCode::OK, vec![259]));
}
