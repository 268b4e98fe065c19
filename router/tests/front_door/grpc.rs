//! `tutti.v1.Inference`, health and reflection over gRPC.

use std::collections::HashMap;

use tokio_stream::StreamExt;
use tonic::{Code, Request, Status, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};
use tutti_proto::{
    cluster::v1::{FinishReason, RequestEvent, Thinking},
    v1::{
        Chat, ChatMessage, Constraint, GenerateRequest, GenerateResponse, GetModelRequest, Output, Sampling,
        Stopping, TokenIds, Usage, constraint::Kind, finish, generate_request::Prompt,
        inference_client::InferenceClient,
    },
};
use tutti_router::RouterSettings;
use tutti_runtime::{Error, health::State};

use crate::support::{self, Setup, Step, connect, end, logprob, prompt_logprobs, ready, says, token, tokens};

fn channel(setup: &Setup) -> Channel {
    connect(setup.front_door.grpc_routes(&setup.health).unwrap())
}

fn client(setup: &Setup) -> InferenceClient<Channel> {
    InferenceClient::new(channel(setup))
}

pub fn text(text: &str) -> GenerateRequest {
    GenerateRequest { prompt: Some(Prompt::Text(text.into())), ..Default::default() }
}

pub async fn generate(setup: &Setup, request: GenerateRequest) -> Result<Vec<GenerateResponse>, Status> {
    client(setup).generate(request).await?.into_inner().collect().await
}

#[tokio::test]
async fn text_in_and_out_with_usage_in_the_last_message() {
    let setup = ready().await;
    setup.conductor.play(|_| says("é!"));
    let got = generate(&setup, GenerateRequest { n: Some(2), ..text("hello") }).await.unwrap();
    for index in 0..2 {
        let mine: Vec<_> = got.iter().filter(|m| m.index == index).collect();
        assert_eq!(mine.iter().map(|m| m.text.as_str()).collect::<String>(), "é!");
        let ids: Vec<u32> = mine.iter().flat_map(|m| m.token_ids.clone()).collect();
        assert_eq!(ids, [195, 169, 33, 261]);
        let finishes: Vec<_> = mine.iter().filter_map(|m| m.finish.clone()).collect();
        assert_eq!(finishes.len(), 1);
        assert_eq!((finishes[0].reason(), &finishes[0].matched), (finish::Reason::Stop, &None));
    }
    assert!(got.iter().all(|m| m.id == got[0].id));
    let (last, before) = got.split_last().unwrap();
    assert!(before.iter().all(|m| m.usage.is_none()));
    assert_eq!(last.usage, Some(Usage { prompt_tokens: 1, completion_tokens: 8, cached_tokens: 0 }));
}

#[tokio::test]
async fn chat_is_rendered_by_the_template_and_a_stop_is_reported() {
    let mut setup = ready().await;
    setup.conductor.play(|_| vec![tokens(0, &[97, 46, 98]), Step::Hang]);
    let message = ChatMessage { role: "user".into(), content: "x".into() };
    let request = GenerateRequest {
        prompt: Some(Prompt::Chat(Chat { messages: vec![message] })),
        stopping: Some(Stopping { stop: vec![".".into()], max_tokens: Some(8), ..Default::default() }),
        ..Default::default()
    };
    let got = generate(&setup, request).await.unwrap();
    let finish = got[0].finish.clone().unwrap();
    assert_eq!((got[0].text.as_str(), finish.matched), ("a", Some(finish::Matched::Stop(".".into()))));
    assert_eq!(setup.conductor.last().spec.unwrap().prompt[0], 262);
    setup.cancelled.recv().await.unwrap();
}

#[tokio::test]
async fn a_constraint_of_a_chat_begins_behind_its_reasoning() {
    let setup = support::ready_for("{{ messages[0].content }}<think>\n{# </think> #}", &["</think>"]).await;
    let chat = Chat { messages: vec![ChatMessage { role: "user".into(), content: "x".into() }] };
    let text = Prompt::Text("x<think>\n".into());
    for (prompt, is_inside) in [(Prompt::Chat(chat), true), (text, false)] {
        let constraint = Constraint { kind: Some(Kind::Regex("a".into())), ..Default::default() };
        let request =
            GenerateRequest { prompt: Some(prompt), constraint: Some(constraint), ..Default::default() };
        generate(&setup, request).await.unwrap();
        let thinking = setup.conductor.last().spec.unwrap().thinking;
        assert_eq!(thinking, is_inside.then_some(Thinking { begin: None, end: 264, max_tokens: None }));
    }
}

