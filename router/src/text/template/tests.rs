use serde_json::json;

use super::*;

fn read(config: serde_json::Value) -> ChatTemplate {
    ChatTemplate::read(Some(config.to_string().as_bytes()), None).unwrap().unwrap()
}

fn user(content: &str) -> Vec<Message> {
    vec![Message::new("user", content)]
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
    assert_eq!(template.render(&user("The answer is "), &options, MAX).unwrap(), "<user>The answer is ");
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

/// The right values are those of transformers 5.23: tests/texts compares more.
#[test]
fn a_prompt_ends_at_the_end_of_its_last_message() {
    let turns = "{% for m in messages %}<{{ m.role }}>{{ m.content CUT }}</>{% endfor %}";
    let cases = [
        ("", "ser", "<user>ser"),
        ("", "", "<user>"),
        ("", "a \n", "<user>a \n"),
        ("|trim", " a ", "<user>a"),
        ("|trim", "", "<user>"),
        // The mark's own word in a client's text.
        ("", "CONTINUE_FINAL_MESSAGE_TAG x", "<user>CONTINUE_FINAL_MESSAGE_TAG x"),
        // A suffix that begins with a space is not told from the mark's own.
        ("|trim ~ ' '", "a ", "<user>a "),
    ];
    let options = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
    for (cut, content, expected) in cases {
        let template = read(json!({ "chat_template": turns.replace("CUT", cut) }));
        assert_eq!(template.render(&user(content), &options, MAX).unwrap(), expected, "{cut} {content:?}");
    }
    for cut in ["[:3]", "|upper", "~ m.content"] {
        let template = read(json!({ "chat_template": turns.replace("CUT", cut) }));
        let error = template.render(&user("hello"), &options, MAX).unwrap_err();
        assert_eq!(error.field(), Some("continue_final_message"), "{cut}");
    }
}

fn parts(texts: &[&str]) -> Vec<Message> {
    let parts = texts.iter().map(|text| ContentPart::Text((*text).into())).collect();
    vec![Message { content: Content::List(parts), ..Message::new("user", "") }]
}

#[test]
fn content_has_the_shape_that_the_template_reads() {
    let shown = |source: &str, messages: &[Message]| {
        let template = read(json!({ "chat_template": source }));
        template.check_messages(messages).map_err(|e| e.message().to_owned())?;
        template.render(messages, &prompt(), MAX).map_err(|e| e.message().to_owned())
    };
    let text = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    let looped = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}{% endfor %}";
    let either = "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}";
    let first = "{% for m in messages %}<{{ m.content[0]['text'] }}>{% endfor %}";
    let cases = [
        (text, user("a"), "<a>"),
        (text, parts(&["a", "b"]), "<a\nb>"),
        (looped, user("a"), "<a>"),
        (looped, parts(&["a", "b"]), "<a><b>"),
        (either, user("a"), "<a>"),
        (either, parts(&["a", "b"]), "[a][b]"),
        (first, user("a"), "<a>"),
        (first, parts(&["a", "b"]), "<a\nb>"),
    ];
    for (source, messages, expected) in cases {
        assert_eq!(shown(source, &messages).as_deref(), Ok(expected), "{source}");
    }
    let lost = shown("{{ messages[0].role }}", &user("a")).unwrap_err();
    assert!(lost.contains("shows none of their text"), "{lost}");
    assert_eq!(shown("{{ messages[0].role }}", &user("")).as_deref(), Ok("user"));
}

/// The expected texts are those of transformers 5.23 for content in the shape that the template reads.
#[test]
fn a_template_may_change_the_white_space_and_the_case_of_content() {
    let cases = [
        ("{{ C | trim }}", "a  b\nc"),
        ("{{ C.split() | join(' ') }}", "a b c"),
        ("{{ C.split() | join }}", "abc"),
        ("{{ C | replace('\n', '<br>') }}", " a  b<br>c "),
        ("{{ C | replace('\n', '') }}", " a  bc "),
        ("{{ C | capitalize }}", " a  b\nc "),
        ("{{ C.upper() }}", " A  B\nC "),
        ("{{ C | tojson }}", "\" a  b\\nc \""),
    ];
    for (shown, expected) in cases {
        let text = format!("{{% for m in messages %}}{}{{% endfor %}}", shown.replace('C', "m.content"));
        let parts = format!(
            "{{% for m in messages %}}{{% for p in m.content %}}{{% if p.type == 'text' %}}{}{{% endif %}}{{% endfor %}}{{% endfor %}}",
            shown.replace('C', "p.text")
        );
        for source in [text, parts] {
            // A part that is written as JSON is not told from a message that is.
            if source.contains("p.text | tojson") {
                continue;
            }
            let template = read(json!({ "chat_template": source }));
            let messages = user(" a  b\nc ");
            template.check_messages(&messages).unwrap_or_else(|e| panic!("{source}: {e}"));
            assert_eq!(template.render(&messages, &prompt(), MAX).unwrap(), expected, "{source}");
        }
    }
}

