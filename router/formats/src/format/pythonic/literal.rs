//! Python literals as JSON.

use crate::{
    cursor::{Break, Cursor},
    json::escape,
    limits::{MAX_DEPTH, MAX_NAME},
};

/// Reads one literal, and passes it on as JSON as it arrives.
pub(super) async fn literal(cursor: &Cursor) -> Result<(), Break> {
    let mut closers = Vec::new();
    loop {
        cursor.skip_blank().await?;
        match cursor.peek().await? {
            quote @ ('"' | '\'') => string(cursor, quote).await?,
            open @ ('[' | '(' | '{') => {
                cursor.next().await?;
                closers.push(if open == '{' { "}" } else { "]" });
                if closers.len() > MAX_DEPTH {
                    return Err(Break::Malformed);
                }
                cursor.arguments(if open == '{' { "{" } else { "[" });
                cursor.skip_blank().await?;
                if !matches!(cursor.peek().await?, ']' | ')' | '}') {
                    continue;
                }
            }
            _ => scalar(cursor).await?,
        }
        // Behind a value: the ends of what it stands in, up to the next value.
        loop {
            let Some(closer) = closers.last() else { return Ok(()) };
            cursor.skip_blank().await?;
            match cursor.next().await? {
                ']' | ')' | '}' => {
                    cursor.arguments(closer);
                    closers.pop();
                }
                ':' => {
                    cursor.arguments(": ");
                    break;
                }
                ',' => {
                    cursor.skip_blank().await?;
                    // JSON has no trailing comma.
                    if !matches!(cursor.peek().await?, ']' | ')' | '}') {
                        cursor.arguments(", ");
                        break;
                    }
                }
                _ => return Err(Break::Malformed),
            }
        }
    }
}

/// Reads a number or a word. Text that is not JSON becomes a string.
async fn scalar(cursor: &Cursor) -> Result<(), Break> {
    let mut text = String::new();
    while matches!(cursor.peek().await?, next if next.is_alphanumeric() || matches!(next, '_' | '.' | '-' | '+'))
    {
        text.push(cursor.next().await?);
        if text.len() > MAX_NAME {
            return Err(Break::Malformed);
        }
    }
    match text.as_str() {
        "" => return Err(Break::Malformed),
        "True" => cursor.arguments("true"),
        "False" => cursor.arguments("false"),
        "None" => cursor.arguments("null"),
        json if serde_json::from_str::<&serde_json::value::RawValue>(json).is_ok() => cursor.arguments(json),
        word => cursor.arguments(&format!("\"{}\"", escape(word))),
    }
    Ok(())
}

/// Reads a string.
async fn string(cursor: &Cursor, quote: char) -> Result<(), Break> {
    cursor.next().await?;
    cursor.arguments("\"");
    loop {
        match cursor.next().await? {
            '\\' => escaped(cursor).await?,
            next if next == quote => break,
            next => cursor.arguments(&escape(next.encode_utf8(&mut [0; 4]))),
        }
    }
    cursor.arguments("\"");
    Ok(())
}

/// Reads an escape behind its backslash. One that Python does not know keeps the backslash.
async fn escaped(cursor: &Cursor) -> Result<(), Break> {
    let digits = match cursor.next().await? {
        '\n' => return Ok(()),
        known @ ('n' | 't' | 'r' | 'b' | 'f' | '"' | '\\') => {
            cursor.arguments(&format!("\\{known}"));
            return Ok(());
        }
        '\'' => {
            cursor.arguments("'");
            return Ok(());
        }
        'x' => 2,
        'u' => 4,
        'U' => 8,
        unknown => {
            cursor.arguments(&escape(&format!("\\{unknown}")));
            return Ok(());
        }
    };
    let mut code = 0;
    for _ in 0..digits {
        let digit = cursor.next().await?.to_digit(16).ok_or(Break::Malformed)?;
        code = code << 4 | digit;
    }
    // Halves of a surrogate pair are escapes in JSON, too.
    match char::from_u32(code) {
        Some(character) => cursor.arguments(&escape(character.encode_utf8(&mut [0; 4]))),
        None if digits == 4 => cursor.arguments(&format!("\\u{code:04x}")),
        None => return Err(Break::Malformed),
    }
    Ok(())
}
