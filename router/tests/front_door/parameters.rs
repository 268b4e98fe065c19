//! Every declared parameter on both of the router's interfaces: below, at and above its bounds, and of the wrong type.

use axum::http::StatusCode;
use serde_json::{Value, json};
use tonic::Code;
use tutti_proto::{
    parameters::{
        self, BIAS, BIASES, Bounded, Count, Integers, Kind, LOGPROBS, N, NUMBERS, Numbers, PRIORITY,
        PROMPT_LOGPROBS, Parameter, STOP_BYTES, STOP_TOKEN_IDS, STOPS, Scope, Standing,
    },
    v1::{GenerateRequest, Output, Sampling, Stopping},
};
use tutti_runtime::Error;

use crate::{
    grpc::{generate, text},
    support::{Setup, ready},
};

/// Values of a parameter over HTTP.
#[derive(Default)]
struct Values {
    good: Vec<Value>,
    /// Values out of range, each with a text that the error must contain.
    outside: Vec<(Value, String)>,
    wrong: Vec<Value>,
}

fn ends(range: Numbers) -> ([f32; 2], [f32; 2]) {
    let (least, below) = match range.excludes_low {
        true => (range.low.next_up(), range.low),
        false => (range.low, range.low.next_down()),
    };
    ([least, range.high], [below, range.high.next_up()])
}

fn list(count: Count, item: &Value) -> (Value, (Value, String)) {
    let (most, more) = (vec![item.clone(); count.most], vec![item.clone(); count.most + 1]);
    (json!(most), (json!(more), format!("at most {}", count.most)))
}

fn honoured(kind: Kind) -> Values {
    match kind {
        Kind::Number(range) => {
            let (inside, outside) = ends(range);
            Values {
                good: inside.map(|value| json!(value)).to_vec(),
                outside: outside.map(|value| (json!(value), value.to_string())).to_vec(),
                wrong: vec![json!("1"), json!(true), json!([1])],
            }
        }
        Kind::Integer(range) => Values {
            // Larger upper bounds are not tested: they depend on the model's context, or are too large for a test.
            good: if range.high < 1000 { vec![json!(range.low), json!(range.high)] } else { vec![] },
            outside: [range.low - 1, range.high + 1].map(|value| (json!(value), value.to_string())).to_vec(),
            wrong: vec![json!("1"), json!(1.5), json!(false)],
        },
        Kind::Seed => Values {
            good: vec![json!(i64::MIN), json!(u64::MAX)],
            wrong: vec![json!("1"), json!(1.5)],
            ..Values::default()
        },
        Kind::Boolean => Values { good: vec![], wrong: vec![json!(1), json!("true")], ..Values::default() },
        Kind::Text => Values { wrong: vec![json!(1), json!(["a"])], ..Values::default() },
        Kind::Stops => {
            let (most, more) = list(STOPS.range, &json!("x"));
            let bytes = STOP_BYTES.range.most;
            Values {
                good: vec![json!("x".repeat(bytes)), most],
                outside: vec![more, (json!("x".repeat(bytes + 1)), format!("at most {bytes}"))],
                wrong: vec![json!(1), json!([1]), json!({})],
            }
        }
        Kind::TokenIds(Some(count)) => {
            let (most, more) = list(count, &json!(1));
            Values { good: vec![most], outside: vec![more], wrong: vec![json!("1"), json!(["1"])] }
        }
        Kind::Biases(count, each) => {
            let (inside, outside) = ends(each);
            let many: serde_json::Map<_, _> = (0..=count.most).map(|id| (id.to_string(), json!(1))).collect();
            let mut outside: Vec<_> =
                outside.map(|value| (json!({ "1": value }), value.to_string())).to_vec();
            outside.push((many.into(), format!("at most {}", count.most)));
            outside.push((json!({ "1": 1, "01": 1 }), "twice".into()));
            Values {
                good: inside.map(|value| json!({ "1": value })).to_vec(),
                outside,
                wrong: vec![json!(1), json!([1]), json!({ "a": 1 }), json!({ "1": "a" })],
            }
        }
        Kind::Object | Kind::Objects | Kind::Prompt | Kind::Content | Kind::TextOrObject | Kind::TokenIds(None) => {
            Values { wrong: vec![json!(1), json!(true)], ..Values::default() }
        }
        Kind::Any => Values::default(),
    }
}

