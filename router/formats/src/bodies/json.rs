//! Calls whose arguments are JSON: they stream as the model writes them, byte for byte.

use super::tool_name;
use crate::{
    cursor::{Break, Cursor},
    limits::{MAX_HELD, MAX_KEY},
    output::Output,
    tools::Tools,
};

/// What makes a JSON object a call.
pub(crate) enum ObjectRules<'a> {
    /// A marker stands before it: a name is enough.
    Marked,
    /// Nothing stands before it: the object has arguments, or the name of a declared tool.
    Bare(&'a Tools),
}

/// Reads a call `{"name": …, "arguments": …}` behind its opening brace. Members may come in any order; arguments before
/// the name are held. The key `parameters` is Llama's.
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
        let key = rest_of_string(cursor, MAX_KEY).await?;
        cursor.skip_blank().await?;
        cursor.expect(':').await?;
        let has_begun = cursor.output(|output| output.in_call());
        match (key.as_str(), name.take()) {
            ("name", None) => {
                cursor.skip_blank().await?;
                cursor.expect('"').await?;
                name = Some(tool_name(&rest_of_string(cursor, MAX_KEY).await?)?);
                if let (Some(arguments), Some(name)) = (held.take(), name.clone()) {
                    cursor.begin_call(name, None);
                    cursor.arguments(if arguments == "null" { "{}" } else { &arguments });
                }
            }
            ("arguments" | "parameters", Some(tool)) if !has_begun => {
                cursor.begin_call(tool.clone(), None);
                name = Some(tool);
                arguments(cursor).await?;
            }
            ("arguments" | "parameters", None) if held.is_none() => held = Some(spaced_json(cursor).await?),
            ("type" | "id" | "call_id" | "index", tool) if !has_begun => {
                name = tool;
                spaced_json(cursor).await?;
            }
            (_, tool) if has_begun => {
                name = tool;
                cursor.skip_blank().await?;
                cursor.json(|_, _| {}).await?;
            }
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
            cursor.arguments(if held == "null" { "{}" } else { &held });
            Ok(())
        }
        '{' | '[' | '"' | '-' | 't' | 'f' | '0'..='9' => cursor.json(Output::arguments).await,
        _ => {
            cursor.arguments("{}");
            Ok(())
        }
    }
}

/// The text of a JSON string behind its opening quote.
async fn rest_of_string(cursor: &Cursor, longest: usize) -> Result<String, Break> {
    let mut json = String::from('"');
    let mut is_escaped = false;
    loop {
        let next = cursor.next().await?;
        json.push(next);
        match next {
            '"' if !is_escaped => break,
            _ => is_escaped = next == '\\' && !is_escaped,
        }
        if json.len() > longest {
            return Err(Break::Malformed);
        }
    }
    const { assert!(MAX_KEY < MAX_HELD) };
    serde_json::from_str(&json).map_err(|_| Break::Malformed)
}
