//! Outputs that a model does not write by itself: the time stays linear, and what is held stays bounded.

use tutti_formats::{Answer, Event};

use crate::{
    samples::SAMPLES,
    support::{WORD, answer, dialect, events, read, request},
};

/// Number of calls, brackets or repetitions.
const MANY: usize = 10_000;

/// Bytes that may be looked at per byte of the output and per piece. White space and markers that are undecided are
/// looked at again with each piece, up to their bounds.
const PER_BYTE: u64 = 4;
const PER_PIECE: u64 = 320;

/// Bytes that may be kept of an output: a call's arguments before its name, and its header.
const MOST_KEPT: usize = 70 << 10;

/// Checks that the work is linear in the output, in pieces of `size` characters, and what is kept of it is bounded.
/// Returns the answer.
fn linear(format: &str, output: &str, size: usize) -> Answer {
    let mut parser = dialect(format, "think", &[]).parser(request());
    let mut answer = Answer::default();
    let characters: Vec<char> = output.chars().collect();
    let mut pieces = 0;
    for piece in characters.chunks(size) {
        answer.extend(parser.push(WORD, &piece.iter().collect::<String>()));
        pieces += 1;
        assert!(parser.kept_bytes() <= MOST_KEPT, "{format}: keeps {} bytes", parser.kept_bytes());
    }
    let most = PER_BYTE * output.len() as u64 + PER_PIECE * pieces;
    let examined = parser.examined_bytes();
    assert!(examined <= most, "{format}: looked at {examined} bytes of {}, {pieces} pieces", output.len());
    answer.extend(parser.finish(""));
    answer
}

#[test]
fn ten_thousand_calls_take_linear_time() {
    for sample in SAMPLES.iter().filter(|sample| sample.reasoning != "mistral") {
        // A list has all calls between one pair of brackets.
        if sample.format == "pythonic"
            || sample.output.contains("[TOOL_CALLS] [")
            || sample.format == "llama3_json"
        {
            continue;
        }
        let output = sample.output.repeat(MANY / 2);
        let answer = linear(sample.format, &output, usize::MAX);
        assert_eq!(answer.calls.len(), MANY, "{}", sample.format);
    }
    let list = format!("[{}]", vec!["now()"; MANY].join(", "));
    assert_eq!(linear("pythonic", &list, usize::MAX).calls.len(), MANY);
    let list = format!("[TOOL_CALLS] [{}]", vec!["{\"name\": \"now\", \"arguments\": {}}"; MANY].join(", "));
    assert_eq!(linear("mistral", &list, usize::MAX).calls.len(), MANY);
    let list = vec!["{\"name\": \"now\", \"parameters\": {}}"; MANY].join("; ");
    assert_eq!(linear("llama3_json", &list, usize::MAX).calls.len(), MANY);
}

#[test]
fn small_pieces_take_linear_time() {
    for sample in SAMPLES {
        let output = sample.output.repeat(10);
        linear(sample.format, &output, 1);
        linear(sample.format, &output, 7);
    }
}

#[test]
fn nested_brackets_take_linear_time_and_no_stack() {
    let nested = format!("{}{}", "[".repeat(MANY), "]".repeat(MANY));
    let output = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": {nested}}}}}</tool_call>");
    let answer = linear("hermes", &output, 100);
    assert_eq!(answer.calls[0].arguments, format!("{{\"a\": {nested}}}"));
    assert!(answer.calls[0].ended);
    let output = format!("<tool_call>f<arg_key>list</arg_key><arg_value>{nested}</arg_value></tool_call>");
    assert!(linear("glm", &output, 100).calls[0].ended);
    // Literals of Python need to know the kinds of their brackets, so their depth is bounded.
    let answer = linear("pythonic", &format!("[f(a={nested})]"), 100);
    assert_eq!(answer.calls.len(), 1);
}

