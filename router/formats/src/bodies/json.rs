//! Calls whose arguments are JSON: they stream as the model writes them, byte for byte.

use serde_json::Value;

use super::tool_name;
use crate::{
    cursor::{Break, Cursor},
    grammar::{Grammar, Tool},
    limits::MAX_NAME,
    output::Output,
    tools::Tools,
};

/// The keys that make a JSON object a call.
pub(crate) enum ObjectRules<'a> {
    /// A marker stands before it: a name is enough.
    Marked,
    /// Nothing stands before it: the object has arguments, or the name of a declared tool.
    Bare(&'a Tools),
}

/// Reads a call `{"name": …, "arguments": …}` behind its opening brace. Members may come in any order; arguments before
/// the name are held. The key `parameters` is Llama's. Members that say nothing about the call are dropped.
pub(crate) async fn object(cursor: &Cursor, rules: ObjectRules<'_>) -> Result<(), Break> {
    let mut name: Option<String> = None;
    let mut held: Option<String> = None;
    loop {
        cursor.skip_blank().await?;
        if cursor.next_is('}').await? {
            break;
        }
        if cursor.next_is(',').await? {
            continue;
        }
        cursor.expect('"').await?;
        let key = rest_of_string(cursor).await?;
        cursor.skip_blank().await?;
        cursor.expect(':').await?;
        match key.as_str() {
            _ if cursor.output(|output| output.in_call()) => {
                cursor.skip_blank().await?;
                cursor.json(|_, _| {}).await?;
            }
            "name" if name.is_none() => {
                cursor.skip_blank().await?;
                cursor.expect('"').await?;
                let tool = tool_name(&rest_of_string(cursor).await?)?;
                if let Some(arguments) = held.take() {
                    cursor.begin_call(tool.clone(), None);
                    cursor.arguments(or_empty(&arguments));
                }
                name = Some(tool);
            }
            "arguments" | "parameters" => match &name {
                Some(tool) => {
                    cursor.begin_call(tool.clone(), None);
                    arguments(cursor).await?;
                }
                None if held.is_none() => held = Some(spaced_json(cursor).await?),
                None => return Err(Break::Malformed),
            },
            "type" | "id" | "call_id" | "index" => _ = spaced_json(cursor).await?,
            _ => return Err(Break::Malformed),
        }
    }
    if !cursor.output(|output| output.in_call()) {
        let name = name.ok_or(Break::Malformed)?;
        if matches!(rules, ObjectRules::Bare(tools) if !tools.declares(&name)) {
            return Err(Break::Malformed);
        }
        cursor.begin_call(name, None);
        cursor.arguments("{}");
    }
    cursor.end_call();
    Ok(())
}

/// The grammar of a call as [`object`] reads it, with this key of its arguments.
pub(crate) fn json_call(grammar: &mut Grammar<'_>, tool: Tool<'_>, key: &str) -> String {
    let head = grammar.text(&format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name())));
    format!(r#"{head} {} "}}""#, grammar.arguments(tool))
}

/// Reads a value of a bounded length behind white space.
async fn spaced_json(cursor: &Cursor) -> Result<String, Break> {
    cursor.skip_blank().await?;
    cursor.held_json().await
}

/// Reads the arguments of a call that has begun. Without any, and for `null`, they are `{}`.
pub(crate) async fn arguments(cursor: &Cursor) -> Result<(), Break> {
    cursor.skip_blank().await?;
    match cursor.peek().await? {
        'n' => {
            let held = cursor.held_json().await?;
            cursor.arguments(or_empty(&held));
            Ok(())
        }
        '{' | '[' | '"' | '-' | 't' | 'f' | '0'..='9' => cursor.json(Output::arguments).await,
        _ => {
            cursor.arguments("{}");
            Ok(())
        }
    }
}

/// The arguments that a model means by a value.
fn or_empty(arguments: &str) -> &str {
    if arguments == "null" { "{}" } else { arguments }
}

/// The text of a short JSON string behind its opening quote.
async fn rest_of_string(cursor: &Cursor) -> Result<String, Break> {
    let mut json = String::from('"');
    let mut is_escaped = false;
    loop {
        let next = cursor.next().await?;
        json.push(next);
        if next == '"' && !is_escaped {
            return serde_json::from_str(&json).map_err(|_| Break::Malformed);
        }
        if json.len() > MAX_NAME {
            return Err(Break::Malformed);
        }
        is_escaped = next == '\\' && !is_escaped;
    }
}
