//! Reasoning: blocks, switches and budgets.

use axum::http::StatusCode;
use serde_json::{Value, json};
use tutti_proto::cluster::v1::FinishReason;

use crate::{
    support::{self, ids_of, says_ids, writes},
    tools::{both, calls, chat, prompt},
};

const CHAT: &str = "/v1/chat/completions";
/// A template like Qwen3's: the model opens its block, unless reasoning is off.
const QWEN: &str = "{% for m in messages %}<|role|>{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }})\
{% endif %}{% endfor %}<|role|>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n\
{% endif %}{# <tool_call> arguments #}";
/// A template that opens the block.
const OPENED: &str = "{{ messages[0].content }}<|role|>{% if thinking is defined and not thinking %}</think>{% else %}\
<think>\n{% endif %}{# <tool_call> arguments #}{% if reasoning_effort %}{% endif %}";
const MARKERS: &[&str] = &["</think>", "<tool_call>", "</tool_call>"];

fn ask(members: &Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "x" }] });
    body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn reasoning_has_two_names_and_is_counted() {
    let setup = support::ready_for(QWEN, MARKERS).await;
    setup.conductor.play(|_| writes("<think>\nHm.\n</think>\n\nHere.", MARKERS));
    let body = ask(&json!({}));
    let choice = both(&setup, &body).await;
    let message = &choice["message"];
    assert_eq!((&message["reasoning_content"], &message["reasoning"]), (&json!("Hm."), &json!("Hm.")));
    assert_eq!((&message["content"], &choice["finish_reason"]), (&json!("Here."), &json!("stop")));
    let usage = setup.post(CHAT, &body).await.json()["usage"].clone();
    // Both markers, three characters and two line breaks.
    assert_eq!(usage["completion_tokens_details"], json!({ "reasoning_tokens": 7 }));
    let choice = both(&setup, &ask(&json!({ "include_reasoning": false }))).await;
    assert_eq!(choice["message"], json!({ "role": "assistant", "content": "Here.", "refusal": null }));
}

#[tokio::test]
async fn the_end_of_the_prompt_says_whether_a_block_is_open() {
    let setup = support::ready_for(QWEN, MARKERS).await;
    setup.conductor.play(|_| writes("Here <think>.", MARKERS));
    let choice = both(&setup, &ask(&json!({ "enable_thinking": false }))).await;
    assert_eq!(choice["message"]["content"], "Here <think>.");
    assert!(prompt(&setup, MARKERS).ends_with("<|role|><think>\n\n</think>\n\n"));
    let setup = support::ready_for(OPENED, MARKERS).await;
    setup.conductor.play(|_| writes("Hm.\n</think>\n\nHere.", MARKERS));
    let choice = both(&setup, &ask(&json!({}))).await;
    assert_eq!((&choice["message"]["reasoning"], &choice["message"]["content"]), (&json!("Hm."), &json!("Here.")));
    // A block that never ends.
    setup.conductor.play(|_| says_ids(&ids_of("Hm. So", MARKERS), FinishReason::Length));
    let choice = both(&setup, &ask(&json!({}))).await;
    assert_eq!((&choice["message"]["reasoning"], &choice["message"]["content"]), (&json!("Hm. So"), &json!("")));
    assert_eq!(choice["finish_reason"], "length");
    // Text of clients opens nothing.
    let setup = support::ready_for("{{ messages[0].content }}{# </think> #}", MARKERS).await;
    setup.conductor.play(|_| writes("Here.", MARKERS));
    let body = json!({ "messages": [{ "role": "user", "content": "x</think>" }] });
    assert_eq!(both(&setup, &body).await["message"]["content"], "Here.");
}

#[tokio::test]
async fn a_continued_message_says_whether_its_block_is_open() {
    let setup = support::ready_for("{% for m in messages %}<|role|>{{ m.content }}{% endfor %}{# </think> #}", MARKERS).await;
    setup.conductor.play(|_| writes(" more</think>Done.", MARKERS));
    let body = |text: &str| {
        json!({ "continue_final_message": true,
            "messages": [{ "role": "user", "content": "x" }, { "role": "assistant", "content": text }] })
    };
    let choice = both(&setup, &body("<think>Hm")).await;
    assert_eq!((&choice["message"]["reasoning"], &choice["message"]["content"]), (&json!("more"), &json!("Done.")));
    setup.conductor.play(|_| writes(" on.", MARKERS));
    assert_eq!(both(&setup, &body("<think>Hm</think>So")).await["message"]["content"], " on.");
}

#[tokio::test]
async fn stop_strings_and_broken_characters_in_reasoning_do_no_harm() {
    let setup = support::ready_for(QWEN, MARKERS).await;
    setup.conductor.play(|_| {
        let mut ids = ids_of("<think>Hm. END", MARKERS);
        // Half of a character before each marker.
        ids.push(0xc3);
        ids.extend(ids_of("</think>", MARKERS));
        ids.push(0xc3);
        ids.extend(ids_of("<tool_call>{\"name\": \"now\"}</tool_call>", MARKERS));
        says_ids(&ids, FinishReason::EndOfSequence)
    });
    let choice = both(&setup, &chat(&json!({ "stop": ["END"] }))).await;
    assert_eq!(choice["message"]["reasoning"], "Hm. END\u{fffd}");
    assert_eq!((&choice["message"]["content"], calls(&choice).len()), (&json!("\u{fffd}"), 1));
}