#[tokio::test]
async fn a_salt_is_passed_on_and_an_empty_one_is_refused() {
    let setup = ready().await;
    let mut salts = Vec::new();
    for salt in [None, Some("a"), Some("b")] {
        let prompt = Some(Prompt::TokenIds(TokenIds { ids: vec![97] }));
        let request = GenerateRequest { prompt, cache_salt: salt.map(Into::into), ..Default::default() };
        generate(&setup, request).await.unwrap();
        salts.push(setup.conductor.last().spec.unwrap().cache_salt);
    }
    assert_eq!((salts[0].len(), salts[1].len(), salts[2].len()), (0, 16, 16));
    assert_ne!(salts[1], salts[2]);
    let prompt = Some(Prompt::TokenIds(TokenIds { ids: vec![97] }));
    let request = GenerateRequest { prompt, cache_salt: Some(String::new()), ..Default::default() };
    let refused = generate(&setup, request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(Error::from(refused).field(), Some("cache_salt"));
}

#[tokio::test]
async fn an_echo_repeats_the_prompt_with_its_logprobs() {
    let setup = ready().await;
    setup.conductor.play(|_| {
        let mut sampled = token(0, 98);
        sampled.logprob = Some(logprob(-0.5, 1, &[(98, -0.5)]));
        vec![
            prompt_logprobs(1, vec![logprob(-1.0, 3, &[(97, -0.25)])]),
            Step::Event(RequestEvent { tokens: vec![sampled], ..Default::default() }),
            end(FinishReason::Length, 1),
        ]
    });
    let request = GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![259, 97] })),
        output: Some(Output {
            echo: true,
            logprobs: Some(1),
            prompt_logprobs: Some(1),
            ..Default::default()
        }),
        ..Default::default()
    };
    let got = generate(&setup, request).await.unwrap();
    assert_eq!((got[0].text.as_str(), &got[0].token_ids[..]), ("helloab", &[259, 97, 98][..]));
    let logprobs: Vec<_> = got[0].logprobs.iter().map(|l| (l.token.as_str(), l.logprob, l.rank)).collect();
    assert_eq!(logprobs, [("hello", None, 0), ("a", Some(-1.0), 3), ("b", Some(-0.5), 1)]);
    assert_eq!(got[0].prompt_logprobs.len(), 2);
}

