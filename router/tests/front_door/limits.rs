//! Limits of callers and of the front door: API keys, origins, queues, and large answers.

use axum::{
    body::Body,
    http::{Request, StatusCode, header},
};
use serde_json::{Value, json};
use tonic::{Code, service::interceptor::InterceptedService, transport::Channel};
use tower::ServiceExt;
use tutti_proto::{
    cluster::v1::{FinishReason, RequestEvent, RequestSpec},
    v1::{GenerateRequest, GetModelRequest, generate_request::Prompt, inference_client::InferenceClient},
};
use tutti_router::RouterSettings;

use crate::support::{
    self, Answer, Setup, Step, connect, end, logprob, post, prompt_logprobs, ready, ready_with, tokens,
};

const PATH: &str = "/v1/completions";
/// `printf %s one | sha256sum`
const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";

/// Starts a front door with a single API key: `one`, with the name `alice` and these limits.
async fn with_key(limits: &str) -> (Setup, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys");
    std::fs::write(&file, format!("alice {ONE} {limits}\n")).unwrap();
    (ready_with(RouterSettings { api_key_file: Some(file), ..Default::default() }, true).await, directory)
}

fn with_header(mut request: Request<Body>, name: header::HeaderName, value: &'static str) -> Request<Body> {
    request.headers_mut().insert(name, header::HeaderValue::from_static(value));
    request
}

async fn ask(setup: &Setup, authorization: Option<&'static str>) -> Answer {
    let request = post(PATH, json!({ "prompt": "hello" }).to_string());
    match authorization {
        Some(value) => setup.send(with_header(request, header::AUTHORIZATION, value)).await,
        None => setup.send(request).await,
    }
}

#[tokio::test]
async fn with_keys_only_their_holders_are_served() {
    let (setup, _directory) = with_key("").await;
    for authorization in [None, Some("Bearer two"), Some("Bearer"), Some("one")] {
        let refused = ask(&setup, authorization).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{authorization:?}");
        assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
        assert_eq!(refused.headers[header::WWW_AUTHENTICATE], "Bearer");
    }
    for path in ["/v1/models", "/v1/models/tiny"] {
        let request = Request::get(path).body(Body::empty()).unwrap();
        assert_eq!(setup.send(request).await.status, StatusCode::UNAUTHORIZED);
    }
    for path in ["/v1/chat/completions", "/tokenize", "/detokenize"] {
        assert_eq!(setup.post(path, &json!({})).await.status, StatusCode::UNAUTHORIZED);
    }
    assert_eq!(setup.conductor.count(), 0);
    assert_eq!(ask(&setup, Some("Bearer one")).await.status, StatusCode::OK);
    let metrics = setup.metrics.encode();
    // The prompt has one token, and the output three.
    for line in [
        r#"tutti_router_key_requests_total{key="alice"} 1"#,
        r#"tutti_router_key_requests_in_flight{key="alice"} 0"#,
        r#"tutti_router_key_tokens_total{key="alice"} 4"#,
        "tutti_router_requests_unauthenticated_total 9",
    ] {
        assert!(metrics.lines().any(|other| other == line), "no {line} in\n{metrics}");
    }
}

