//! Faults of other systems' parsers, each as a case.

use serde_json::{Value, json};
use tutti_formats::{Answer, Block, CallLimit, Calls, Event, Parser, Request};

use crate::support::{WORD, answer, arguments, calls, dialect, read, request, tokens, tools_of};

/// Pushes text in pieces of one character.
fn push(parser: &mut Parser, text: &str) -> Vec<Event> {
    text.chars().flat_map(|character| parser.push(WORD, &character.to_string())).collect()
}

fn summed(events: Vec<Event>) -> Answer {
    let mut answer = Answer::default();
    answer.extend(events);
    answer
}

#[test]
fn no_piece_of_a_marker_is_content() {
    let mut parser = dialect("hermes", "think", &[]).parser(request());
    let content: Vec<_> = push(&mut parser, "Yes.<tool_call>{\"name\"")
        .into_iter()
        .map(|event| match event {
            Event::Content(text) => text,
            event => panic!("{event:?}"),
        })
        .collect();
    assert_eq!(content.concat(), "Yes.");
    assert_eq!(push(&mut parser, ": \"now\"}</tool_call>").len(), 3);
    assert_eq!(parser.finish(""), []);
}

#[test]
fn a_text_that_only_begins_like_a_marker_is_delivered() {
    assert_eq!(read("hermes", "1 < 2, 2 <").content, "1 < 2, 2 <");
    assert_eq!(read("hermes", "a <tool_cal").content, "a <tool_cal");
    assert_eq!(read("mistral", "[TOOL").content, "[TOOL");
    assert_eq!(read("hermes", "<thi").content, "<thi");
    let mut parser = dialect("hermes", "think", &[]).parser(request());
    assert_eq!(push(&mut parser, "<tool"), []);
    assert_eq!(parser.push(WORD, "s"), [Event::Content("<tools".to_owned())]);
}

#[test]
fn three_calls_in_one_piece_are_three_calls() {
    let output = "<tool_call><function=now></function></tool_call>".repeat(3);
    let mut parser = dialect("qwen_xml", "think", &[]).parser(request());
    let events = parser.push(WORD, &output);
    assert_eq!(events.iter().filter(|event| **event == Event::CallEnd).count(), 3);
    assert_eq!(summed(events).calls.len(), 3);
}

#[test]
fn arguments_stream_while_they_are_written() {
    for (format, start) in [
        ("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Be"),
        ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nBe"),
        ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Be"),
        (
            "dsml",
            "<｜DSML｜tool_calls><｜DSML｜invoke name=\"weather\"><｜DSML｜parameter name=\"city\" string=\"true\">Be",
        ),
        ("pythonic", "[weather(city=\"Be"),
    ] {
        let mut parser = dialect(format, "think", &[]).parser(request());
        let events = parser.push(WORD, start);
        assert_eq!(summed(events).calls[0].arguments, "{\"city\": \"Be", "{format}");
        let event = Event::Arguments { index: 0, json_fragment: "rn".to_owned() };
        assert_eq!(parser.push(WORD, "rn"), [event], "{format}");
    }
}

