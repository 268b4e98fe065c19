//! Outputs that end early or do not follow their format: each has a defined result, and nothing is lost.

use crate::support::{calls, read};

#[test]
fn slips_of_harmony_have_a_result() {
    let harmony = |output: &str| read("harmony", output);
    assert_eq!(harmony("No channel.").content, "No channel.");
    assert_eq!(harmony("<|message|>No channel.<|end|>").content, "No channel.");
    assert_eq!(harmony("<|call|>Text.<|end|><|end|>").content, "Text.");
    assert_eq!(harmony("<|channel|>final<|message|>Yes.<|return|>").content, "Yes.");
    assert_eq!(harmony("<|channel|>commentary to=user<|message|>Yes.<|end|>").content, "Yes.");
    let browser = harmony("<|channel|>analysis to=browser.search code<|message|>{\"q\": 1}<|call|>");
    assert_eq!((browser.reasoning.as_str(), browser.calls.len()), ("{\"q\": 1}", 0));
    let analysis = harmony("<|channel|>analysis to=functions.now code<|message|>{}<|call|>");
    assert_eq!(calls(&analysis), [("now", "{}")]);
    let early = harmony("<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>");
    assert_eq!(calls(&early), [("now", "{}")]);
    let code = harmony("<|channel|>commentary to=functions.now<|message|>print(1)<|call|>");
    assert_eq!(calls(&code), [("now", "print(1)")]);
    assert_eq!(harmony("<|channel|>final").content, "<|channel|>final");
    let unfinished = harmony("<|channel|>analysis<|message|>a<|channel|>final<|message|>b");
    assert_eq!((unfinished.reasoning.as_str(), unfinished.content.as_str()), ("a", "b"));
}

#[test]
fn a_call_that_the_limit_of_tokens_cuts_stays_as_far_as_it_goes() {
    for (format, output, expected) in [
        ("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Be", "{\"city\": \"Be"),
        ("qwen_xml", "<tool_call><function=weather><parameter=city>\nBe", "{\"city\": \"Be"),
        ("qwen_xml", "<tool_call><function=weather><parameter=days>\n1", "{\"days\": 1"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]{\"city\": \"Be", "{\"city\": \"Be"),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"ci",
            "{\"ci",
        ),
        ("harmony", "<|channel|>commentary to=functions.weather<|message|>{\"ci", "{\"ci"),
    ] {
        let answer = read(format, output);
        assert_eq!(calls(&answer), [("weather", expected)], "{output}");
        assert!(!answer.calls[0].ended && answer.content.is_empty(), "{answer:?}");
    }
    let unnamed = "I look. <tool_call>\n{\"name\": \"wea";
    assert_eq!(read("hermes", unnamed).content, unnamed);
}

#[test]
fn a_call_that_is_none_is_content_and_nothing_is_lost() {
    for (format, output) in [
        ("hermes", "<tool_call>\nnot json\n</tool_call>"),
        ("hermes", "<tool_call>{\"foo\": 1}</tool_call> and more"),
        ("hermes", "<tool_call>{\"name\": 3}</tool_call>"),
        ("hermes", "<tool_call>{\"name\": \"two words\"}</tool_call>"),
        ("hermes", "<tool_call></tool_call>"),
        ("qwen_xml", "<tool_call>\n<tool_call>\nno function"),
        ("llama3_json", "{\"answer\": 42}"),
        ("llama3_json", "{\"name\": \"Bob\", \"age\": 3}"),
        ("llama3_json", "{\"name\": \"Bob\"}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[link](https://example.com)"),
        ("pythonic", "[f(x) is a term]"),
        ("pythonic", "[1, 2]"),
        ("mistral", "[TOOL_CALLS] I do not know."),
    ] {
        let answer = read(format, output);
        assert_eq!(answer.content, output, "{format}");
        assert!(answer.calls.is_empty(), "{format}: {answer:?}");
    }
}

