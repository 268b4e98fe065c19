//! Constraints: what reaches the conductor, and what is refused, under every spelling.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tonic::Code;
use tutti_constraints::{Constraint, Declared, Environment, Vocabulary};
use tutti_proto::{
    cluster::v1::FinishReason,
    v1::{
        self as pb, GenerateRequest,
        constraint::{Kind, Whitespace},
    },
};
use tutti_router::RouterSettings;
use tutti_runtime::Error;

use crate::{
    grpc::{generate, text},
    support::{self, Answer, Setup, ready, ready_with, tokenizer},
};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Posts a request with these members to a route.
async fn ask(setup: &Setup, path: &str, members: &Value) -> Answer {
    let mut body = match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "x" }] }),
        _ => json!({ "prompt": "hello" }),
    };
    body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    setup.post(path, &body).await
}

/// The error's field and message.
fn refusal(answer: &Answer) -> (String, String) {
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text);
    let error = &answer.json()["error"];
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    (text("param"), text("message"))
}

fn with_schema(schema: Value) -> Value {
    json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } })
}

#[tokio::test]
async fn the_conductor_gets_the_constraint_as_the_client_wrote_it() {
    let setup = ready().await;
    let schema = json!({ "type": "object", "properties": { "z": { "const": 1 }, "a": { "const": 2 } } });
    for path in [COMPLETIONS, CHAT] {
        let mut members = with_schema(schema.clone());
        members["structured_outputs"] = json!({ "whitespace": "compact" });
        members["n"] = json!(2);
        assert_eq!(ask(&setup, path, &members).await.status, StatusCode::OK);
        let submitted = std::mem::take(&mut *setup.conductor.submitted.lock().unwrap());
        assert_eq!(submitted.len(), 2);
        for request in submitted {
            let spec = request.spec.unwrap();
            let constraint = spec.constraint.unwrap();
            assert_eq!(constraint.whitespace(), Whitespace::Compact);
            let Some(Kind::JsonSchema(sent)) = constraint.kind else { panic!("{constraint:?}") };
            // The order of members is the order in the answer.
            assert_eq!((sent.schema, sent.strict), (schema.to_string(), false));
            assert_eq!(spec.thinking, None);
        }
        assert_eq!(ask(&setup, path, &json!({ "response_format": { "type": "text" } })).await.status, 200);
        let submitted = std::mem::take(&mut *setup.conductor.submitted.lock().unwrap());
        assert_eq!(submitted[0].spec.as_ref().unwrap().constraint, None);
    }
    let kind = Kind::Choice(pb::Choices { texts: vec!["yes".into(), "no".into()] });
    let constraint = pb::Constraint { kind: Some(kind), ..Default::default() };
    let request = GenerateRequest { constraint: Some(constraint.clone()), ..text("x") };
    generate(&setup, request).await.unwrap();
    assert_eq!(setup.conductor.last().spec.unwrap().constraint, Some(constraint));
}