#[tokio::test]
async fn errors_name_the_proto_s_fields_and_the_next_request_is_served() {
    let setup = ready().await;
    let sampling = |sampling| GenerateRequest { sampling: Some(sampling), ..text("x") };
    let stopping = |stopping| GenerateRequest { stopping: Some(stopping), ..text("x") };
    let ids =
        |ids| GenerateRequest { prompt: Some(Prompt::TokenIds(TokenIds { ids })), ..Default::default() };
    for (request, field) in [
        (GenerateRequest::default(), "prompt"),
        (text(""), "text"),
        (ids(vec![]), "token_ids"),
        (ids(vec![270]), "token_ids"),
        (ids(vec![1; 65]), "token_ids"),
        (
            GenerateRequest { prompt: Some(Prompt::Chat(Chat::default())), ..Default::default() },
            "chat.messages",
        ),
        (sampling(Sampling { temperature: Some(f32::NAN), ..Default::default() }), "sampling.temperature"),
        (sampling(Sampling { top_p: Some(f32::INFINITY), ..Default::default() }), "sampling.top_p"),
        (
            sampling(Sampling { logit_bias: HashMap::from([(270, 1.0)]), ..Default::default() }),
            "sampling.logit_bias",
        ),
        (stopping(Stopping { max_tokens: Some(64), ..Default::default() }), "stopping.max_tokens"),
        (stopping(Stopping { min_tokens: 17, ..Default::default() }), "stopping.min_tokens"),
        (stopping(Stopping { stop: vec![String::new()], ..Default::default() }), "stopping.stop"),
        (
            GenerateRequest {
                output: Some(Output { logprobs: Some(21), ..Default::default() }),
                ..text("x")
            },
            "output.logprobs",
        ),
        (GenerateRequest { n: Some(129), ..text("x") }, "n"),
        (GenerateRequest { priority: 9, ..text("x") }, "priority"),
    ] {
        let status = generate(&setup, request).await.unwrap_err();
        let error = Error::from(status.clone());
        assert_eq!((status.code(), error.field()), (Code::InvalidArgument, Some(field)), "{error}");
    }
    let unknown = generate(&setup, GenerateRequest { model: "gpt-9".into(), ..text("x") }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    assert_eq!(setup.conductor.count(), 0);
    assert!(generate(&setup, text("hello")).await.is_ok());
}

#[tokio::test]
async fn the_earlier_of_both_deadlines_goes_to_the_conductor() {
    let setup = ready().await;
    let mut request = Request::new(GenerateRequest { timeout_ms: Some(60_000), ..text("x") });
    request.set_timeout(std::time::Duration::from_millis(2500));
    client(&setup).generate(request).await.unwrap();
    // The conductor gets the time that remains of the shorter timeout.
    assert!((1..=2500).contains(&setup.conductor.last().timeout_ms.unwrap()));
    request = Request::new(GenerateRequest { timeout_ms: Some(20_000), ..text("x") });
    request.set_timeout(std::time::Duration::from_secs(60));
    client(&setup).generate(request).await.unwrap();
    assert!((2501..=20_000).contains(&setup.conductor.last().timeout_ms.unwrap()));
    generate(&setup, GenerateRequest { priority: -3, ..text("x") }).await.unwrap();
    let last = setup.conductor.last();
    assert_eq!((last.timeout_ms, last.spec.unwrap().priority), (None, -3));
}

#[tokio::test]
async fn a_request_without_time_left_is_refused_before_any_work() {
    let setup = ready().await;
    let status = generate(&setup, GenerateRequest { timeout_ms: Some(0), ..text("x") }).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    let mut request = Request::new(text("x"));
    request.metadata_mut().insert("grpc-timeout", "0m".parse().unwrap());
    let status = client(&setup).generate(request).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert_eq!(setup.conductor.count(), 0);
}

#[tokio::test]
async fn a_failure_after_the_first_token_is_the_stream_s_status() {
    let setup = ready().await;
    setup
        .conductor
        .play(|_| vec![tokens(0, &[97]), Step::Fail(Status::deadline_exceeded("70 ms have passed"))]);
    let mut stream = client(&setup).generate(text("x")).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().text, "a");
    assert_eq!(stream.message().await.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test]
async fn a_client_that_leaves_cancels() {
    let mut setup = ready().await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Hang]);
    let mut stream = client(&setup).generate(text("x")).await.unwrap().into_inner();
    stream.message().await.unwrap();
    drop(stream);
    setup.cancelled.recv().await.unwrap();
}

#[tokio::test]
async fn the_model_is_described() {
    let setup = ready().await;
    let model = client(&setup).get_model(GetModelRequest {}).await.unwrap().into_inner();
    assert_eq!((model.name.as_str(), model.vocab_size, model.eos_token_ids), ("tiny", 270, vec![261]));
    assert!(model.has_tokenizer && model.has_chat_template);
    let unknown = support::start(RouterSettings::default(), true).await;
    let status = client(&unknown).get_model(GetModelRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

#[tokio::test]
async fn health_follows_readiness() {
    let setup = support::start(RouterSettings::default(), true).await;
    let request = HealthCheckRequest { service: "tutti.v1.Inference".into() };
    let mut watch = HealthClient::new(channel(&setup)).watch(request).await.unwrap().into_inner();
    let mut wait_for = async |wanted: ServingStatus| {
        while watch.message().await.unwrap().unwrap().status() != wanted {}
    };
    wait_for(ServingStatus::NotServing).await;
    setup.health.set_ready(State::Ok);
    wait_for(ServingStatus::Serving).await;
    setup.health.set_ready(State::Not("draining".into()));
    wait_for(ServingStatus::NotServing).await;
}

#[tokio::test]
async fn reflection_lists_the_clients_services_and_no_others() {
    let setup = ready().await;
    let message_request = Some(MessageRequest::ListServices(String::new()));
    let request = ServerReflectionRequest { host: String::new(), message_request };
    let mut client = ServerReflectionClient::new(channel(&setup));
    let answers = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap();
    let answer = answers.into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("no list")
    };
    let mut names: Vec<String> = list.service.into_iter().map(|s| s.name).collect();
    names.sort();
    assert_eq!(names, ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "tutti.v1.Inference"]);
}
