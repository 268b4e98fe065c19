//! DeepSeek V3, R1 and V3.1: `<｜tool▁calls▁begin｜>`, in it `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`
//! (V3.1) or `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f` with a fenced block of JSON (V3). What follows the separator
//! tells them apart.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{arguments, tool_name},
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::Grammar,
    output::Output,
    tools::Tools,
};

pub(crate) struct DeepSeek {
    block: Markers,
    separator: Markers,
    line_end: Markers,
    fence: Markers,
    call_end: Markers,
}

/// Position of the trigger that is the beginning of a call, whose block has no beginning.
const BARE_CALL: usize = 1;
/// Positions in `block`.
const BLOCK_END: usize = 0;
const CALL: usize = 1;

impl CallFormat for DeepSeek {
    const TRIGGERS: &'static [Trigger] =
        &[Trigger::Marker("<｜tool▁calls▁begin｜>"), Trigger::Marker("<｜tool▁call▁begin｜>")];

    fn new(lexicon: &mut Lexicon<'_>, _: Arc<Tools>) -> Self {
        Self {
            block: lexicon.markers(["<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"]),
            separator: lexicon.markers(["<｜tool▁sep｜>"]),
            line_end: lexicon.markers(["\n"]),
            fence: lexicon.markers(["```"]),
            call_end: lexicon.markers(["<｜tool▁call▁end｜>"]),
        }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let marker = |text| grammar.marker(text);
        let (begin, end) = (marker("<｜tool▁calls▁begin｜>"), marker("<｜tool▁calls▁end｜>"));
        let (call, separator) = (marker("<｜tool▁call▁begin｜>"), marker("<｜tool▁sep｜>"));
        let call_end = marker("<｜tool▁call▁end｜>");
        let calls = grammar.repeated("call", r#"("\n")?"#);
        grammar.rule("calls", format!("{begin} {calls} {end}"));
        grammar.rule("call", format!("{call} named {call_end}"));
        grammar.any_tool("named", |grammar, tool| {
            let (name, json) = (grammar.text(tool.name()), grammar.arguments(tool));
            let fenced = grammar.text(&format!("{}\n```json\n", tool.name()));
            format!(r#"{name} {separator} {json} | "function" {separator} {fenced} {json} "\n```""#)
        });
    }

    async fn read(&self, cursor: &Cursor, trigger: usize) -> Result<(), Break> {
        if trigger == BARE_CALL {
            self.call(cursor).await?;
        } else {
            cursor.enter_block();
        }
        loop {
            match cursor.stream_until(&self.block, Output::text).await? {
                BLOCK_END => return Ok(()),
                CALL => cursor.attempt(self.call(cursor)).await?,
                _ => {}
            }
        }
    }
}

impl DeepSeek {
    async fn call(&self, cursor: &Cursor) -> Result<(), Break> {
        let (kind, _) = cursor.word_until(&self.separator).await?;
        let fenced = cursor.peek().await? != '{';
        if fenced {
            let (name, _) = cursor.word_until(&self.line_end).await?;
            cursor.next_marker(&self.fence).await.ok_or(Break::Malformed)?;
            cursor.word_until(&self.line_end).await?;
            cursor.begin_call(tool_name(&name)?, None);
        } else {
            cursor.begin_call(tool_name(&kind)?, None);
        }
        arguments(cursor).await?;
        cursor.end_call();
        if fenced {
            cursor.skip_blank().await?;
            cursor.next_marker(&self.fence).await;
        }
        cursor.skip_blank().await?;
        cursor.next_marker(&self.call_end).await;
        Ok(())
    }
}