#[tokio::test]
async fn a_call_inside_an_open_block_is_a_call() {
    let setup = support::ready_for(OPENED, MARKERS).await;
    setup.conductor.play(|_| writes("Hm.\n<tool_call>{\"name\": \"now\"}</tool_call>", MARKERS));
    let choice = both(&setup, &chat(&json!({}))).await;
    assert_eq!((&choice["message"]["reasoning"], calls(&choice).len()), (&json!("Hm."), 1));
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn switches_are_variables_of_the_template() {
    let setup = support::ready_for(OPENED, MARKERS).await;
    for members in [
        json!({ "thinking": false }),
        json!({ "thinking": { "type": "disabled" } }),
        json!({ "enable_thinking": false }),
        json!({ "enable_thinking": false, "thinking": false }),
        json!({ "chat_template_kwargs": { "thinking": false } }),
        json!({ "chat_template_kwargs": { "thinking": false }, "thinking": false }),
    ] {
        assert_eq!(setup.post(CHAT, &ask(&members)).await.status, StatusCode::OK, "{members}");
        assert!(prompt(&setup, MARKERS).ends_with("</think>"), "{members}");
    }
    for members in [json!({}), json!({ "thinking": true }), json!({ "reasoning_effort": "high" })] {
        assert_eq!(setup.post(CHAT, &ask(&members)).await.status, StatusCode::OK, "{members}");
        assert!(prompt(&setup, MARKERS).ends_with("<think>\n"), "{members}");
    }
    // A template with a switch alone: no effort turns it off, and other efforts mean nothing.
    let setup = support::ready_for(QWEN, MARKERS).await;
    assert_eq!(setup.post(CHAT, &ask(&json!({ "reasoning_effort": "none" }))).await.status, StatusCode::OK);
    assert!(prompt(&setup, MARKERS).ends_with("</think>\n\n"));
    let plain = support::ready_for("{{ messages[0].content }}", &[]).await;
    for (setup, members, param) in [
        (&setup, json!({ "reasoning_effort": "low" }), "reasoning_effort"),
        (&setup, json!({ "reasoning_effort": "some" }), "reasoning_effort"),
        (&setup, json!({ "thinking": true, "enable_thinking": false }), "thinking"),
        (&setup, json!({ "thinking": 1 }), "thinking"),
        (&setup, json!({ "thinking": { "type": "perhaps" } }), "thinking.type"),
        (
            &setup,
            json!({ "enable_thinking": true, "chat_template_kwargs": { "enable_thinking": false } }),
            "enable_thinking",
        ),
        (&setup, json!({ "thinking_token_budget": -1 }), "thinking_token_budget"),
        (&plain, json!({ "enable_thinking": true }), "enable_thinking"),
        (&plain, json!({ "thinking": true }), "thinking"),
        (&plain, json!({ "reasoning_effort": "low" }), "reasoning_effort"),
        (&plain, json!({ "reasoning_effort": "none" }), "reasoning_effort"),
        (&plain, json!({ "thinking_token_budget": 5 }), "thinking_token_budget"),
    ] {
        let answer = setup.post(CHAT, &ask(&members)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{members}");
        assert_eq!(answer.json()["error"]["param"], param, "{members}");
    }
    // Clients say so to every server.
    assert_eq!(plain.post(CHAT, &ask(&json!({ "include_reasoning": true }))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_budget_reaches_the_conductor_with_the_tokens_of_the_block() {
    let thinking = |setup: &support::Setup| setup.conductor.last().spec.unwrap().thinking;
    let of = |begin, max_tokens| Some(tutti_proto::cluster::v1::Thinking { begin, end: 264, max_tokens });
    let setup = support::ready_for(QWEN, MARKERS).await;
    setup.post(CHAT, &ask(&json!({}))).await;
    assert_eq!(thinking(&setup), None);
    setup.post(CHAT, &ask(&json!({ "thinking_token_budget": 5 }))).await;
    assert_eq!(thinking(&setup), of(Some(263), Some(5)));
    setup.post(CHAT, &ask(&json!({ "thinking_token_budget": 5, "enable_thinking": false }))).await;
    assert_eq!(thinking(&setup), None);
    // A constraint begins behind the block.
    setup.post(CHAT, &chat(&json!({ "tool_choice": "required" }))).await;
    assert_eq!(thinking(&setup), of(Some(263), None));
    let setup = support::ready_for(OPENED, MARKERS).await;
    setup.post(CHAT, &chat(&json!({ "tool_choice": "required", "thinking_token_budget": 0 }))).await;
    assert_eq!(thinking(&setup), of(None, Some(0)));
}

#[tokio::test]
async fn reasoning_of_earlier_turns_goes_to_the_template() {
    let setup = support::ready_for(QWEN, MARKERS).await;
    for members in [
        json!({ "reasoning_content": "Hm" }),
        json!({ "reasoning": "Hm" }),
        json!({ "reasoning_content": "Hm", "reasoning": "Hm" }),
    ] {
        let mut message = json!({ "role": "assistant", "content": "y" });
        message.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        let body = json!({ "messages": [{ "role": "user", "content": "x" }, message] });
        assert_eq!(setup.post(CHAT, &body).await.status, StatusCode::OK);
        assert!(prompt(&setup, MARKERS).contains("y(Hm)"));
    }
}
