//! Llama 3.2 and 4: `[f(a=1, b="x"), g()]`. Python's literals become JSON as they arrive.

mod literal;

use std::sync::Arc;

use self::literal::literal;
use super::{CallFormat, Trigger};
use crate::{
    bodies::tool_name,
    cursor::{Break, Cursor, Lexicon, Markers},
    grammar::Grammar,
    json::escape,
    limits::MAX_NAME,
    names::{ParameterNames, is_name_char},
    tools::Tools,
};

pub(crate) struct Pythonic {
    end: Markers,
}

/// Position of the trigger that is the list's own bracket.
const BRACKET: usize = 1;

impl CallFormat for Pythonic {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker("<|python_start|>"), Trigger::Start("[")];
    const PARAMETER_NAMES: ParameterNames = ParameterNames::Words;

    fn new(lexicon: &mut Lexicon<'_>, _: Arc<Tools>) -> Self {
        Self { end: lexicon.markers(["<|python_end|>"]) }
    }

    fn grammar(grammar: &mut Grammar<'_>) {
        grammar.rule("calls", format!(r#""[" {} "]""#, grammar.repeated("call", r#"", ""#)));
        grammar.any_tool("call", |grammar, tool| {
            let (name, keywords) = (grammar.text(&format!("{}(", tool.name())), grammar.keywords(tool));
            format!(r#"{name} {keywords} ")""#)
        });
    }

    async fn read(&self, cursor: &Cursor, trigger: usize) -> Result<(), Break> {
        if trigger != BRACKET {
            cursor.skip_blank().await?;
            cursor.expect('[').await?;
        }
        cursor.skip_blank().await?;
        call(cursor).await?;
        loop {
            cursor.skip_blank().await?;
            if cursor.next_is(']').await? || !cursor.next_is(',').await? {
                break;
            }
            cursor.skip_blank().await?;
            if !cursor.attempt_here(call(cursor)).await? {
                return Ok(());
            }
        }
        cursor.skip_blank().await?;
        cursor.next_marker(&self.end).await;
        Ok(())
    }
}

/// Reads `f(a=1, b="x")`. The call begins with its first argument or its closing parenthesis, since prose has brackets
/// and parentheses too.
async fn call(cursor: &Cursor) -> Result<(), Break> {
    let name = tool_name(&word(cursor).await?)?;
    cursor.expect('(').await?;
    let mut before = "{";
    loop {
        cursor.skip_blank().await?;
        if cursor.next_is(')').await? {
            break;
        }
        let key = word(cursor).await?;
        cursor.skip_blank().await?;
        cursor.expect('=').await?;
        cursor.skip_blank().await?;
        if before == "{" {
            cursor.begin_call(name.clone(), None);
        }
        cursor.arguments(&format!("{before}\"{}\": ", escape(&key)));
        before = ", ";
        literal(cursor).await?;
        cursor.skip_blank().await?;
        if !cursor.next_is(',').await? {
            cursor.expect(')').await?;
            break;
        }
    }
    if before == "{" {
        cursor.begin_call(name, None);
        cursor.arguments("{");
    }
    cursor.arguments("}");
    cursor.end_call();
    Ok(())
}

/// Reads the name of a tool or a parameter.
async fn word(cursor: &Cursor) -> Result<String, Break> {
    let mut word = String::new();
    loop {
        match cursor.peek().await? {
            next if is_name_char(next) => word.push(cursor.next().await?),
            _ if word.is_empty() => return Err(Break::Malformed),
            _ => return Ok(word),
        }
        if word.len() > MAX_NAME {
            return Err(Break::Malformed);
        }
    }
}
