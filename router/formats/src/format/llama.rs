//! Llama 3.1 to 3.3: `{"name": "f", "parameters": {…}}`, at the start or behind `<|python_tag|>`, several separated by
//! semicolons.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{ObjectRules, json_call, object},
    cursor::{Break, Cursor, Lexicon},
    grammar::Grammar,
    tools::Tools,
};

pub(crate) struct Llama {
    tools: Arc<Tools>,
}

/// Position of the trigger that is the call's own brace.
const BRACE: usize = 1;

impl CallFormat for Llama {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker("<|python_tag|>"), Trigger::Start("{")];

    fn new(_: &mut Lexicon<'_>, tools: Arc<Tools>) -> Self {
        Self { tools }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        grammar.rule("calls", grammar.repeated("call", r#""; ""#));
        grammar.any_tool("call", |grammar, tool| json_call(grammar, tool, "parameters"));
    }

    async fn read(&self, cursor: &Cursor, trigger: usize) -> Result<(), Break> {
        if trigger == BRACE {
            object(cursor, ObjectRules::Bare(&self.tools)).await?;
        } else {
            cursor.skip_blank().await?;
            cursor.expect('{').await?;
            object(cursor, ObjectRules::Marked).await?;
        }
        loop {
            cursor.skip_blank().await?;
            if cursor.peek().await? != ';' {
                return Ok(());
            }
            if !cursor.attempt_here(self.next_call(cursor)).await? {
                return Ok(());
            }
        }
    }
}

impl Llama {
    /// Reads `; {…}`.
    async fn next_call(&self, cursor: &Cursor) -> Result<(), Break> {
        cursor.expect(';').await?;
        cursor.skip_blank().await?;
        cursor.expect('{').await?;
        object(cursor, ObjectRules::Marked).await
    }
}
