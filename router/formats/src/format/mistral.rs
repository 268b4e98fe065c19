//! Mistral: `[TOOL_CALLS] [{"name": …, "arguments": …}, …]` (v3, v7), `[TOOL_CALLS]f[CALL_ID]id[ARGS]{…}` (v11) and
//! `[TOOL_CALLS]f[ARGS]{…}` (v13). What follows the marker tells them apart.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{ObjectRules, arguments, json_call, object, tool_name},
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::Grammar,
    tools::Tools,
};

pub(crate) struct Mistral {
    name_end: Markers,
    id_end: Markers,
}

/// Position of `[CALL_ID]` in `name_end`.
const CALL_ID: usize = 0;
/// Letters and digits of an id.
const ID_LENGTH: usize = 9;

impl CallFormat for Mistral {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker("[TOOL_CALLS]")];

    fn new(lexicon: &mut Lexicon<'_>, _: Arc<Tools>) -> Self {
        Self { name_end: lexicon.markers(["[CALL_ID]", "[ARGS]"]), id_end: lexicon.markers(["[ARGS]"]) }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        let open = grammar.marker("[TOOL_CALLS]");
        if !grammar.is_token("[ARGS]") {
            let list = grammar.repeated("object", r#"", ""#);
            grammar.rule("calls", format!(r#"{open} (" ")? "[" {list} "]""#));
            grammar.any_tool("object", |grammar, tool| json_call(grammar, tool, "arguments"));
            return;
        }
        let id = match grammar.is_token("[CALL_ID]") {
            true => format!("({} /[A-Za-z0-9]{{{ID_LENGTH}}}/)?", grammar.marker("[CALL_ID]")),
            false => String::new(),
        };
        let arguments = grammar.marker("[ARGS]");
        grammar.rule("calls", grammar.repeated("call", ""));
        grammar.rule("call", format!("{open} named"));
        grammar.any_tool("named", |grammar, tool| {
            let (name, json) = (grammar.text(tool.name()), grammar.arguments(tool));
            format!("{name} {id} {arguments} {json}")
        });
    }

    async fn read(&self, cursor: &Cursor, _: usize) -> Result<(), Break> {
        cursor.skip_blank().await?;
        match cursor.peek().await? {
            '[' => list(cursor).await,
            '{' => element(cursor).await,
            _ => self.named(cursor).await,
        }
    }
}

impl Mistral {
    async fn named(&self, cursor: &Cursor) -> Result<(), Break> {
        let (name, end) = cursor.word_until(&self.name_end).await?;
        let name = tool_name(&name)?;
        let mut id = None;
        if end == CALL_ID {
            let (text, _) = cursor.word_until(&self.id_end).await?;
            let is_id = text.len() == ID_LENGTH && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
            id = is_id.then_some(text);
        }
        cursor.begin_call(name, id);
        arguments(cursor).await?;
        cursor.end_call();
        Ok(())
    }
}

/// Reads `[{…}, {…}]`.
async fn list(cursor: &Cursor) -> Result<(), Break> {
    cursor.expect('[').await?;
    cursor.skip_blank().await?;
    element(cursor).await?;
    loop {
        cursor.skip_blank().await?;
        if cursor.next_is(']').await? || !cursor.next_is(',').await? {
            return Ok(());
        }
        cursor.skip_blank().await?;
        if !cursor.attempt_here(element(cursor)).await? {
            return Ok(());
        }
    }
}

async fn element(cursor: &Cursor) -> Result<(), Break> {
    cursor.expect('{').await?;
    object(cursor, ObjectRules::Marked).await
}
