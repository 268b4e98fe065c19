//! `/v1/completions`, compared byte for byte where clients depend on the bytes.

use axum::http::StatusCode;
use serde_json::{Value, json};
use tutti_proto::cluster::v1::{FinishReason, RequestEvent};

use crate::support::{
    self, Step, end, logprob, prompt_logprobs, ready, says, says_ids, token, tokenizer, tokens,
};

/// Removes the fields that differ between any two answers.
fn steady(mut value: Value) -> Value {
    for field in ["id", "created"] {
        assert!(value.as_object_mut().unwrap().shift_remove(field).is_some(), "{value}");
    }
    value
}

#[tokio::test]
async fn a_whole_answer() {
    let setup = ready().await;
    setup.conductor.play(|_| says("hi 🎻"));
    let answer = setup.post("/v1/completions", &json!({ "model": "tiny", "prompt": "hello" })).await;
    assert_eq!(answer.status, StatusCode::OK);
    let body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    let expected = json!({
        "object": "text_completion", "model": "tiny",
        "choices": [{ "index": 0, "text": "hi 🎻", "logprobs": null, "finish_reason": "stop", "stop_reason": null }],
        "usage": { "prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9,
            "prompt_tokens_details": { "cached_tokens": 0 } },
    });
    assert_eq!(steady(body), expected);
    let spec = setup.conductor.last().spec.unwrap();
    let (sampling, stopping) = (spec.sampling.unwrap(), spec.stopping.unwrap());
    assert_eq!((spec.prompt, stopping.max_tokens, sampling.temperature), (vec![259], 16, 0.5));
}

#[tokio::test]
async fn a_stream_is_exact() {
    let setup = ready().await;
    setup.conductor.play(|_| says("é!"));
    let body = json!({ "prompt": "hello", "stream": true, "stream_options": { "include_usage": true } });
    let answer = setup.post("/v1/completions", &body).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    let events = answer.events();
    let first = &events[0];
    let (id, created) = (first["id"].as_str().unwrap(), &first["created"]);
    let chunk = |text: &str, finish: &str| {
        format!(
            "data: {{\"id\":\"{id}\",\"object\":\"text_completion\",\"created\":{created},\"model\":\"tiny\",\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":{finish},\"stop_reason\":null}}],\"usage\":null}}\n\n"
        )
    };
    let usage = format!(
        "data: {{\"id\":\"{id}\",\"object\":\"text_completion\",\"created\":{created},\"model\":\"tiny\",\"choices\":[],\"usage\":{{\"prompt_tokens\":1,\"completion_tokens\":4,\"total_tokens\":5,\"prompt_tokens_details\":{{\"cached_tokens\":0}}}}}}\n\n"
    );
    // The token of é's first byte gives no text, but the choice's first chunk is sent.
    let expected = [
        chunk("", "null"),
        chunk("é", "null"),
        chunk("!", "null"),
        chunk("", "\"stop\""),
        usage,
        "data: [DONE]\n\n".into(),
    ];
    assert_eq!(answer.text, expected.concat());
}