#[test]
fn endless_arguments_are_not_held() {
    let starts = [
        ("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \""),
        ("qwen_xml", "<tool_call><function=weather><parameter=city>"),
        ("qwen_xml", "<tool_call><function=weather><parameter=options>"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]{\"city\": \""),
        ("pythonic", "[weather(city=\""),
        (
            "dsml",
            "<｜DSML｜tool_calls><｜DSML｜invoke name=\"weather\"><｜DSML｜parameter name=\"arguments\" string=\"false\">",
        ),
        ("harmony", "<|channel|>commentary to=functions.weather<|message|>{\"city\": \""),
    ];
    for (format, start) in starts {
        let mut parser = dialect(format, "think", &[]).parser(request());
        let mut received = 0;
        parser.push(WORD, start);
        let piece = "x".repeat(1 << 10);
        for _ in 0..200 {
            for event in parser.push(WORD, &piece) {
                let Event::Arguments { json_fragment, .. } = event else { panic!("{format}: {event:?}") };
                received += json_fragment.len();
            }
            assert!(parser.kept_bytes() <= MOST_KEPT, "{format}: keeps {} bytes", parser.kept_bytes());
        }
        assert!(received >= 200 << 10, "{format}: {received}");
    }
}

#[test]
fn what_never_becomes_a_call_is_content_and_not_held() {
    let starts = [
        ("hermes", "<tool_call>{\"name\": \""),
        ("hermes", "<tool_call>{\"arguments\": {\"a\": \""),
        ("hermes", "<tool_call>{\""),
        ("qwen_xml", "<tool_call>\n<function="),
        ("glm", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        ("dsml", "<｜DSML｜tool_calls><｜DSML｜invoke name=\""),
        ("minimax", "<minimax:tool_call><invoke name=\""),
        ("pythonic", "["),
        ("llama3_json", "{\"name\": \""),
        ("harmony", "<|channel|>"),
    ];
    for (format, start) in starts {
        let text = "x".repeat(200 << 10);
        let answer = linear(format, &format!("{start}{text}"), 100);
        assert!(answer.calls.is_empty(), "{format}");
        assert!(answer.content.ends_with(&text), "{format}: {}", answer.content.len());
    }
}

#[test]
fn white_space_is_not_held() {
    let blank = " ".repeat(20_000);
    for start in
        ["", "<think>", "<tool_call>", "<tool_call>{\"name\": \"f\",", "<tool_call>{\"name\": \"f\"}"]
    {
        linear("hermes", &format!("{start}{blank}"), 1);
    }
    linear("qwen_xml", &format!("<function=f><parameter=a>1</parameter>{blank}"), 1);
}

#[test]
fn repeated_markers_take_linear_time() {
    for sample in SAMPLES {
        for marker in sample.markers {
            linear(sample.format, &marker.repeat(MANY / 10), usize::MAX);
            linear(sample.format, &marker.repeat(MANY / 50), 3);
            let half: String = marker.chars().take(marker.chars().count() - 1).collect();
            linear(sample.format, &half.repeat(MANY / 50), 3);
        }
    }
    let closers = "</parameter>".repeat(MANY);
    linear("qwen_xml", &format!("<function=f><parameter=a>{closers}"), 5);
}

#[test]
fn tokens_that_are_markers_everywhere_end_no_parser() {
    for sample in SAMPLES {
        let dialect = dialect(sample.format, sample.reasoning, sample.markers);
        let ids = (0..2_000_u32).map(|n| n * n % 11 % (sample.markers.len() as u32 + 1));
        let tokens: Vec<_> = ids.map(|id| (id, if id == WORD { "a{\"" } else { "" }.to_owned())).collect();
        events(dialect.parser(request()), &tokens);
    }
}

#[test]
fn unknown_reasoning_never_hides_an_answer() {
    assert_eq!(read("hermes", "a </think> b").content, "a </think> b");
    let tokens = [(WORD, "a ".to_owned()), (2, "</think>".to_owned()), (WORD, " b".to_owned())];
    let parser = dialect("hermes", "think", &["<think>", "</think>"]).parser(request());
    assert_eq!(answer(parser, &tokens).content, "a  b");
}