fn values(parameter: &Parameter) -> Values {
    let any = json!({ "a": 1 });
    match parameter.standing {
        Standing::Honoured => honoured(parameter.kind),
        Standing::Refused { why, harmless } => Values {
            good: harmless.iter().map(|json| serde_json::from_str(json).unwrap()).collect(),
            outside: vec![(any, why.into())],
            wrong: vec![],
        },
        Standing::RefusedUnless(_) => {
            Values { good: vec![json!(1)], outside: vec![(json!(2), "2".into())], wrong: vec![any] }
        }
        Standing::Ignored => Values { good: vec![any, json!(1)], ..Values::default() },
    }
}

async fn post(setup: &Setup, scope: Scope, name: &str, value: &Value) -> (StatusCode, Value) {
    let (path, mut body) = match scope {
        Scope::Chat => ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "x" }] })),
        _ => ("/v1/completions", json!({ "prompt": "hello", "max_tokens": 2 })),
    };
    let members = body.as_object_mut().unwrap();
    // Adds a second parameter where this parameter requires one.
    if name == "top_logprobs" {
        members.insert("logprobs".into(), json!(true));
    }
    if name == "stream_options" {
        members.insert("stream".into(), json!(true));
    }
    members.insert(name.into(), value.clone());
    let answer = setup.post(path, &body).await;
    let error = if answer.status == StatusCode::OK { Value::Null } else { answer.json()["error"].clone() };
    (answer.status, error)
}

#[tokio::test]
async fn every_declared_parameter_is_checked_over_http() {
    let setup = ready().await;
    for scope in [Scope::Completions, Scope::Chat] {
        for parameter in parameters::at(scope) {
            let (name, values) = (parameter.name, values(parameter));
            for value in values.good {
                let (status, error) = post(&setup, scope, name, &value).await;
                assert_eq!(status, StatusCode::OK, "{scope:?} {name} {value}: {error}");
            }
            for (value, words) in values.outside {
                let (status, error) = post(&setup, scope, name, &value).await;
                assert_eq!(
                    (status, &error["param"]),
                    (StatusCode::BAD_REQUEST, &json!(name)),
                    "{value}: {error}"
                );
                assert!(error["message"].as_str().unwrap().contains(&words), "{name} {value}: {error}");
            }
            for value in values.wrong {
                let (status, error) = post(&setup, scope, name, &value).await;
                assert_eq!(
                    (status, &error["param"]),
                    (StatusCode::BAD_REQUEST, &json!(name)),
                    "{value}: {error}"
                );
                // The error is about the value: the route knows the parameter.
                let message = error["message"].as_str().unwrap();
                assert!(!message.contains("not a parameter"), "{name} {value}: {error}");
            }
        }
    }
}

/// A gRPC request that sets one parameter, and the field that an error about this parameter names.
struct Asked {
    request: GenerateRequest,
    field: String,
}

impl Asked {
    async fn expect_taken(self, setup: &Setup) {
        let field = self.field;
        generate(setup, self.request).await.unwrap_or_else(|status| panic!("{field}: {status}"));
    }

