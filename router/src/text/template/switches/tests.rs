use serde_json::json;

use super::*;

fn set_on(source: &str, switches: Switches) -> Result<Value, Error> {
    let template = ChatTemplate::read(None, Some(source.as_bytes())).unwrap().unwrap();
    let mut options = RenderOptions { switches, ..RenderOptions::default() };
    template.set_switches(&mut options)?;
    Ok(Value::Object(options.variables))
}

fn thinking(is_on: bool) -> Switches {
    Switches { thinking: Some(Switch { parameter: "thinking", is_on }), effort: None }
}

fn effort(effort: &str) -> Switches {
    Switches { thinking: None, effort: Some(effort.into()) }
}

#[test]
fn a_wish_is_the_variable_that_the_template_reads() {
    let qwen = "{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}";
    assert_eq!(set_on(qwen, thinking(false)).unwrap(), json!({"enable_thinking": false}));
    assert_eq!(set_on(qwen, effort("none")).unwrap(), json!({"enable_thinking": false}));
    let deepseek = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}";
    assert_eq!(set_on(deepseek, thinking(true)).unwrap(), json!({"thinking": true}));
    let harmony = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}\
                   {% macro m() %}{{ reasoning_effort }}{% endmacro %}";
    assert_eq!(set_on(harmony, effort("low")).unwrap(), json!({"reasoning_effort": "low"}));
}

#[test]
fn a_wish_that_the_template_ignores_is_refused() {
    let of_message = "{% for message in messages %}{{ message.thinking }}{% endfor %}";
    for (source, switches, field) in [
        ("", thinking(true), "thinking"),
        (of_message, thinking(true), "thinking"),
        ("", effort("low"), "reasoning_effort"),
        ("{{ thinking }}", effort("low"), "reasoning_effort"),
    ] {
        assert_eq!(set_on(source, switches).unwrap_err().field(), Some(field), "{source}");
    }
}