#[test]
fn a_call_begins_once_with_its_whole_name() {
    let mut parser = dialect("hermes", "think", &[]).parser(request());
    let events = push(&mut parser, "<tool_call>{\"name\": \"weather\", \"arguments\": ");
    let [Event::CallBegin { index: 0, id, name }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(name, "weather");
    assert!(id.len() == 29 && id.starts_with("call_"), "{id}");
}

#[test]
fn a_value_keeps_its_own_newlines_and_loses_those_of_the_format() {
    let call = |value: &str| {
        format!("<tool_call>\n<function=weather>\n<parameter=text>{value}</parameter>\n</function>")
    };
    for (written, meant) in [
        ("\na\nb\n", "a\nb"),
        ("\n\na\n\n", "\na\n"),
        ("a", "a"),
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
        ("\n  a \n", "  a "),
    ] {
        assert_eq!(arguments(&read("qwen_xml", &call(written))), json!({"text": meant}), "{written:?}");
    }
}

#[test]
fn parameters_have_the_types_of_the_schema() {
    let typed = |key: &str, value: &str| {
        let output =
            format!("<tool_call>weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>");
        arguments(&read("glm", &output))[key].clone()
    };
    assert_eq!(typed("days", "12"), json!(12));
    assert_eq!(typed("days", "12.5"), json!("12.5"));
    assert_eq!(typed("days", "many"), json!("many"));
    assert_eq!(typed("count", "3"), json!(3));
    assert_eq!(typed("share", "0.5"), json!(0.5));
    assert_eq!(typed("share", "2"), json!(2));
    assert_eq!(typed("exact", "true"), json!(true));
    assert_eq!(typed("exact", "False"), json!(false));
    assert_eq!(typed("nothing", "null"), json!(null));
    assert_eq!(typed("nothing", "None"), json!(null));
    assert_eq!(typed("options", " {\"a\": [1]}\n"), json!({"a": [1]}));
    assert_eq!(typed("options", "{\"a\": "), json!("{\"a\": "));
    assert_eq!(typed("list", "[1, \"2\"]"), json!([1, "2"]));
    assert_eq!(typed("maybe", "7"), json!(7));
    assert_eq!(typed("maybe", "seven"), json!("seven"));
    assert_eq!(typed("city", "12"), json!("12"));
    assert_eq!(typed("city", "true"), json!("true"));
    assert_eq!(typed("undeclared", "12"), json!("12"));
}

#[test]
fn a_number_keeps_its_spelling() {
    let output = "<tool_call>weather<arg_key>share</arg_key><arg_value>1.50e2</arg_value></tool_call>";
    assert_eq!(read("glm", output).calls[0].arguments, "{\"share\": 1.50e2}");
    let arguments = "{ \"b\":1.0,\"a\" : 1e400 }";
    let output = format!("[TOOL_CALLS]f[ARGS]{arguments}");
    assert_eq!(read("mistral", &output).calls[0].arguments, arguments);
}

#[test]
fn a_call_without_arguments_has_an_empty_object() {
    for (format, output) in [
        ("hermes", "<tool_call>{\"name\": \"now\"}</tool_call>"),
        ("hermes", "<tool_call>{\"name\": \"now\", \"arguments\": null}</tool_call>"),
        ("qwen_xml", "<tool_call><function=now></function></tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>now</tool_call>"),
        ("glm", "<tool_call>now\n</tool_call>"),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>",
        ),
        ("minimax", "<minimax:tool_call><invoke name=\"now\"></invoke></minimax:tool_call>"),
        ("dsml", "<｜DSML｜tool_calls><｜DSML｜invoke name=\"now\"></｜DSML｜invoke></｜DSML｜tool_calls>"),
        ("pythonic", "[now()]"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>"),
        ("llama3_json", "{\"name\": \"now\"}"),
    ] {
        assert_eq!(calls(&read(format, output)), [("now", "{}")], "{output}");
        let mut parser = dialect(format, "think", &[]).parser(request());
        let mut events = push(&mut parser, output);
        events.extend(parser.finish(""));
        assert_eq!(calls(&summed(events)), [("now", "{}")], "{output}");
    }
}

#[test]
fn escapes_pass_the_borders_of_fragments() {
    let arguments = "{\"city\": \"Z\\u00fcrich \\ud83d\\ude00 é😀\\\\\"}";
    let output = format!("<tool_call>{{\"name\": \"weather\", \"arguments\": {arguments}}}</tool_call>");
    let mut parser = dialect("hermes", "think", &[]).parser(request());
    assert_eq!(summed(push(&mut parser, &output)).calls[0].arguments, arguments);
    let output = "[weather(city='\\u00fc\\x41\\U0001F600 \\ud83d\\ude00 \\d')]";
    let mut parser = dialect("pythonic", "think", &[]).parser(request());
    let answer = summed(push(&mut parser, output));
    assert_eq!(super::support::arguments(&answer), json!({"city": "üA😀 😀 \\d"}));
}

#[test]
fn a_broken_character_before_a_marker_keeps_the_call() {
    let markers = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    let mut parser = dialect("hermes", "think", &markers).parser(request());
    let mut events = parser.push(1, "<think>");
    events.extend(parser.push(WORD, "a"));
    events.extend(parser.push(2, "\u{fffd}</think>"));
    events.extend(parser.push(3, "\u{fffd}<tool_call>"));
    events.extend(parser.push(WORD, "{\"name\": \"now\"}"));
    events.extend(parser.push(4, "</tool_call>"));
    let answer = summed(events);
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("a\u{fffd}", "\u{fffd}"));
    assert_eq!(calls(&answer), [("now", "{}")]);
}

#[test]
fn a_call_inside_reasoning_is_a_call_or_text_by_setting() {
    let output = "<think>Hm.\n<tool_call>{\"name\": \"now\"}</tool_call>\nMore.</think>Done.";
    let parsed = read("hermes", output);
    assert_eq!(calls(&parsed), [("now", "{}")]);
    assert_eq!((parsed.reasoning.as_str(), parsed.content.as_str()), ("Hm.More.", "Done."));
    let request = Request { calls_in_reasoning: Calls::Text, ..request() };
    let parsed = answer(dialect("hermes", "think", &[]).parser(request), &tokens(output, &[]));
    assert!(parsed.calls.is_empty());
    assert_eq!(parsed.reasoning, "Hm.\n<tool_call>{\"name\": \"now\"}</tool_call>\nMore.");
    assert_eq!(parsed.content, "Done.");
}

