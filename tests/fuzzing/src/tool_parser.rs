//! Reads an output in pieces and at once, and compares the answers.

use std::sync::{Arc, LazyLock};

use serde_json::json;
use tutti_formats::{
    Answer, Block, CallLimit, Calls, Dialect, Event, Format, Parser, Reasoning, Request, Tools, Vocabulary,
};

use crate::input::Input;

/// Kinds of reasoning, as settings name them.
const REASONING: [&str; 3] = ["none", "think", "mistral"];
/// Markers that may be tokens, whatever the format.
const MARKERS: [&str; 14] = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|tool_call_begin|>",
    "<|channel|>",
    "<|message|>",
    "<arg_key>",
    "<minimax:tool_call>",
];
/// Id of tokens that are no markers.
const WORD: u32 = 0;
/// Bounds of the work and of what is kept, as in the crate's own tests.
const EXAMINED_PER_BYTE: u64 = 4;
const EXAMINED_PER_PIECE: u64 = 320;
const MOST_KEPT: usize = 200 << 10;

/// Input: the format, two bytes of options, the sizes of pieces, and the output.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let (format, reasoning, flags) = (input.byte(), input.byte(), input.byte());
    let sizes = input.piece().to_vec();
    let output = String::from_utf8_lossy(input.0);
    let formats = Format::all().count() + 1;
    let markers: &[&str] = if flags & 1 == 0 { &[] } else { &MARKERS };
    let dialect = Dialect {
        format: Format::all().nth(usize::from(format) % formats),
        reasoning: Reasoning::choose(REASONING[usize::from(reasoning) % 3], None).unwrap_or_default(),
        vocabulary: Vocabulary::from_iter(markers.iter().map(|text| (*text).to_owned()).zip(1..)),
    };
    let request = Request {
        tools: tools(),
        calls: if flags & 2 == 0 { Calls::Events } else { Calls::Text },
        calls_in_reasoning: if flags & 4 == 0 { Calls::Events } else { Calls::Text },
        limit: if flags & 8 == 0 { CallLimit::None } else { CallLimit::One },
        block: [Block::Unopened, Block::Open, Block::Closed][usize::from(reasoning / 3) % 3],
        id_seed: 7,
        earlier_calls: 2,
    };
    let tokens = tokens(&output, markers);
    let whole = read(dialect.parser(request.clone()), &tokens, &[]);
    let pieces = read(dialect.parser(request), &tokens, &sizes);
    assert_eq!(whole, pieces, "another division of the output gives another answer");
}

fn tools() -> Arc<Tools> {
    static TOOLS: LazyLock<Arc<Tools>> = LazyLock::new(|| {
        let schema = json!({"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"},
            "l": {"type": ["array", "null"]}, "b": {"type": "boolean"}}});
        let schema = schema.as_object().cloned().unwrap_or_default();
        let tools = [("f".to_owned(), Arc::new(schema)), ("g".to_owned(), Arc::default())];
        Arc::new(Tools::from_iter(tools))
    });
    TOOLS.clone()
}

/// The tokens of an output: markers, and the text between them.
fn tokens<'t>(output: &'t str, markers: &[&'t str]) -> Vec<(u32, &'t str)> {
    let (mut tokens, mut rest) = (Vec::new(), output);
    loop {
        let found =
            markers.iter().zip(1..).filter_map(|(marker, id)| Some((rest.find(marker)?, *marker, id)));
        let Some((at, marker, id)) = found.min_by_key(|(at, ..)| *at) else {
            tokens.push((WORD, rest));
            return tokens;
        };
        tokens.push((WORD, &rest[..at]));
        tokens.push((id, marker));
        rest = &rest[at + marker.len()..];
    }
}

/// The answer of an output whose text arrives in pieces of these sizes, or at once.
fn read(mut parser: Parser, tokens: &[(u32, &str)], sizes: &[u8]) -> Answer {
    let mut events = Vec::new();
    let (mut pieces, mut bytes) = (0, 0);
    let mut sizes = sizes.iter().cycle();
    for (id, text) in tokens {
        let mut rest = *text;
        loop {
            let size = match sizes.next() {
                Some(size) if *id == WORD => {
                    rest.ceil_char_boundary(usize::from(*size % 32).max(1).min(rest.len()))
                }
                _ => rest.len(),
            };
            let (piece, behind) = rest.split_at(size);
            events.extend(parser.push(*id, piece));
            (pieces, bytes, rest) = (pieces + 1, bytes + piece.len() as u64, behind);
            assert!(parser.kept_bytes() <= MOST_KEPT, "{} bytes are kept", parser.kept_bytes());
            if rest.is_empty() {
                break;
            }
        }
    }
    let examined = parser.examined_bytes();
    let most = EXAMINED_PER_BYTE * bytes + EXAMINED_PER_PIECE * pieces;
    assert!(examined <= most, "{examined} bytes are looked at, of {bytes} in {pieces} pieces");
    assert!(parser.reasoning_tokens() as usize <= pieces as usize);
    events.extend(parser.finish(""));
    check(&events);
    let mut answer = Answer::default();
    answer.extend(events);
    answer
}

/// Checks the order of events: a call begins before its arguments, and calls count up.
fn check(events: &[Event]) {
    let (mut begun, mut is_open) = (0, false);
    for event in events {
        match event {
            Event::CallBegin { index, name, .. } => {
                assert_eq!(*index, begun);
                assert!(!name.is_empty());
                (begun, is_open) = (begun + 1, true);
            }
            Event::Arguments { index, .. } => assert!(is_open && index + 1 == begun),
            Event::CallEnd => assert!(std::mem::take(&mut is_open)),
            Event::Reasoning(text) | Event::Content(text) => assert!(!text.is_empty()),
        }
    }
}