#[tokio::test]
async fn a_stream_without_usage_has_no_usage_member() {
    let setup = ready().await;
    let answer = setup.post("/v1/completions", &json!({ "prompt": "x", "stream": true })).await;
    assert!(!answer.text.contains("usage"));
    assert!(answer.text.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn every_end_has_its_reason() {
    let setup = ready().await;
    let request = json!({ "prompt": "x", "stop_token_ids": [33], "return_token_ids": true });
    let ask = async |ids: &'static [u32], reason| {
        setup.conductor.play(move |_| {
            let mut steps = says_ids(ids, reason);
            if let (FinishReason::StopToken, Some(Step::Event(RequestEvent { finished: Some(f), .. }))) =
                (reason, steps.last_mut())
            {
                f.stop_token_id = Some(33);
            }
            steps
        });
        let mut choice = setup.post("/v1/completions", &request).await.json()["choices"][0].take();
        [
            choice["text"].take(),
            choice["finish_reason"].take(),
            choice["stop_reason"].take(),
            choice["token_ids"].take(),
        ]
    };
    let length = ask(&[97, 98], FinishReason::Length).await;
    assert_eq!(length, [json!("ab"), json!("length"), json!(null), json!([97, 98])]);
    // The stop token is reported as a token, and has no text.
    let stop = ask(&[97, 33], FinishReason::StopToken).await;
    assert_eq!(stop, [json!("a"), json!("stop"), json!(33), json!([97, 33])]);
    // A stop token has text unless it is the reason for the end. Here the first stop token is passed, and the second
    // one is at the length limit.
    let passed = ask(&[33, 97, 33], FinishReason::Length).await;
    assert_eq!(passed, [json!("!a!"), json!("length"), json!(null), json!([33, 97, 33])]);
}

#[tokio::test]
async fn a_stop_string_across_tokens_is_cut_out_and_cancels() {
    let mut setup = ready().await;
    setup.conductor.play(|_| vec![tokens(0, &[97, 83, 84]), tokens(3, &[79, 80, 98]), Step::Hang]);
    let body = json!({ "prompt": "x", "stop": ["STOP", "never"], "return_token_ids": true, "stream": true,
        "stream_options": { "include_usage": true } });
    let answer = setup.post("/v1/completions", &body).await;
    let events = answer.events();
    let text: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "a");
    let ids: Vec<&Value> =
        events.iter().filter_map(|e| e["choices"][0]["token_ids"].as_array()).flatten().collect();
    assert_eq!(ids, [97, 83, 84, 79, 80]);
    // Tokens are delivered with their text. While text may be part of a stop string, the text's tokens are held back
    // with the text.
    assert_eq!(events[0]["choices"][0]["token_ids"], json!([97]));
    assert_eq!(events[1]["choices"][0]["stop_reason"], "STOP");
    assert_eq!(events[2]["usage"]["completion_tokens"], 5);
    setup.cancelled.recv().await.unwrap();
}

#[tokio::test]
async fn a_stop_string_waits_for_min_tokens_and_may_be_kept() {
    let setup = ready().await;
    setup.conductor.play(|_| says("a.b.c.d"));
    let ask = async |extra: Value| {
        let mut body = json!({ "prompt": "x", "stop": "." });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        setup.post("/v1/completions", &body).await.json()["choices"][0]["text"].take()
    };
    assert_eq!(ask(json!({})).await, "a");
    assert_eq!(ask(json!({ "min_tokens": 2 })).await, "a.b");
    assert_eq!(ask(json!({ "include_stop_str_in_output": true })).await, "a.");
}

