//! `tool_choice` and `parallel_tool_calls`.

use axum::http::StatusCode;
use serde_json::{Value, json};
use tutti_proto::v1::constraint::Kind;

use crate::{
    support::{self, Setup, Step, ids_of, writes},
    tools::{HERMES, MARKERS, both, calls, chat},
};

const CHAT: &str = "/v1/chat/completions";
/// A template with the sign of calls as in Python.
const PYTHONIC: &str =
    "{{ tools }}{# func_name1( #}{% for message in messages %}{{ message.content }}{% endfor %}";
const TWO: &str =
    "<tool_call>{\"name\": \"now\"}</tool_call>\n<tool_call>{\"name\": \"weather\"}</tool_call>\nText.";

/// The grammar that reached the conductor last.
fn grammar(setup: &Setup) -> Option<String> {
    match setup.conductor.last().spec.unwrap().constraint?.kind? {
        Kind::Lark(grammar) => Some(grammar),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn without_parallel_calls_the_answer_ends_with_its_first_call() {
    let mut setup = support::ready_for(HERMES, MARKERS).await;
    setup.conductor.play(|_| {
        let ids = ids_of(TWO, MARKERS);
        let mut steps: Vec<Step> =
            ids.iter().enumerate().map(|(index, &id)| support::tokens(index, &[id])).collect();
        steps.push(Step::Hang);
        steps
    });
    let choice = both(&setup, &chat(&json!({ "parallel_tool_calls": false }))).await;
    assert_eq!(calls(&choice), [("now".to_owned(), "{}".to_owned())]);
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Value::Null)
    );
    // The rest is not generated.
    setup.cancelled.recv().await.unwrap();
}

#[tokio::test]
async fn a_call_stays_text_without_a_choice() {
    let setup = support::ready_for(HERMES, &[]).await;
    setup.conductor.play(|_| writes(TWO, &[]));
    let choice = both(&setup, &chat(&json!({ "tool_choice": "none" }))).await;
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(TWO), &json!("stop")));
    // The template shows the tools all the same.
    assert!(crate::tools::prompt(&setup, &[]).contains("weather"));
    // Without tools, markers are text. Behind a conversation with calls, they are calls.
    let bare = json!({ "messages": [{ "role": "user", "content": "x" }] });
    assert_eq!(both(&setup, &bare).await["message"]["content"], json!(TWO));
    let call = json!({ "id": "a", "function": { "name": "now", "arguments": "{}" } });
    let later = json!({ "messages": [{ "role": "user", "content": "x" }, { "role": "assistant", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "a", "content": "noon" }] });
    let choice = both(&setup, &later).await;
    assert_eq!((calls(&choice).len(), &choice["message"]["content"]), (2, &json!("\nText.")));
}

#[tokio::test]
async fn undeclared_tools_are_passed_on_and_counted() {
    let setup = support::ready_for(HERMES, MARKERS).await;
    setup.conductor.play(|_| writes("<tool_call>{\"name\": \"fly\"}</tool_call>", MARKERS));
    let choice = both(&setup, &chat(&json!({}))).await;
    assert_eq!(calls(&choice)[0].0, "fly");
    let metrics = setup.metrics.encode();
    assert!(metrics.contains("tutti_router_tool_calls_total{declared=\"no\"} 2"), "{metrics}");
    assert!(metrics.contains("tutti_router_tool_calls_total{declared=\"yes\"} 0"));
    assert!(metrics.contains("tutti_router_choices_finished_total{reason=\"tool_calls\"} 2"));
}

#[tokio::test]
async fn required_calls_are_a_grammar_in_the_format_of_the_model() {
    let setup = support::ready_for(HERMES, MARKERS).await;
    setup
        .conductor
        .play(|_| writes("<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>", MARKERS));
    let choice = both(&setup, &chat(&json!({ "tool_choice": "required" }))).await;
    assert_eq!((calls(&choice).len(), &choice["finish_reason"]), (1, &json!("tool_calls")));
    let found = grammar(&setup).unwrap();
    assert!(
        found.starts_with("start: calls\n") && found.contains("<[264]>") && found.contains("<[265]>"),
        "{found}"
    );
    assert!(found.contains("weather") && found.contains("now") && found.contains(")*\ncall:"), "{found}");
    let named = json!({ "tool_choice": { "type": "function", "function": { "name": "now" } }, "parallel_tool_calls": false });
    both(&setup, &chat(&named)).await;
    let found = grammar(&setup).unwrap();
    assert!(!found.contains("weather") && !found.contains(")*\ncall:"), "{found}");
    for members in [json!({}), json!({ "tool_choice": "auto" }), json!({ "tool_choice": "none" })] {
        both(&setup, &chat(&members)).await;
        assert_eq!(grammar(&setup), None);
    }
}