#[test]
fn all_is_content_behind_a_closed_block() {
    let request = Request { block: Block::Closed, ..request() };
    let answer = answer(dialect("hermes", "think", &[]).parser(request), &tokens("Hi <think>", &[]));
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("", "Hi <think>"));
}

#[test]
fn an_open_block_without_an_end_is_reasoning_only() {
    let markers = ["<think>", "</think>"];
    let request = || Request { block: Block::Open, ..request() };
    let mut parser = dialect("hermes", "think", &markers).parser(request());
    let events = push(&mut parser, "\nI am");
    assert_eq!(parser.reasoning_tokens(), 5);
    let answer = summed(events);
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("I am", ""));
    // A model may repeat the marker with which the prompt ended.
    let tokens = tokens("<think>\nI am\n</think>\n\nHere.", &markers);
    let mut parser = dialect("hermes", "think", &markers).parser(request());
    let events: Vec<_> = tokens.iter().flat_map(|(id, text)| parser.push(*id, text)).collect();
    assert_eq!(parser.reasoning_tokens(), 3);
    let answer = summed(events);
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("I am", "Here."));
}

#[test]
fn the_first_call_is_the_only_one_without_parallel_calls() {
    let output =
        "<tool_call>{\"name\": \"now\"}</tool_call>\n<tool_call>{\"name\": \"search\"}</tool_call>Text.";
    let request = || Request { limit: CallLimit::One, ..request() };
    let whole = answer(dialect("hermes", "think", &[]).parser(request()), &tokens(output, &[]));
    assert_eq!(calls(&whole), [("now", "{}")]);
    assert_eq!(whole.content, "");
    let mut parser = dialect("hermes", "think", &[]).parser(request());
    let events = push(&mut parser, output);
    assert!(parser.is_done());
    assert_eq!(summed(events), whole);
}

#[test]
fn forty_eight_parameters_arrive_in_two_calls() {
    let schema: Value = (0..48).map(|n| (format!("p{n}"), json!({"type": ["integer", "null"]}))).collect();
    let tools = tools_of([("f", json!({"properties": schema}))]);
    let parameters: String = (0..48).map(|n| format!("<parameter=p{n}>\n{n}\n</parameter>\n")).collect();
    let output = format!("<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>\n").repeat(2);
    let request = Request { tools: tools.into(), ..request() };
    let answer = answer(dialect("qwen_xml", "think", &[]).parser(request), &tokens(&output, &[]));
    let expected: Value = (0..48).map(|n| (format!("p{n}"), json!(n))).collect();
    assert_eq!(answer.calls.len(), 2);
    for call in &answer.calls {
        assert_eq!(serde_json::from_str::<Value>(&call.arguments).unwrap(), expected);
    }
}

#[test]
fn ids_have_the_form_of_the_family() {
    let output = "[TOOL_CALLS]now[CALL_ID]AbC123xyZ[ARGS]{}[TOOL_CALLS]now[CALL_ID]call_1[ARGS]{}[TOOL_CALLS]now[ARGS]{}";
    let ids: Vec<_> = read("mistral", output).calls.into_iter().map(|call| call.id).collect();
    assert_eq!(ids[0], "AbC123xyZ");
    assert!(
        ids.iter().all(|id| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())),
        "{ids:?}"
    );
    assert!(ids[1] != ids[2] && ids[1] != "call_1");
    let section = |header: &str| {
        let output = format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>{header}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        );
        let request = Request { earlier_calls: 5, ..request() };
        let answer = answer(dialect("kimi", "think", &[]).parser(request), &tokens(&output, &[]));
        (answer.calls[0].name.clone(), answer.calls[0].id.clone())
    };
    let pair = |name: &str, id: &str| (name.to_owned(), id.to_owned());
    assert_eq!(section("functions.now:3"), pair("now", "functions.now:3"));
    assert_eq!(section(" functions.a.b:12 "), pair("a.b", "functions.a.b:12"));
    assert_eq!(section("now:3"), pair("now", "functions.now:5"));
    assert_eq!(section("functions.now"), pair("now", "functions.now:5"));
    assert_eq!(section("functions_now_3"), pair("functions_now_3", "functions.functions_now_3:5"));
    let ids: Vec<_> = read("pythonic", "[now(), now()]").calls.into_iter().map(|call| call.id).collect();
    assert_ne!(ids[0], ids[1]);
}

#[test]
fn mistral_names_its_arguments_by_a_token_or_by_text() {
    for markers in [&["[TOOL_CALLS]", "[ARGS]"][..], &["[TOOL_CALLS]"], &[]] {
        let tokens = tokens("[TOOL_CALLS]weather[ARGS]{\"city\": \"Bern\"}", markers);
        let answer = answer(dialect("mistral", "mistral", markers).parser(request()), &tokens);
        assert_eq!(calls(&answer), [("weather", "{\"city\": \"Bern\"}")], "{markers:?}");
    }
}

