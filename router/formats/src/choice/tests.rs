use super::*;

#[test]
fn a_template_shows_its_format() {
    for (template, name) in [
        (
            "<tool_call>\\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\\n</tool_call>",
            "hermes",
        ),
        ("<tool_call>\\n<function=example>\\n<parameter=p>\\n with \"arguments\"", "qwen_xml"),
        ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key> \"arguments\"", "glm"),
        ("[TOOL_CALLS]{{ tool.name }}[ARGS]{{ arguments }}", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f }}<｜tool▁sep｜>", "deepseek"),
        ("<｜DSML｜function_calls>", "dsml"),
        ("<|tool_call_begin|>functions.{{ f }}<|tool_call_argument_begin|>", "kimi"),
        ("<minimax:tool_call><invoke name=", "minimax"),
        ("<|start|>assistant<|channel|>commentary", "harmony"),
        ("{\"name\": function name, \"parameters\": dictionary} <|python_tag|> ipython", "llama3_json"),
        ("[func_name1(params_name1=params_value1)] ipython \"parameters\"", "pythonic"),
    ] {
        assert_eq!(Format::choose("auto", Some(template)).unwrap().name(), name);
    }
}

#[test]
fn a_template_without_markers_is_refused_with_the_names() {
    let refusal = Format::choose("auto", Some("{{ messages }}")).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "the chat template has the markers of no known format of tool calls; one can be named: harmony, dsml, \
         deepseek, kimi, minimax, glm, qwen_xml, hermes, mistral, pythonic, llama3_json"
    );
    let refusal = Format::choose("auto", None).unwrap_err().to_string();
    assert!(
        refusal.starts_with("the model has no chat template") && refusal.ends_with("llama3_json"),
        "{refusal}"
    );
}

#[test]
fn a_format_can_be_named_and_an_unknown_name_is_refused() {
    for format in Format::all() {
        assert_eq!(format.name().parse(), Ok(format));
    }
    assert_eq!(Format::choose("qwen3_coder", None).unwrap().name(), "qwen_xml");
    let refusal = Format::choose("hermse", Some("<tool_call> arguments")).unwrap_err().to_string();
    assert!(
        refusal.starts_with("no format of tool calls is named \"hermse\"; there are auto, harmony, "),
        "{refusal}"
    );
}

#[test]
fn names_and_aliases_differ() {
    let mut names: Vec<_> =
        FORMATS.iter().flat_map(|format| format.aliases.iter().chain([&format.name])).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}

/// Published templates, and what they show.
const PUBLISHED: [(&str, Option<&str>, Option<&str>); 12] = [
    ("deepseekv3", Some("deepseek"), Some("think")),
    ("deepseek_r1_distill", Some("deepseek"), Some("think")),
    ("gemma3", None, None),
    ("glm4moe", Some("glm"), Some("think")),
    ("gptoss", Some("harmony"), None),
    ("llama3", None, None),
    ("llama3_1", Some("llama3_json"), None),
    ("llama3_2", Some("llama3_json"), None),
    ("nemotron_3_nano", Some("qwen_xml"), Some("think")),
    ("qwen2_5", Some("hermes"), None),
    ("qwen3", Some("hermes"), Some("think")),
    ("qwen3_8", Some("qwen_xml"), Some("think")),
];

#[test]
fn published_templates_show_their_formats() {
    let Some(root) = std::env::var_os("REFERENCE_TEXTS") else {
        eprintln!("skipped: REFERENCE_TEXTS is not set (tests/texts/run sets it)");
        return;
    };
    for (family, format, reasoning) in PUBLISHED {
        let path = std::path::Path::new(&root).join(family).join("chat_template.jinja");
        let template = std::fs::read_to_string(&path).unwrap();
        assert_eq!(Format::of_template(&template).map(Format::name), format, "{family}");
        let kind = crate::Reasoning::choose("auto", Some(&template)).unwrap();
        assert_eq!(kind.map(|kind| kind.name), reasoning, "{family}");
    }
}