#[tokio::test]
async fn strict_tools_are_constrained_behind_the_marker() {
    let setup = support::ready_for(HERMES, MARKERS).await;
    let mut body = chat(&json!({}));
    body["tools"][0]["function"]["strict"] = json!(true);
    assert_eq!(setup.post(CHAT, &body).await.status, StatusCode::OK);
    let found = grammar(&setup).unwrap();
    assert!(found.starts_with("start: FREE (calls FREE)*\n") && found.contains("integer"), "{found}");
    // A marker that is text cannot be told from text.
    let setup = support::ready_for(HERMES, &[]).await;
    assert_eq!(setup.post(CHAT, &body).await.status, StatusCode::OK);
    assert_eq!(grammar(&setup), None);
}

#[tokio::test]
async fn names_of_parameters_that_the_format_does_not_carry_are_refused() {
    for (template, is_refused) in [(PYTHONIC, true), (HERMES, false)] {
        let setup = support::ready_for(template, MARKERS).await;
        let mut body = chat(&json!({ "tool_choice": "required" }));
        body["tools"][0]["function"]["parameters"]["properties"]["$filter"] = json!({ "type": "string" });
        let answer = setup.post(CHAT, &body).await;
        if !is_refused {
            assert_eq!(answer.status, StatusCode::OK);
            continue;
        }
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.json()["error"]["param"], "tools[0].function.parameters.properties.$filter");
        // A call that is not enforced has no grammar that could admit the name.
        body["tool_choice"] = json!("auto");
        assert_eq!(setup.post(CHAT, &body).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn large_tools_are_enforced_too_and_a_grammar_has_a_limit() {
    // The template has the signs of its format and shows no tools, whose text would be longer than the context.
    let template =
        "{# <tool_call> arguments #}{% for message in messages %}{{ message.content }}{% endfor %}";
    let setup = support::ready_for(template, MARKERS).await;
    let mut body = chat(&json!({ "tool_choice": "required" }));
    body["tools"][0]["function"]["description"] = json!("x".repeat(100_000));
    assert_eq!(setup.post(CHAT, &body).await.status, StatusCode::OK);
    assert!(grammar(&setup).unwrap().contains("weather"));
    // Two tools, each of which is no longer than a schema may be.
    let long = json!({ "type": "object", "properties": { "a": { "enum": ["x".repeat(40_000)] } } });
    for tool in 0..2 {
        body["tools"][tool]["function"]["parameters"] = long.clone();
    }
    let answer = setup.post(CHAT, &body).await;
    assert_eq!(
        (answer.status, answer.json()["error"]["param"].clone()),
        (StatusCode::BAD_REQUEST, json!("tools"))
    );
}

#[tokio::test]
async fn a_schema_may_not_set_options_of_the_library() {
    let setup = support::ready_for(HERMES, MARKERS).await;
    let mut body = chat(&json!({ "tool_choice": "required" }));
    body["tools"][0]["function"]["parameters"]["properties"]["city"]["x-guidance"] =
        json!({ "lenient": true });
    let answer = setup.post(CHAT, &body).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(answer.json()["error"]["param"], "tools[0].function.parameters.properties.city.x-guidance");
    // Neither is a keyword that cannot be enforced taken in silence.
    let mut body = chat(&json!({ "tool_choice": "required" }));
    body["tools"][0]["function"]["parameters"]["properties"]["city"] =
        json!({ "type": "array", "uniqueItems": true });
    let answer = setup.post(CHAT, &body).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(answer.json()["error"]["param"], "tools[0].function.parameters.properties.city.uniqueItems");
}
