//! Parsers under test, and outputs as tokens.

use std::sync::Arc;

use serde_json::{Value, json};
use tutti_formats::{Answer, Dialect, Event, Format, Parser, Reasoning, Request, Tools, Vocabulary};

/// An id of ordinary tokens.
pub const WORD: u32 = 0;

/// The tools of all tests.
pub fn tools() -> Arc<Tools> {
    let schema = json!({
        "type": "object",
        "$defs": {"count": {"type": "integer"}},
        "properties": {
            "city": {"type": "string"},
            "text": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "exact": {"type": "boolean"},
            "nothing": {"type": "null"},
            "options": {"type": "object"},
            "list": {"type": "array"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "count": {"$ref": "#/$defs/count"},
        },
    });
    let empty = json!({"type": "object", "properties": {}});
    let tools = [("weather", schema.clone()), ("search", schema), ("now", empty)];
    Arc::new(tools_of(tools))
}

/// Tools with these names and schemas.
pub fn tools_of<const N: usize>(tools: [(&str, Value); N]) -> Tools {
    let schema = |schema: Value| Arc::new(schema.as_object().unwrap().clone());
    tools.map(|(name, value)| (name.to_owned(), schema(value))).into_iter().collect()
}

/// A request with the tools of all tests.
pub fn request() -> Request {
    Request { tools: tools(), id_seed: 7, ..Request::default() }
}

/// The dialect of a format, in which `markers` are tokens. The ids count from 1.
pub fn dialect(format: &str, reasoning: &str, markers: &[&str]) -> Dialect {
    let ids = markers.iter().map(|text| text.to_string()).zip(1..);
    Dialect {
        format: Some(Format::choose(format, None).unwrap()),
        reasoning: Reasoning::choose(reasoning, None).unwrap(),
        vocabulary: Vocabulary::from_iter(ids),
    }
}

/// An output as tokens: one per marker, and one per run of other text.
pub fn tokens(output: &str, markers: &[&str]) -> Vec<(u32, String)> {
    let mut tokens = Vec::new();
    let mut rest = output;
    while !rest.is_empty() {
        let next = markers.iter().zip(1..).filter_map(|(marker, id)| Some((rest.find(marker)?, *marker, id)));
        let Some((at, marker, id)) = next.min_by_key(|(at, ..)| *at) else {
            tokens.push((WORD, rest.to_owned()));
            break;
        };
        if at > 0 {
            tokens.push((WORD, rest[..at].to_owned()));
        }
        tokens.push((id, marker.to_owned()));
        rest = &rest[at + marker.len()..];
    }
    tokens
}

/// The events of an output that arrives as these tokens.
pub fn events(mut parser: Parser, tokens: &[(u32, String)]) -> Vec<Event> {
    let mut events = Vec::new();
    for (id, text) in tokens {
        events.extend(parser.push(*id, text));
    }
    events.extend(parser.finish(""));
    events
}

/// The answer of an output that arrives as these tokens.
pub fn answer(parser: Parser, tokens: &[(u32, String)]) -> Answer {
    let mut answer = Answer::default();
    answer.extend(events(parser, tokens));
    answer
}

/// The answer of an output in which no marker is a token.
pub fn read(format: &str, output: &str) -> Answer {
    answer(dialect(format, "think", &[]).parser(request()), &[(WORD, output.to_owned())])
}

/// Names and arguments of an answer's calls.
pub fn calls(answer: &Answer) -> Vec<(&str, &str)> {
    answer.calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

/// The arguments of an answer's only call, as JSON.
pub fn arguments(answer: &Answer) -> Value {
    assert_eq!(answer.calls.len(), 1, "{answer:?}");
    serde_json::from_str(&answer.calls[0].arguments).unwrap()
}