#[test]
fn a_role_that_the_template_loses_is_refused_and_one_that_it_refuses_says_so() {
    let source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    let template = read(json!({ "chat_template": source }));
    assert!(template.check_messages(&[Message::new("system", "x")]).is_err());
    assert!(template.check_messages(&user("x")).is_ok());
    let source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}";
    let template = read(json!({ "chat_template": source }));
    let system = [Message::new("system", "x")];
    assert!(template.check_messages(&system).is_ok());
    assert!(template.render(&system, &prompt(), MAX).unwrap_err().message().contains("no system"));
}

#[test]
fn a_developer_is_a_system_unless_the_template_names_it() {
    let role = |source: &str| read(json!({ "chat_template": source })).role("developer").to_owned();
    assert_eq!(role("{% if messages[0].role == 'system' %}{% endif %}"), "system");
    assert_eq!(role("{% if messages[0].role == \"developer\" %}{% endif %}"), "developer");
}

#[test]
fn what_marks_words_of_training_and_formats_texts_renders() {
    let source = "{% set x = 1 %}{% for m in messages %}\n    {%- generation %}\n{% set x = 2 %}{{ '%s|%5.1f' % (m.content.ljust(3), 2) }}{{ x }}{% endgeneration -%}\n {% endfor %}{{ x }}";
    let template = read(json!({ "chat_template": source }));
    assert_eq!(template.render(&user("a"), &prompt(), MAX).unwrap(), "a  |  2.021");
}

#[test]
fn variables_of_the_route_are_refused() {
    let template = read(json!({ "chat_template": "{{ messages }}" }));
    for name in ["messages", "tools", "add_generation_prompt", "continue_final_message"] {
        let mut options = prompt();
        options.variables.insert(name.into(), json!(false));
        let error = template.check_variables(&options).unwrap_err();
        assert_eq!(error.field(), Some(format!("chat_template_kwargs.{name}").as_str()));
    }
}

#[test]
fn arguments_are_objects_unless_the_template_joins_them_to_texts() {
    let call = |arguments: serde_json::Value| ToolCall {
        id: Some("a".into()),
        name: "f".into(),
        arguments: arguments.as_object().unwrap().clone(),
    };
    let calls = vec![call(json!({ "b": "é", "a": [1, true] }))];
    let messages = [Message { calls, ..Message::new("assistant", "") }];
    let of_call = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}";
    let end = "{% endfor %}{% endfor %}";
    for (source, expected) in [
        ("{% for k, v in c.function.arguments|items %}{{ k }}={{ v|tojson }};{% endfor %}", "b=\"é\";a=[1, true];"),
        ("{{ c.function.arguments | tojson }}", "{\"b\": \"é\", \"a\": [1, true]}"),
        ("{{ '<' + c.function.arguments + '>' }}", "<{\"b\": \"é\", \"a\": [1, true]}>"),
        ("{{ c.id }}{{ c.type }}{{ c.function.name }}", "afunctionf"),
    ] {
        let template = read(json!({ "chat_template": format!("{of_call}{source}{end}") }));
        assert_eq!(template.render(&messages, &prompt(), MAX).unwrap(), expected, "{source}");
    }
}

#[test]
fn reasoning_has_the_names_that_templates_have_for_it() {
    let thought = |content: &str| Message { reasoning: Some("Hm".into()), ..Message::new("assistant", content) };
    let source = "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}{{ m.reasoning }}{{ m.thinking }};{% endfor %}";
    let template = read(json!({ "chat_template": source }));
    let messages = [thought("x"), thought(""), Message::new("user", "y")];
    assert_eq!(template.render(&messages, &prompt(), MAX).unwrap(), "x|HmHm;|HmHmHm;y|;");
}