#[tokio::test]
async fn a_caller_over_its_own_limit_gets_429_and_a_stream_counts_until_its_end() {
    let (mut setup, _directory) = with_key("concurrent=1").await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let body = json!({ "prompt": "a", "stream": true }).to_string();
    let request = with_header(post(PATH, body), header::AUTHORIZATION, "Bearer one");
    let running = setup.front_door.http_routes().oneshot(request).await.unwrap();
    assert_eq!(running.status(), StatusCode::OK);
    let refused = ask(&setup, Some("Bearer one")).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!((refused.headers["retry-after"].to_str().unwrap(), setup.conductor.count()), ("1", 1));
    drop(running);
    setup.cancelled.recv().await.unwrap();
    setup.conductor.play(|_| support::says("ok"));
    assert_eq!(ask(&setup, Some("Bearer one")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_key_that_has_used_its_tokens_waits_until_they_are_earned() {
    let (setup, _directory) = with_key("tokens-per-minute=3").await;
    assert_eq!(ask(&setup, Some("Bearer one")).await.status, StatusCode::OK);
    let refused = ask(&setup, Some("Bearer one")).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    let seconds: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
}

type Client<F> = InferenceClient<InterceptedService<Channel, F>>;

fn client(
    setup: &Setup,
    key: Option<&'static str>,
) -> Client<impl FnMut(tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> + Clone> {
    let channel = connect(setup.front_door.grpc_routes(&setup.health).unwrap());
    InferenceClient::with_interceptor(channel, move |mut request: tonic::Request<()>| {
        if let Some(key) = key {
            request.metadata_mut().insert("authorization", key.parse().unwrap());
        }
        Ok(request)
    })
}

#[tokio::test]
async fn grpc_takes_the_same_keys_and_limits() {
    let (setup, _directory) = with_key("requests-per-minute=2").await;
    let request = || GenerateRequest { prompt: Some(Prompt::Text("hello".into())), ..Default::default() };
    for key in [None, Some("Bearer two")] {
        let refused = client(&setup, key).generate(request()).await.err().unwrap();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let refused = client(&setup, key).get_model(GetModelRequest {}).await.err().unwrap();
        assert_eq!(refused.code(), Code::Unauthenticated);
    }
    let mut alice = client(&setup, Some("Bearer one"));
    alice.get_model(GetModelRequest {}).await.unwrap();
    alice.generate(request()).await.unwrap();
    let refused = alice.generate(request()).await.err().unwrap();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("2 requests per minute"), "{refused}");
}

#[tokio::test]
async fn a_page_of_another_origin_is_refused_unless_there_are_keys() {
    let setup = ready().await;
    let from_page = |origin| {
        let request = post(PATH, r#"{"prompt": "hello"}"#);
        let request = with_header(request, header::HOST, "127.0.0.1:8000");
        with_header(request, header::ORIGIN, origin)
    };
    let refused = setup.send(from_page("https://evil.example")).await;
    assert_eq!((refused.status, setup.conductor.count()), (StatusCode::FORBIDDEN, 0));
    let plain = with_header(from_page("http://127.0.0.1:8000"), header::CONTENT_TYPE, "text/plain");
    assert_eq!(setup.send(plain).await.status, StatusCode::FORBIDDEN);
    assert_eq!(setup.send(from_page("http://127.0.0.1:8000")).await.status, StatusCode::OK);
    let (keyed, _directory) = with_key("").await;
    let request = with_header(from_page("https://chat.example"), header::AUTHORIZATION, "Bearer one");
    assert_eq!(keyed.send(request).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_full_class_is_refused_before_any_work_and_others_are_not() {
    let mut setup =
        ready_with(RouterSettings { max_queued_choices: Some(1), ..Default::default() }, true).await;
    setup.conductor.play(|_| vec![Step::Hang]);
    let body = |priority| json!({ "prompt": "a", "stream": true, "priority": priority }).to_string();
    let send = async |priority: i32| {
        setup.front_door.http_routes().oneshot(post(PATH, body(priority))).await.unwrap()
    };
    let waiting = send(0).await;
    let refused = send(0).await;
    assert_eq!((refused.status(), setup.conductor.count()), (StatusCode::SERVICE_UNAVAILABLE, 1));
    assert_eq!(refused.headers()["retry-after"], "1");
    let others = [send(-1).await, send(1).await];
    assert!(others.iter().all(|answer| answer.status() == StatusCode::OK));
    drop((waiting, others));
    for _ in 0..3 {
        setup.cancelled.recv().await.unwrap();
    }
    // A request that has an output token no longer counts as queued.
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let mut running = Vec::new();
    for _ in 0..3 {
        let response = setup.front_door.http_routes().oneshot(post(PATH, body(0))).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let mut events = response.into_body().into_data_stream();
        futures_util::StreamExt::next(&mut events).await.unwrap().unwrap();
        running.push(events);
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_its_answer_is_counted_as_499() {
    let setup = ready().await;
    let (submitted, mut has_submitted) = tokio::sync::mpsc::channel(1);
    setup.conductor.play(move |_| {
        submitted.try_send(()).unwrap();
        vec![Step::Hang]
    });
    let mut answer = Box::pin(setup.front_door.http_routes().oneshot(post(PATH, r#"{"prompt": "a"}"#)));
    tokio::select! {
        _ = &mut answer => panic!("an answer to a request that hangs"),
        _ = has_submitted.recv() => {}
    }
    drop(answer);
    let line = r#"tutti_router_requests_total{route="/v1/completions",status="499"} 1"#;
    assert!(setup.metrics.encode().lines().any(|other| other == line), "{}", setup.metrics.encode());
}

/// A script that sends one output token. If the request asks for logprobs of the prompt, the script sends them first.
fn scored(spec: &RequestSpec) -> Vec<Step> {
    let Some(top) = spec.prompt_logprobs else { return vec![tokens(0, &[98]), end(FinishReason::Length, 1)] };
    let top: Vec<(u32, f32)> = (0..top).map(|id| (id, -1.0)).collect();
    let prompt = (1..spec.prompt.len()).map(|_| logprob(-1.5, 9, &top)).collect();
    vec![prompt_logprobs(1, prompt), tokens(0, &[97]), end(FinishReason::Length, 1)]
}

fn scores_of(choice: &Value) -> usize {
    choice["prompt_logprobs"].as_array().map_or(0, Vec::len)
}

#[tokio::test]
async fn the_logprobs_of_a_prompt_are_computed_once_and_reported_by_each_choice() {
    let setup = ready().await;
    setup.conductor.play(scored);
    let mut body = json!({ "prompt": [[1, 2, 3], [4, 5]], "n": 3, "max_tokens": 1, "prompt_logprobs": 2 });
    let whole = setup.post(PATH, &body).await.json();
    let submitted: Vec<_> = setup.conductor.submitted.lock().unwrap().drain(..).collect();
    let asked = submitted.iter().filter(|one| one.spec.as_ref().unwrap().prompt_logprobs.is_some()).count();
    assert_eq!((submitted.len(), asked), (6, 2));
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(scores_of).collect::<Vec<_>>(), [3, 3, 3, 2, 2, 2]);
    assert_eq!(choices[0]["prompt_logprobs"], choices[2]["prompt_logprobs"]);
    body["stream"] = json!(true);
    let events = setup.post(PATH, &body).await.events();
    let mut seen = [0; 6];
    for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
        seen[choice["index"].as_u64().unwrap() as usize] += scores_of(choice);
    }
    assert_eq!(seen, [3, 3, 3, 2, 2, 2]);
    // With an echo, each choice reports the logprobs of its prompt as well.
    let body = json!({ "prompt": [1, 2, 3], "n": 2, "max_tokens": 1, "echo": true, "logprobs": 1 });
    let whole = setup.post(PATH, &body).await.json();
    for choice in whole["choices"].as_array().unwrap() {
        assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.5, -1.5, null]));
    }
}

#[tokio::test]
async fn an_answer_that_would_be_huge_is_refused_by_name_before_any_work() {
    let setup = ready_with(RouterSettings { max_prompt_logprobs: 100, ..Default::default() }, true).await;
    for (body, field) in [
        (json!({ "prompt": vec![1; 10], "n": 4, "prompt_logprobs": 2 }), "prompt_logprobs"),
        (json!({ "prompt": "hello".repeat(10), "n": 4, "prompt_logprobs": 2 }), "prompt_logprobs"),
        (json!({ "prompt": vec![vec![1; 10]; 4], "prompt_logprobs": 2 }), "prompt_logprobs"),
        (json!({ "prompt": vec![1; 10], "n": 4, "echo": true, "logprobs": 2 }), "logprobs"),
    ] {
        let refused = setup.post(PATH, &body).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text);
        assert_eq!(refused.json()["error"]["param"], field);
        assert!(refused.text.contains("120") && refused.text.contains("100"), "{}", refused.text);
    }
    assert_eq!(setup.conductor.count(), 0);
    setup.conductor.play(scored);
    let body = json!({ "prompt": vec![1; 10], "n": 3, "prompt_logprobs": 2 });
    assert_eq!(setup.post(PATH, &body).await.status, StatusCode::OK);
}

/// Without this limit, a request of a few bytes could cause an answer of gigabytes, which stays in memory until its
/// end.
#[tokio::test]
async fn an_answer_of_too_many_output_logprobs_is_refused_by_name() {
    let setup = ready_with(RouterSettings { max_output_logprobs: 100, ..Default::default() }, true).await;
    for body in [
        json!({ "prompt": [1], "n": 4, "max_tokens": 10, "logprobs": 2 }),
        json!({ "prompt": [1], "n": 4, "max_tokens": 10, "logprobs": 2, "stream": true }),
        json!({ "prompt": [[1], [2], [3], [4]], "max_tokens": 10, "logprobs": 2 }),
    ] {
        let refused = setup.post(PATH, &body).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text);
        assert_eq!(refused.json()["error"]["param"], "logprobs");
        assert!(refused.text.contains("120") && refused.text.contains("100"), "{}", refused.text);
    }
    assert_eq!(setup.conductor.count(), 0);
    // Without max_tokens, the limit of output tokens is the rest of the context.
    let chat =
        json!({ "messages": [{ "role": "user", "content": "x" }], "logprobs": true, "top_logprobs": 20 });
    let refused = setup.post("/v1/chat/completions", &chat).await;
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (StatusCode::BAD_REQUEST, &json!("top_logprobs"))
    );
}

#[tokio::test]
async fn a_large_answer_is_whole_and_a_bound_holds_for_all_of_them() {
    let setup = ready_with(RouterSettings { reader_timeout_ms: 200, ..Default::default() }, true).await;
    setup.conductor.play(scored);
    let body = json!({ "prompt": vec![1; 60], "n": 2, "max_tokens": 1, "prompt_logprobs": 20 });
    let answer = setup.post(PATH, &body).await;
    assert!(answer.text.len() > 64 << 10, "{} bytes", answer.text.len());
    assert_eq!(answer.headers[header::CONTENT_LENGTH], answer.text.len().to_string());
    assert_eq!((answer.status, scores_of(&answer.json()["choices"][0])), (StatusCode::OK, 60));
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = setup.post(PATH, &streamed).await.events();
    assert_eq!(events.iter().map(|event| scores_of(&event["choices"][0])).sum::<usize>(), 120);

    let narrow = RouterSettings { reader_timeout_ms: 200, max_unread_bytes: 64 << 10, ..Default::default() };
    let setup = ready_with(narrow, true).await;
    setup.conductor.play(scored);
    let held = setup.front_door.http_routes().oneshot(post(PATH, body.to_string())).await.unwrap();
    assert_eq!(held.status(), StatusCode::OK);
    let refused = setup.post(PATH, &body).await;
    assert_eq!(
        (refused.status, refused.headers.contains_key("retry-after")),
        (StatusCode::SERVICE_UNAVAILABLE, true)
    );
    drop(held);
    assert_eq!(setup.post(PATH, &body).await.status, StatusCode::OK);
}

/// Output tokens with 20 alternatives each.
fn with_alternatives(count: usize) -> Step {
    let top: Vec<(u32, f32)> = (0..20).map(|id| (id, -1.0)).collect();
    let sampled = |index| {
        let mut sampled = support::token(index, 97);
        sampled.logprob = Some(logprob(-0.5, 1, &top));
        sampled
    };
    Step::Event(RequestEvent { tokens: (0..count).map(sampled).collect(), ..Default::default() })
}

#[tokio::test]
async fn answers_that_are_not_streamed_share_a_room_and_the_largest_ends() {
    // An answer of 60 tokens has 12,000 bytes, and one of 10 has 2,000.
    let narrow = RouterSettings { max_unread_bytes: 13_000, ..Default::default() };
    let setup = ready_with(narrow, true).await;
    let metric = |name: &str| {
        let text = setup.metrics.encode();
        let value =
            text.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
        value.unwrap_or_else(|| panic!("no {name} in {text}")).parse::<u64>().unwrap()
    };
    let (held, ended) = ("tutti_router_unread_output_bytes", "tutti_router_unread_output_ended_total");
    let body = |tokens: usize| json!({ "prompt": "a", "max_tokens": tokens, "logprobs": 20 });
    setup.conductor.play(|spec| match spec.stopping.as_ref().unwrap().max_tokens {
        10 => vec![with_alternatives(10), Step::Hang],
        more => vec![with_alternatives(more as usize), end(FinishReason::Length, more as usize)],
    });
    let waiting = body(10);
    let mut small = Box::pin(setup.post(PATH, &waiting));
    while metric(held) == 0 {
        assert!(futures_util::poll!(small.as_mut()).is_pending());
        tokio::task::yield_now().await;
    }
    // Alone, this answer has room. With the other one it has none, and it is the larger one.
    let refused = setup.post(PATH, &body(60)).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{}", refused.text);
    assert!(refused.headers.contains_key("retry-after") && refused.text.contains("max_unread_bytes"));
    assert_eq!(metric(ended), 1);
    assert!(futures_util::poll!(small.as_mut()).is_pending());
    drop(small);
    assert_eq!(setup.post(PATH, &body(60)).await.status, StatusCode::OK);
    assert_eq!((metric(held), metric(ended)), (0, 1));
}

#[tokio::test]
async fn a_list_of_millions_is_refused_over_http() {
    let setup = ready().await;
    let body = format!(r#"{{"prompt": [{}]}}"#, vec![r#""""#; 1_000_000].join(","));
    let refused = setup.send(post(PATH, body)).await;
    assert!(
        refused.status == StatusCode::BAD_REQUEST && refused.text.contains("1024 items"),
        "{}",
        refused.text
    );
}