    async fn expect_refused(self, setup: &Setup, words: [&str; 2]) {
        let status = generate(setup, self.request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        let error = Error::from(status);
        assert_eq!(error.field(), Some(self.field.as_str()), "{error}");
        assert!(words.iter().all(|words| error.message().contains(words)), "{error}");
    }
}

fn sampling(name: &str, change: impl FnOnce(&mut Sampling)) -> Asked {
    let mut sampling = Sampling::default();
    change(&mut sampling);
    let request = GenerateRequest { sampling: Some(sampling), ..text("x") };
    Asked { request, field: format!("sampling.{name}") }
}

fn stopping(name: &str, change: impl FnOnce(&mut Stopping)) -> Asked {
    let mut stopping = Stopping::default();
    change(&mut stopping);
    let request = GenerateRequest { stopping: Some(stopping), ..text("x") };
    Asked { request, field: format!("stopping.{name}") }
}

#[tokio::test]
async fn every_number_is_checked_over_grpc() {
    let setup = ready().await;
    for number in &NUMBERS {
        let (name, range) = (number.bounds.name, number.bounds.range);
        let ask = |value| sampling(name, |sampling| (number.ask)(sampling, value));
        let (inside, outside) = ends(range);
        for value in inside {
            ask(value).expect_taken(&setup).await;
        }
        for value in outside.into_iter().chain([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            ask(value).expect_refused(&setup, [&value.to_string(), &range.high.to_string()]).await;
        }
    }
    let bias = |value| sampling(BIASES.name, |sampling| sampling.logit_bias = [(1, value)].into());
    let (inside, outside) = ends(BIAS.range);
    for value in inside {
        bias(value).expect_taken(&setup).await;
    }
    for value in outside {
        bias(value).expect_refused(&setup, [&value.to_string(), &BIAS.range.high.to_string()]).await;
    }
}

#[tokio::test]
async fn every_integer_is_checked_over_grpc() {
    type Ask = fn(i64) -> Asked;
    let cases: [(Bounded<Integers>, Ask); 4] = [
        (N, |n| Asked { request: GenerateRequest { n: Some(n as u32), ..text("x") }, field: "n".into() }),
        (PRIORITY, |priority| Asked {
            request: GenerateRequest { priority: priority as i32, ..text("x") },
            field: "priority".into(),
        }),
        (LOGPROBS, |top| {
            let output = Output { logprobs: Some(top as u32), ..Default::default() };
            let request = GenerateRequest { output: Some(output), ..text("x") };
            Asked { request, field: "output.logprobs".into() }
        }),
        (PROMPT_LOGPROBS, |top| {
            let output = Output { prompt_logprobs: Some(top as u32), ..Default::default() };
            let request = GenerateRequest { output: Some(output), ..text("x") };
            Asked { request, field: "output.prompt_logprobs".into() }
        }),
    ];
    let setup = ready().await;
    for (bounds, ask) in cases {
        let Integers { low, high } = bounds.range;
        for value in [low, high] {
            ask(value).expect_taken(&setup).await;
        }
        // A field with a lower bound of 0 is unsigned, so it cannot hold a smaller value.
        let below = (low != 0).then_some(low - 1);
        for value in below.into_iter().chain([high + 1]) {
            ask(value).expect_refused(&setup, [&value.to_string(), &high.to_string()]).await;
        }
    }
}

#[tokio::test]
async fn every_list_is_checked_over_grpc() {
    let setup = ready().await;
    let ids = |count| stopping(STOP_TOKEN_IDS.name, |stopping| stopping.stop_token_ids = vec![1; count]);
    let stops = |count| stopping(STOPS.name, |stopping| stopping.stop = vec!["x".into(); count]);
    let long = |bytes| stopping(STOPS.name, |stopping| stopping.stop = vec!["x".repeat(bytes)]);
    let biases = |count: usize| {
        sampling(BIASES.name, |sampling| {
            sampling.logit_bias = (0..count as u32).map(|id| (id, 1.0)).collect()
        })
    };
    let limits = [STOP_TOKEN_IDS, STOPS, STOP_BYTES].map(|bounds| bounds.range.most);
    let asks: [&dyn Fn(usize) -> Asked; 3] = [&ids, &stops, &long];
    for (most, ask) in limits.into_iter().zip(asks) {
        ask(most).expect_taken(&setup).await;
        ask(most + 1).expect_refused(&setup, [&(most + 1).to_string(), &most.to_string()]).await;
    }
    // The limit of biases itself is not tested, because the vocabulary of these tests is smaller.
    let most = BIASES.range.most;
    biases(200).expect_taken(&setup).await;
    biases(most + 1).expect_refused(&setup, [&(most + 1).to_string(), &most.to_string()]).await;
    let min = |min_tokens| stopping("min_tokens", |stopping| stopping.min_tokens = min_tokens);
    let max = parameters::DEFAULT_MAX_TOKENS;
    min(max).expect_taken(&setup).await;
    min(max + 1).expect_refused(&setup, [&(max + 1).to_string(), &max.to_string()]).await;
}