#[test]
fn text_that_spells_a_token_is_text() {
    let markers = ["[TOOL_CALLS]", "[ARGS]"];
    let parser = dialect("mistral", "mistral", &markers).parser(request());
    let answer = answer(parser, &[(WORD, "Write [TOOL_CALLS]f[ARGS]{}.".to_owned())]);
    assert_eq!(answer.content, "Write [TOOL_CALLS]f[ARGS]{}.");
    assert!(answer.calls.is_empty());
}

#[test]
fn dsml_says_itself_what_is_text() {
    let call = |parameter: &str| {
        let output = format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n{parameter}\n</｜DSML｜invoke>\n"
        );
        arguments(&read("dsml", &output))
    };
    let parameter = |name: &str, is_text: bool, value: &str| {
        format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>")
    };
    assert_eq!(call(&parameter("days", true, "5")), json!({"days": "5"}));
    assert_eq!(call(&parameter("days", false, "5")), json!({"days": 5}));
    assert_eq!(call(&parameter("city", false, "Bern")), json!({"city": "Bern"}));
    assert_eq!(call(&parameter("arguments", false, "{\"city\": \"Bern\"}")), json!({"city": "Bern"}));
    assert_eq!(call(&parameter("arguments", false, " {} ")), json!({}));
    assert_eq!(call(&parameter("arguments", false, "[1]")), json!({"arguments": [1]}));
    let two = parameter("arguments", false, "{\"city\": \"Bern\"}") + &parameter("days", false, "1");
    assert_eq!(call(&two), json!({"city": "Bern", "days": 1}));
    let long = "x".repeat(100_000);
    assert_eq!(call(&parameter("arguments", false, &long)), json!({"arguments": long}));
    // A tool may have a parameter of this name.
    let schema = json!({"properties": {"arguments": {"type": "object"}}});
    let tools = tools_of([("f", schema)]);
    let request = Request { tools: tools.into(), ..request() };
    let output = format!(
        "<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\">{}</｜DSML｜invoke>",
        parameter("arguments", false, "{}")
    );
    let answer = answer(dialect("dsml", "think", &[]).parser(request), &tokens(&output, &[]));
    assert_eq!(arguments(&answer), json!({"arguments": {}}));
}

#[test]
fn tools_need_not_be_called_or_declared() {
    let text = read("hermes", "The weather is { fine }.");
    assert_eq!((text.content.as_str(), text.calls.len()), ("The weather is { fine }.", 0));
    assert_eq!(
        calls(&read("hermes", "<tool_call>{\"name\": \"fly\", \"arguments\": {\"a\": 1}}</tool_call>"))[0].0,
        "fly"
    );
    let output = "<tool_call><function=fly><parameter=a>1</parameter></function></tool_call>";
    assert_eq!(arguments(&read("qwen_xml", output)), json!({"a": "1"}));
}

#[test]
fn calls_stay_text_without_a_choice_of_tools() {
    for (format, output) in [
        ("hermes", "<tool_call>{\"name\": \"now\"}</tool_call>"),
        ("llama3_json", "{\"name\": \"now\", \"parameters\": {}}"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
    ] {
        let request = Request { calls: Calls::Text, ..request() };
        let answer = answer(dialect(format, "think", &[]).parser(request), &tokens(output, &[]));
        assert_eq!((answer.content.as_str(), answer.calls.len()), (output, 0));
    }
}

#[test]
fn content_may_stand_on_both_sides_of_calls() {
    let answer =
        read("qwen_xml", " One.\n\n<function=now></function>\n\n<function=now></function></tool_call>\nTwo.");
    assert_eq!(answer.calls.len(), 2);
    assert_eq!(answer.content, " One.\n\n\nTwo.");
    assert_eq!(read("hermes", "\n \n<tool_call>{\"name\": \"now\"}</tool_call>\n\n").content, "");
    assert_eq!(read("hermes", "\n ").content, "\n ");
    assert_eq!(read("hermes", "<think>\n\n</think>\n\nHi").reasoning, "");
}

#[test]
fn a_parser_can_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Parser>();
}

/// Found by the fuzz target `tool-parser`: the bracket of a call hid the marker of reasoning, unless both came at once.
#[test]
fn a_text_that_begins_calls_hides_no_marker_of_reasoning() {
    let output = "[THINK]Hm.[/THINK][1]";
    let whole = answer(dialect("pythonic", "mistral", &[]).parser(request()), &tokens(output, &[]));
    let mut parser = dialect("pythonic", "mistral", &[]).parser(request());
    let events = push(&mut parser, output);
    let mut pieces = summed(events);
    pieces.extend(parser.finish(""));
    assert_eq!(pieces, whole);
    assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("Hm.", "[1]"));
}
