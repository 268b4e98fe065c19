use super::*;
use crate::test_support;

fn chosen(tool: &str, reasoning: &str, template: &str) -> Result<ModelDialect, Error> {
    let names = ParserNames { tool: tool.into(), reasoning: reasoning.into() };
    let template = ChatTemplate::read(None, Some(template.as_bytes())).unwrap();
    ModelDialect::choose(&names, template.as_ref(), &test_support::tokenizer())
}

#[test]
fn the_template_shows_the_forms_unless_they_are_named() {
    let hermes = "{# <tool_call>arguments</tool_call> </think> #}";
    let found = chosen("auto", "auto", hermes).unwrap();
    assert_eq!((found.format().unwrap().name(), found.reasoning_name()), ("hermes", "think"));
    let found = chosen("qwen3_coder", "none", hermes).unwrap();
    assert_eq!((found.format().unwrap().name(), found.reasoning_name()), ("qwen_xml", "none"));
    let found = chosen("auto", "auto", "{{ messages }}").unwrap();
    assert_eq!((found.format(), found.reasons()), (Err(&Refusal::NoMarkers), false));
    let found = chosen("auto", "auto", "{# <|channel|> #}").unwrap();
    assert!(found.reasons() && found.format_marks_reasoning() && found.reasoning().is_none());
}

#[test]
fn markers_are_the_added_tokens() {
    let found = chosen("auto", "auto", "").unwrap();
    assert_eq!(found.vocabulary().id("<think>"), Some(263));
    assert_eq!(found.vocabulary().id("he"), None);
}

#[test]
fn names_that_there_are_not_are_refused_with_those_that_there_are() {
    for (tool, reasoning, field) in [("herms", "auto", "tool_parser"), ("auto", "thin", "reasoning_parser")] {
        let error = chosen(tool, reasoning, "").err().unwrap();
        assert_eq!(error.field(), Some(field));
        assert!(error.message().contains("auto, "), "{error}");
    }
}