#[tokio::test]
async fn a_held_back_beginning_of_a_stop_string_is_shown_at_the_end() {
    let setup = ready().await;
    setup.conductor.play(|_| says_ids(&[97, 83, 84], FinishReason::Length));
    let body = json!({ "prompt": "x", "stop": "STOP" });
    let choice = &setup.post("/v1/completions", &body).await.json()["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("aST"), &json!("length")));
}

#[tokio::test]
async fn prompts_times_n_keep_their_order_and_seeds() {
    let setup = ready().await;
    setup
        .conductor
        .play(|spec| says(&format!("{}/{}", spec.prompt[0], spec.sampling.as_ref().unwrap().seed % 97)));
    let ask = async |body: Value| {
        let body = setup.post("/v1/completions", &body).await.json();
        let choices = body["choices"].as_array().unwrap().clone();
        let indices: Vec<_> = choices.iter().map(|c| c["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, (0..choices.len() as u64).collect::<Vec<_>>());
        choices.iter().map(|c| c["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let all = ask(json!({ "prompt": [[97], [98]], "n": 2, "seed": 5 })).await;
    let alone = ask(json!({ "prompt": "b", "seed": 5 })).await;
    assert_eq!((&all[0], &all[2], &alone[0]), (&"97/5".into(), &"98/5".into(), &all[2]));
    assert!(all[1].starts_with("97/") && all[1] != all[0]);
    let usage = setup.post("/v1/completions", &json!({ "prompt": [[97, 98], [98]], "n": 2 })).await.json();
    assert_eq!(usage["usage"]["prompt_tokens"], 3);
    assert_eq!(ask(json!({ "prompt": ["a", "hello"], "best_of": 1 })).await.len(), 2);
}

#[tokio::test]
async fn an_echo_with_logprobs_scores_the_prompt() {
    let setup = ready().await;
    setup.conductor.play(|spec| {
        assert_eq!((spec.logprobs, spec.prompt_logprobs), (Some(1), Some(1)));
        let mut sampled = token(0, 98);
        sampled.logprob = Some(logprob(-0.5, 2, &[(99, -0.25)]));
        let with_token = RequestEvent { tokens: vec![sampled], ..Default::default() };
        vec![
            prompt_logprobs(1, vec![logprob(-1.0, 1, &[(195, -1.0)])]),
            prompt_logprobs(2, vec![logprob(f32::NEG_INFINITY, 9, &[(97, -0.125)])]),
            Step::Event(with_token),
            end(FinishReason::Length, 1),
        ]
    });
    let body = json!({ "prompt": "aé", "echo": true, "logprobs": 1, "max_tokens": 1, "prompt_logprobs": 0 });
    let choice = &setup.post("/v1/completions", &body).await.json()["choices"][0];
    assert_eq!(choice["text"], "aéb");
    let expected = json!({
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "b"],
        "token_logprobs": [null, -1.0, -9999.0, -0.5],
        "top_logprobs": [null, { "bytes:\\xc3": -1.0 }, { "a": -0.125, "bytes:\\xa9": -9999.0 },
            { "c": -0.25, "b": -0.5 }],
        "text_offset": [0, 1, 1, 2],
    });
    assert_eq!(choice["logprobs"], expected);
    let expected = json!([null,
        { "195": { "logprob": -1.0, "rank": 1, "decoded_token": "bytes:\\xc3" } },
        { "169": { "logprob": -9999.0, "rank": 9, "decoded_token": "bytes:\\xa9" },
          "97": { "logprob": -0.125, "rank": 1, "decoded_token": "a" } },
    ]);
    assert_eq!(choice["prompt_logprobs"], expected);
}

#[tokio::test]
async fn an_echo_without_output_scores_the_prompt() {
    let setup = ready().await;
    setup.conductor.play(|spec| {
        assert_eq!(spec.stopping.as_ref().unwrap().max_tokens, 0);
        vec![prompt_logprobs(1, vec![logprob(-1.5, 1, &[])]), end(FinishReason::Length, 0)]
    });
    let body = json!({ "prompt": "ab", "echo": true, "logprobs": 0, "max_tokens": 0, "stream": true });
    let events = setup.post("/v1/completions", &body).await.events();
    assert_eq!(events[0]["choices"][0]["text"], "ab");
    assert_eq!(events[0]["choices"][0]["logprobs"]["token_logprobs"], json!([null, -1.5]));
    assert_eq!(events[1], "[DONE]");
}

#[tokio::test]
async fn missing_prompt_logprobs_are_an_error_and_not_a_short_list() {
    let setup = ready().await;
    let body = json!({ "prompt": "abc", "prompt_logprobs": 1 });
    let answer = setup.post("/v1/completions", &body).await;
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn special_tokens_are_shown_on_request() {
    let setup = ready().await;
    setup.conductor.play(|_| says_ids(&[97, 262, 98], FinishReason::Length));
    let ask = async |skip: bool| {
        let body = json!({ "prompt": "x", "skip_special_tokens": skip });
        setup.post("/v1/completions", &body).await.json()["choices"][0]["text"].take()
    };
    assert_eq!((ask(true).await, ask(false).await), (json!("ab"), json!("a<|role|>b")));
}

#[tokio::test]
async fn without_a_tokenizer_only_ids_go_in_and_out() {
    let config = tutti_router::RouterSettings { skip_tokenizer_init: true, ..Default::default() };
    let setup = support::ready_with(config, false).await;
    setup.conductor.play(|_| {
        let mut sampled = token(0, 7);
        sampled.logprob = Some(logprob(-0.5, 1, &[(7, -0.5), (9, -1.0)]));
        vec![
            Step::Event(RequestEvent { tokens: vec![sampled], ..Default::default() }),
            end(FinishReason::Length, 1),
        ]
    });
    let body = json!({ "prompt": [1, 2], "return_token_ids": true, "logprobs": 2, "echo": false });
    let choice = &setup.post("/v1/completions", &body).await.json()["choices"][0];
    assert_eq!((&choice["text"], &choice["token_ids"]), (&json!(""), &json!([7])));
    assert_eq!(choice["prompt_token_ids"], json!([1, 2]));
    assert_eq!(choice["logprobs"]["tokens"], json!(["token_id:7"]));
    assert_eq!(choice["logprobs"]["top_logprobs"], json!([{ "token_id:7": -0.5, "token_id:9": -1.0 }]));
    for (body, param) in [
        (json!({ "prompt": "text" }), "prompt"),
        (json!({ "prompt": [1], "stop": "x" }), "stop"),
        (json!({ "prompt": [tokenizer::VOCAB] }), "prompt"),
    ] {
        let answer = setup.post("/v1/completions", &body).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (StatusCode::BAD_REQUEST, &json!(param))
        );
    }
}
