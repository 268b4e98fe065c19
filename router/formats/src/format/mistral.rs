//! Mistral: `[TOOL_CALLS] [{"name": …, "arguments": …}, …]` (v3, v7), `[TOOL_CALLS]f[CALL_ID]id[ARGS]{…}` (v11) and
//! `[TOOL_CALLS]f[ARGS]{…}` (v13). What follows the marker tells them apart.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{ObjectRules, arguments, object, tool_name},
    cursor::{Break, Cursor, Lexicon, Markers},
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