/// Checks the position and the reason of constraints that cannot be enforced, admit nothing, or are too large.
#[tokio::test]
async fn a_schema_is_refused_at_its_position_under_every_name() {
    let setup = ready().await;
    let within =
        |schema: Value| json!({ "type": "object", "properties": { "a": schema }, "required": ["a"] });
    let mut deep = json!({});
    for _ in 0..40 {
        deep = json!({ "items": deep });
    }
    let members: Value = (0..1100).map(|n| (format!("m{n}"), json!({}))).collect();
    let cases = [
        (json!({ "not": {} }), ".properties.a.not", "cannot be enforced"),
        (json!({ "if": {}, "then": {} }), ".properties.a.if", "cannot be enforced"),
        (json!({ "uniqueItems": true }), ".properties.a.uniqueItems", "cannot be enforced"),
        (json!({ "format": "phone" }), ".properties.a.format", "the formats are date-time"),
        (json!({ "pattern": "(?=a)b" }), ".properties.a.pattern", "look-around"),
        (json!({ "$ref": "https://a.example/s" }), ".properties.a.$ref", "not inside the schema"),
        (json!({ "$ref": "#/$defs/none" }), ".properties.a", "none"),
        (json!({ "type": "integer", "minimum": 3, "maximum": 2 }), ".properties.a", "minimum"),
        (json!(false), "", ""),
        (json!({ "enum": [] }), "", ""),
        (deep, "", "is nested 33 deep; the limit is 32"),
        (json!({ "properties": members }), "", "is schema number 1025; the limit is 1024"),
        (json!({ "enum": vec!["x"; 10_001] }), ".properties.a.enum", "the limit is 10000"),
        (json!({ "description": "x".repeat(70_000) }), "", "the limit is 65536"),
    ];
    for (schema, position, reason) in cases {
        let schema = within(schema);
        for (members, name) in [
            (with_schema(schema.clone()), "response_format.json_schema.schema"),
            (json!({ "structured_outputs": { "json": schema.clone() } }), "structured_outputs.json"),
            (json!({ "guided_json": schema.to_string() }), "guided_json"),
        ] {
            let (param, message) = refusal(&ask(&setup, COMPLETIONS, &members).await);
            assert!(param.starts_with(&format!("{name}{position}")), "{param} of {schema:.100}: {message}");
            assert!(message.contains(reason), "{message} of {schema:.100}");
        }
        let kind = Kind::JsonSchema(pb::JsonSchema { schema: schema.to_string(), strict: false });
        let constraint = Some(pb::Constraint { kind: Some(kind), ..Default::default() });
        let status = generate(&setup, GenerateRequest { constraint, ..text("x") }).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        let error = Error::from(status);
        let field = format!("constraint.json_schema.schema{position}");
        assert!(error.field().is_some_and(|given| given.starts_with(&field)), "{error}");
    }
    assert_eq!(setup.conductor.count(), 0);
}

#[tokio::test]
async fn every_other_kind_is_refused_under_its_name() {
    let setup = ready().await;
    let tag = |begin: &str, schema: Value| json!({ "begin": begin, "schema": schema, "end": "</f>" });
    let tags = |tag: Value| json!({ "type": "structural_tag", "structures": [tag], "triggers": ["<f"] });
    for (members, field, reason) in [
        (json!({ "guided_regex": "(" }), "guided_regex", "is no regular expression"),
        (json!({ "structured_outputs": { "regex": "" } }), "structured_outputs.regex", "is empty"),
        (json!({ "guided_regex": "a".repeat(9000) }), "guided_regex", "the limit is 8192"),
        (json!({ "guided_regex": "[^\\s\\S]" }), "guided_regex", ""),
        (json!({ "structured_outputs": { "choice": [] } }), "structured_outputs.choice", "is empty"),
        (json!({ "guided_choice": ["a", ""] }), "guided_choice[1]", "is empty"),
        (json!({ "guided_choice": vec!["a"; 10_001] }), "guided_choice", "the limit is 10000"),
        (json!({ "guided_choice": vec!["a"; 20_000] }), "guided_choice", "has more than 16384 items"),
        (json!({ "guided_grammar": "start: start" }), "guided_grammar", "allows no finite text"),
        (json!({ "guided_grammar": "root ::= \"a\"" }), "guided_grammar", ""),
        (json!({ "guided_json": "{" }), "guided_json", "is no JSON"),
        (json!({ "guided_json": "[]" }), "guided_json", "is neither an object nor a boolean"),
        (
            json!({ "response_format": tags(tag("<g>", json!({}))) }),
            "response_format.structures[0].begin",
            "begins with no trigger",
        ),
        (
            json!({ "structured_outputs": { "structural_tag": tags(tag("<f>", json!({ "not": {} }))).to_string() } }),
            "structured_outputs.structural_tag.structures[0].schema.not",
            "cannot be enforced",
        ),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": {
                "name": "n", "strict": true,
                "schema": { "type": "object", "properties": { "a": {} }, "additionalProperties": false } } } }),
            "response_format.json_schema.schema.properties.a",
            "must be required in strict mode",
        ),
    ] {
        for path in [COMPLETIONS, CHAT] {
            let (param, message) = refusal(&ask(&setup, path, &members).await);
            assert_eq!(param, field, "{members:.100}: {message}");
            assert!(message.contains(reason), "{message} of {members:.100}");
        }
    }
    for (kind, field) in [
        (None, "constraint"),
        (Some(Kind::Regex("(".into())), "constraint.regex"),
        (Some(Kind::Lark("a".into())), "constraint.lark"),
        (Some(Kind::Choice(pb::Choices { texts: vec![String::new()] })), "constraint.choice.texts[0]"),
        (
            Some(Kind::StructuralTags(pb::StructuralTags {
                tags: vec![pb::StructuralTag {
                    begin: "<f>".into(),
                    schema: "{\"ü\"".into(),
                    end: "".into(),
                }],
                triggers: vec!["<f>".into()],
            })),
            "constraint.structural_tags.tags[0].schema",
        ),
        (
            Some(Kind::JsonSchema(pb::JsonSchema {
                schema: r#"{"properties": {"ü": {"not": {}}}}"#.into(),
                strict: false,
            })),
            "constraint.json_schema.schema.properties[\"?\"].not",
        ),
    ] {
        let constraint = Some(pb::Constraint { kind, ..Default::default() });
        let error = generate(&setup, GenerateRequest { constraint, ..text("x") }).await.unwrap_err();
        let error = Error::from(error);
        assert_eq!(error.field(), Some(field), "{error}");
    }
    assert_eq!(setup.conductor.count(), 0);
}

