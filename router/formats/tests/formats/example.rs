//! The example of the crate's documentation.

use tutti_formats::{Answer, Dialect, Format, Reasoning, Request, Vocabulary};

#[test]
fn the_example_of_the_documentation_runs() -> Result<(), tutti_formats::Refusal> {
    let template = "… <tool_call>{\"name\": …, \"arguments\": …}</tool_call> … </think> …";
    let dialect = Dialect {
        format: Some(Format::choose("auto", Some(template))?),
        reasoning: Reasoning::choose("auto", Some(template))?,
        vocabulary: Vocabulary::from_iter([("<tool_call>".to_owned(), 7), ("</tool_call>".to_owned(), 8)]),
    };
    let mut parser = dialect.parser(Request::default());
    let mut answer = Answer::default();
    let output =
        [(1, "I look."), (7, "<tool_call>"), (2, "{\"name\": \"now\""), (3, "}"), (8, "</tool_call>")];
    for (token, text) in output {
        answer.extend(parser.push(token, text));
    }
    answer.extend(parser.finish(""));
    assert_eq!(answer.content, "I look.");
    assert_eq!((answer.calls[0].name.as_str(), answer.calls[0].arguments.as_str()), ("now", "{}"));
    Ok(())
}
