//! Hermes 2 Pro, Qwen2.5, Qwen3: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{ObjectRules, json_call, object},
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::Grammar,
    output::Output,
    tools::Tools,
};

pub(crate) struct Hermes {
    block: Markers,
}

const OPEN: &str = "<tool_call>";
/// Position of the closing marker in `block`.
const CLOSE: usize = 0;

impl CallFormat for Hermes {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker(OPEN)];

    fn new(lexicon: &mut Lexicon<'_>, _: Arc<Tools>) -> Self {
        Self { block: lexicon.markers(["</tool_call>", OPEN]) }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let (open, close) = (grammar.marker(OPEN), grammar.marker("</tool_call>"));
        grammar.rule("calls", grammar.repeated("call", r#""\n""#));
        grammar.rule("call", format!(r#"{open} "\n" object "\n" {close}"#));
        grammar.any_tool("object", |grammar, tool| json_call(grammar, tool, "arguments"));
    }

    async fn read(&self, cursor: &Cursor, _: usize) -> Result<(), Break> {
        objects(cursor).await?;
        while cursor.stream_until(&self.block, Output::text).await? != CLOSE {
            cursor.attempt(objects(cursor)).await?;
        }
        Ok(())
    }
}

/// Reads a call, or several: some models write more than one between a pair of markers.
async fn objects(cursor: &Cursor) -> Result<(), Break> {
    cursor.skip_blank().await?;
    next_object(cursor).await?;
    loop {
        cursor.skip_blank().await?;
        if cursor.peek().await? != '{' {
            return Ok(());
        }
        if !cursor.attempt_here(next_object(cursor)).await? {
            return Ok(());
        }
    }
}

async fn next_object(cursor: &Cursor) -> Result<(), Break> {
    cursor.expect('{').await?;
    object(cursor, ObjectRules::Marked).await
}