#[tokio::test]
async fn without_a_tokenizer_a_constraint_is_refused() {
    let settings = RouterSettings { skip_tokenizer_init: true, ..Default::default() };
    let setup = ready_with(settings, true).await;
    let body = json!({ "prompt": [1], "guided_json": { "type": "null" } });
    let (param, message) = refusal(&setup.post(COMPLETIONS, &body).await);
    assert_eq!(param, "guided_json");
    assert!(message.contains("needs a tokenizer"), "{message}");
    assert_eq!(setup.post(COMPLETIONS, &json!({ "prompt": [1] })).await.status, StatusCode::OK);
}

/// A bad request costs no check, and a refused constraint costs no tokens of the caller's key.
#[tokio::test]
async fn checks_are_counted_and_come_behind_those_that_cost_nothing() {
    let setup = ready().await;
    let counts = || {
        let encoded = setup.metrics.encode();
        let prefix = "tutti_router_constraint_checks_total{result=\"";
        let of = |line: &str| {
            let (result, count) = line.strip_prefix(prefix)?.split_once("\"} ")?;
            Some((result.to_owned(), count.parse::<u32>().unwrap()))
        };
        encoded.lines().filter_map(of).collect::<BTreeMap<_, _>>()
    };
    let of = |compiled, known, refused| {
        [("compiled", compiled), ("known", known), ("refused", refused)]
            .map(|(result, count)| (result.to_owned(), count))
            .into()
    };
    assert_eq!(counts(), of(0, 0, 0));
    let mut bad = with_schema(json!({ "type": "null" }));
    bad["n"] = json!(0);
    refusal(&ask(&setup, COMPLETIONS, &bad).await);
    assert_eq!(counts(), of(0, 0, 0));
    for _ in 0..2 {
        assert_eq!(ask(&setup, CHAT, &with_schema(json!({ "type": "null" }))).await.status, 200);
        refusal(&ask(&setup, CHAT, &with_schema(json!({ "not": {} }))).await);
    }
    assert_eq!(counts(), of(1, 1, 2));
}

/// Parameters that meet a constraint: none is refused, and each reaches the conductor unchanged.
#[tokio::test]
async fn other_parameters_pass_beside_a_constraint() {
    let setup = ready().await;
    let mut members = with_schema(json!({ "type": "null" }));
    let more = json!({ "logit_bias": { "5": -100 }, "min_tokens": 3, "max_tokens": 9, "stop": ["}"], "ignore_eos": true,
        "stop_token_ids": [7], "n": 2, "seed": 1 });
    members.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    assert_eq!(ask(&setup, CHAT, &members).await.status, StatusCode::OK);
    let spec = setup.conductor.last().spec.unwrap();
    assert!(spec.constraint.is_some());
    let stopping = spec.stopping.unwrap();
    assert_eq!((stopping.min_tokens, stopping.max_tokens, stopping.ignore_eos), (3, 9, true));
    assert_eq!(stopping.stop_token_ids, [7]);
    members["echo"] = json!(true);
    members["prompt_logprobs"] = json!(1);
    members["max_tokens"] = json!(0);
    members["min_tokens"] = json!(0);
    let end = || support::end(FinishReason::Length, 0);
    setup.conductor.play(move |_| vec![end()]);
    assert_eq!(ask(&setup, COMPLETIONS, &members).await.status, StatusCode::OK);
    // A continued message stands in the prompt: the constraint is that of what is written behind it.
    setup.conductor.play(|_| support::says("ok"));
    let body = json!({ "messages": [{ "role": "user", "content": "x" }, { "role": "assistant", "content": "{" }],
        "continue_final_message": true, "response_format": { "type": "json_object" } });
    assert_eq!(setup.post(CHAT, &body).await.status, StatusCode::OK);
}

