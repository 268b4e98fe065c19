//! Kimi K2: `<|tool_calls_section_begin|>`, in it
//! `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{arguments, tool_name},
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::Grammar,
    output::Output,
    tools::Tools,
};

pub(crate) struct Kimi {
    section: Markers,
    arguments: Markers,
    call_end: Markers,
}

/// Position of the trigger that is the beginning of a call, whose section has no beginning.
const BARE_CALL: usize = 2;
const SECTION_ENDS: [&str; 2] = ["<|tool_calls_section_end|>", "<|tool_call_section_end|>"];
/// Position of the beginning of a call in `section`.
const CALL: usize = SECTION_ENDS.len();

impl CallFormat for Kimi {
    const TRIGGERS: &'static [Trigger] = &[
        Trigger::Marker("<|tool_calls_section_begin|>"),
        Trigger::Marker("<|tool_call_section_begin|>"),
        Trigger::Marker("<|tool_call_begin|>"),
    ];

    fn new(lexicon: &mut Lexicon<'_>, _: Arc<Tools>) -> Self {
        let calls = ["<|tool_call_begin|>", "<|tool_call_end|>"];
        Self {
            section: lexicon.markers(SECTION_ENDS.into_iter().chain(calls)),
            arguments: lexicon.markers(["<|tool_call_argument_begin|>"]),
            call_end: lexicon.markers(["<|tool_call_end|>"]),
        }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let marker = |text| grammar.marker(text);
        let (begin, end) = (marker("<|tool_calls_section_begin|>"), marker(SECTION_ENDS[0]));
        let (call, call_end) = (marker("<|tool_call_begin|>"), marker("<|tool_call_end|>"));
        let arguments = marker("<|tool_call_argument_begin|>");
        grammar.rule("calls", format!("{begin} {} {end}", grammar.repeated("call", "")));
        grammar.rule("call", format!("{call} named {call_end}"));
        grammar.any_tool("named", |grammar, tool| {
            let (id, json) = (grammar.text(&format!("functions.{}:", tool.name())), grammar.arguments(tool));
            format!("{id} /[0-9]{{1,6}}/ {arguments} {json}")
        });
    }

    async fn read(&self, cursor: &Cursor, trigger: usize) -> Result<(), Break> {
        if trigger == BARE_CALL {
            self.call(cursor).await?;
        } else {
            cursor.enter_block();
        }
        loop {
            match cursor.stream_until(&self.section, Output::text).await? {
                CALL => cursor.attempt(self.call(cursor)).await?,
                marker if marker < CALL => return Ok(()),
                _ => {}
            }
        }
    }
}

impl Kimi {
    async fn call(&self, cursor: &Cursor) -> Result<(), Break> {
        let (header, _) = cursor.word_until(&self.arguments).await?;
        let header = header.trim();
        let (name, is_id) = name_of(header);
        cursor.begin_call(tool_name(name)?, is_id.then(|| header.to_owned()));
        arguments(cursor).await?;
        cursor.end_call();
        cursor.skip_blank().await?;
        cursor.next_marker(&self.call_end).await;
        Ok(())
    }
}

/// The tool's name in a call's header, and whether the header is an id of the form `functions.NAME:N`. Models that saw
/// foreign ids in the conversation write other forms.
fn name_of(header: &str) -> (&str, bool) {
    let bare = header.strip_prefix("functions.");
    let counted = |text: &str| text.rsplit_once(':').filter(|(_, n)| n.parse::<u32>().is_ok()).is_some();
    let is_id = bare.is_some_and(counted);
    let name = bare.unwrap_or(header);
    match name.rsplit_once(':') {
        Some((name, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => (name, is_id),
        _ => (name, false),
    }
}