#[test]
fn a_sound_call_behind_a_malformed_one_is_found() {
    let answer = read("hermes", "<tool_call>\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>");
    assert_eq!(calls(&answer), [("now", "{}")]);
    assert_eq!(answer.content, "<tool_call>\n");
    let broken = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"days\": 1</tool_call>";
    let answer = read("hermes", &format!("{broken}<tool_call>{{\"name\": \"now\"}}</tool_call>"));
    assert_eq!(calls(&answer), [("weather", "{\"days\": 1"), ("now", "{}")]);
}

#[test]
fn slips_around_calls_leak_no_marker() {
    for (format, output, content) in [
        ("hermes", "<tool_call>{\"name\": \"now\"}}\n</tool_call>", "}\n"),
        ("hermes", "<tool_call>{\"name\": \"now\"}\n<tool_call>{\"name\": \"now\"}\n</tool_call>", ""),
        ("hermes", "<tool_call>{\"name\": \"now\"}\n{\"name\": \"now\"}\n</tool_call>", ""),
        (
            "qwen_xml",
            "<tool_call>\n<function=now>\n</function>\n</function>\n</tool_call>",
            "\n</function>\n",
        ),
        ("qwen_xml", "<tool_call><function=now></tool_call>", ""),
        ("qwen_xml", "<tool_call><function=now></function><function=now></function></tool_call>", ""),
        ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>\n", ""),
        ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ""),
        ("minimax", "<minimax:tool_call><invoke name=\"now\"></minimax:tool_call>", ""),
    ] {
        let answer = read(format, output);
        assert_eq!(answer.content, content, "{output}");
        assert!(!answer.calls.is_empty() && answer.calls.iter().all(|call| call.name == "now"), "{answer:?}");
    }
}

#[test]
fn a_malformed_call_among_others_is_content() {
    for (format, output, content) in [
        ("mistral", "[TOOL_CALLS] [{\"name\": \"now\"}, {\"foo\": 1}]", "{\"foo\": 1}]"),
        ("hermes", "<tool_call>{\"name\": \"now\"}{\"foo\": 1}</tool_call>", "{\"foo\": 1}"),
        ("pythonic", "[now(), and more]", "and more]"),
        ("llama3_json", "{\"name\": \"now\"}; {\"foo\": 1}", "; {\"foo\": 1}"),
        (
            "kimi",
            "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_begin|>a b<|tool_call_argument_begin|>",
            "<|tool_call_begin|>a b<|tool_call_argument_begin|>",
        ),
    ] {
        let answer = read(format, output);
        assert_eq!(answer.content, content, "{output}");
        assert_eq!(calls(&answer), [("now", "{}")], "{output}");
    }
}

#[test]
fn a_tag_that_breaks_its_call_is_content() {
    let tag = format!("<parameter={}", "x".repeat(3_000));
    let answer = read("qwen_xml", &format!("<function=weather><parameter=days>1</parameter>{tag}"));
    assert_eq!(calls(&answer), [("weather", "{\"days\": 1")]);
    assert!(answer.calls[0].ended);
    assert_eq!(answer.content, tag);
}

#[test]
fn text_between_parameters_is_content() {
    let answer = read("qwen_xml", "<function=weather>\nfirst\n<parameter=days>1</parameter>\n</function>");
    assert_eq!(calls(&answer), [("weather", "{\"days\": 1}")]);
    assert_eq!(answer.content, "first\n");
}

#[test]
fn an_output_that_ends_before_its_call_has_a_name_is_text_to_its_last_byte() {
    for (format, output) in [
        ("glm", "<tool_call><"),
        ("glm", "<tool_call>wea</tool_"),
        ("hermes", "<tool_call>{\"na"),
        ("qwen_xml", "<tool_call><function=wea<"),
        ("mistral", "[TOOL_CALLS]wea[AR"),
    ] {
        let answer = read(format, output);
        assert_eq!((answer.content.as_str(), answer.calls.len()), (output, 0), "{format}");
    }
}
