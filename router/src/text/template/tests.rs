use serde_json::json;

use super::*;

fn read(config: serde_json::Value) -> ChatTemplate {
    ChatTemplate::read(Some(config.to_string().as_bytes()), None).unwrap().unwrap()
}

fn user(content: &str) -> Vec<Message> {
    vec![Message { role: "user".into(), content: content.into(), name: None, media_at: vec![] }]
}

/// Maximum size of a rendered text in bytes. Only the test of this limit reaches it.
const MAX: usize = 1 << 16;

fn prompt() -> RenderOptions {
    RenderOptions { add_generation_prompt: true, ..RenderOptions::default() }
}

#[test]
fn blocks_are_trimmed_and_special_tokens_are_variables() {
    let template = read(json!({
        "bos_token": {"content": "<s>", "special": true},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content.strip() }}]{{ eos_token }}\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n>\n{%- endif %}",
    }));
    assert_eq!(template.render(&user(" hi "), &prompt(), MAX).unwrap(), "<s>\n[hi]</s>\n>");
}

#[test]
fn an_exception_in_the_template_is_an_error_of_the_messages() {
    let template = read(json!({ "chat_template": "{{ raise_exception('no ' ~ messages[0].role) }}" }));
    let error = template.render(&user("hi"), &prompt(), MAX).unwrap_err();
    assert_eq!(error.field(), Some("messages"));
    assert!(error.message().contains("no user"), "{error}");
}

#[test]
fn a_panic_of_the_engine_is_an_error_of_the_messages() {
    let template = read(json!({ "chat_template": "{{ messages[0].content[::-1] }}" }));
    assert_eq!(template.render(&user("hi"), &prompt(), MAX).unwrap(), "ih");
    let error = template.render(&user(""), &prompt(), MAX).unwrap_err();
    assert_eq!(
        (error.field(), error.message()),
        (Some("messages"), "the chat template's engine fails on them")
    );
    assert_eq!(template.render(&user("hi"), &prompt(), MAX).unwrap(), "ih", "the next rendering is sound");
}

#[test]
fn the_default_of_several_templates_is_taken() {
    let template = read(json!({ "chat_template": [
        { "name": "tool_use", "template": "tools" },
        { "name": "default", "template": "plain {{ thinking }}" },
    ] }));
    let mut options = prompt();
    options.variables.insert("thinking".into(), json!(false));
    assert_eq!(template.render(&user("hi"), &options, MAX).unwrap(), "plain False");
}

#[test]
fn the_jinja_file_wins_and_no_template_is_none() {
    let config = json!({ "chat_template": "config", "eos_token": "</s>" }).to_string();
    let template = ChatTemplate::read(Some(config.as_bytes()), Some(b"file {{ eos_token }}")).unwrap();
    assert_eq!(template.unwrap().render(&user("hi"), &prompt(), MAX).unwrap(), "file </s>");
    assert!(ChatTemplate::read(Some(b"{}"), None).unwrap().is_none());
}

#[test]
fn json_is_written_as_python_writes_it() {
    let template = read(json!({ "chat_template": "{{ value | tojson }}" }));
    let mut options = prompt();
    options.variables.insert("value".into(), json!({ "a": [1, "<é'>"], "b": null }));
    let text = template.render(&user("hi"), &options, MAX).unwrap();
    assert_eq!(text, "{\"a\": [1, \"<é'>\"], \"b\": null}");
}

#[test]
fn loop_controls_and_namespaces_work() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% break %}{% endfor %}{{ ns.n }}{{ strftime_now('%Y') | length }}";
    let template = read(json!({ "chat_template": source }));
    let messages = [user("one"), user("two")].concat();
    assert_eq!(template.render(&messages, &prompt(), MAX).unwrap(), "two14");
}

#[test]
fn a_final_message_is_continued() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let template = read(json!({ "chat_template": source }));
    let options = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
    assert_eq!(template.render(&user("The answer is "), &options, MAX).unwrap(), "<user>The answer is");
}

#[test]
fn a_template_that_runs_for_too_long_is_stopped() {
    let template = read(json!({ "chat_template":
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% set x = a %}{% endfor %}{% endfor %}{% endfor %}" }));
    let many: Vec<Message> = (0..1000).flat_map(|_| user("hi")).collect();
    let error = template.render(&many, &prompt(), MAX).unwrap_err();
    assert!(error.field() == Some("messages") && error.message().contains("fuel"), "{error}");
}

#[test]
fn a_text_that_grows_too_long_is_stopped() {
    let template = read(json!({ "chat_template":
        "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}" }));
    let many: Vec<Message> = (0..300).flat_map(|_| user(&"x".repeat(1000))).collect();
    let error = template.render(&many, &prompt(), MAX).unwrap_err();
    assert_eq!(error.field(), Some("messages"));
    assert!(template.render(&many[..8], &prompt(), MAX).is_ok());
}