/// Checks that constraints which the router accepts compile with the whole vocabulary of a worker.
#[tokio::test]
async fn what_is_accepted_compiles_on_a_worker() {
    let setup = ready().await;
    let json: Value = serde_json::from_slice(&tokenizer::byte_level()).unwrap();
    let declared =
        Declared { logits: tokenizer::VOCAB as usize, ends: &[tokenizer::END], ..Declared::default() };
    let environment = Environment::new(&Vocabulary::from_tokenizer_json(&json, &declared).unwrap()).unwrap();
    let string = json!({ "type": "string" });
    let optional: Value = (0..200).map(|n| (format!("m{n}"), string.clone())).collect();
    let schemas = [
        json!({}),
        json!({ "type": "object", "properties": { "a": { "type": "array", "items": { "type": "number" } } } }),
        json!({ "type": "object", "properties": optional }),
        json!({ "enum": (0..2000).map(|n| format!("value {n}")).collect::<Vec<_>>() }),
        json!({ "type": "array", "maxItems": u64::MAX }),
        json!({ "type": "string", "maxLength": 10_000_000 }),
        json!({ "type": "string", "minLength": 9000, "maxLength": 10_000 }),
        json!({ "type": "string", "pattern": "^.*a.{20}$" }),
        json!({ "type": "integer", "minimum": -1e308, "maximum": 1e308 }),
        json!({ "anyOf": [{ "type": "null" }, { "const": "<|end|>" }] }),
        json!({ "$ref": "#/$defs/t", "$defs": { "t": { "properties": { "n": { "$ref": "#/$defs/t" } } } } }),
        json!({ "type": "string", "format": "date-time" }),
        json!({ "oneOf": [{ "type": "integer" }, { "type": "number" }] }),
        json!({ "multipleOf": 1e-300, "type": "number" }),
    ];
    let others = [
        json!({ "guided_regex": r"\p{L}{1,5000}" }),
        json!({ "guided_regex": "[01]*1[01]{30}" }),
        json!({ "guided_regex": "a{1000000000}" }),
        json!({ "guided_choice": ["yes", "<|end|>", "a|b"] }),
        json!({ "guided_grammar": "start: \"a\" start" }),
        json!({ "guided_grammar": "start: <[263]> /.*/ <|role|>" }),
        json!({ "guided_grammar": "start: <think> /.*/" }),
        json!({ "guided_grammar": "start: <[0-260]>+" }),
        json!({ "guided_grammar": "start: %json {\"type\": \"object\"}" }),
        json!({ "structural_tag": { "triggers": ["<think>"], "structures": [
            { "begin": "<think>", "schema": { "const": 1 }, "end": "<|role|>" }] } }),
        json!({ "structural_tag": { "triggers": ["a<think>"], "structures": [
            { "begin": "a<think>", "schema": { "const": 1 }, "end": "b" }] } }),
    ];
    let mut accepted = 0;
    for members in schemas.into_iter().map(with_schema).chain(others) {
        let before = setup.conductor.count();
        let answer = ask(&setup, COMPLETIONS, &members).await;
        if answer.status != StatusCode::OK {
            refusal(&answer);
            assert_eq!(setup.conductor.count(), before);
            continue;
        }
        accepted += 1;
        let sent = setup.conductor.last().spec.unwrap().constraint.unwrap();
        let constraint = Constraint::from_message(sent, None).unwrap();
        let mut matcher =
            environment.compile(&constraint).unwrap_or_else(|error| panic!("{members:.200}: {error}"));
        let mut words = vec![0; matcher.mask_words()];
        matcher.mask(&mut words).unwrap_or_else(|error| panic!("{members:.200}: {error}"));
    }
    assert!(accepted > 15, "{accepted}");
}
