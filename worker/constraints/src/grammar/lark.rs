//! Texts inside Lark grammars and regular expressions.

/// A text as a literal of Lark, whose escapes are those of JSON.
pub(super) fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A regular expression that matches one of several texts.
pub(super) fn any_of(texts: &[String]) -> String {
    let mut pattern = String::from("(");
    for (n, text) in texts.iter().enumerate() {
        if n > 0 {
            pattern.push('|');
        }
        escape(text, &mut pattern);
    }
    pattern.push(')');
    pattern
}

/// Appends a text to a regular expression that matches it alone.
fn escape(text: &str, pattern: &mut String) {
    for c in text.chars() {
        match c {
            c if c.is_control() => pattern.push_str(&format!("\\x{{{:x}}}", u32::from(c))),
            // No other one: `\<` and `\>` are boundaries of words.
            c if regex_syntax_has(c) => {
                pattern.push('\\');
                pattern.push(c);
            }
            c => pattern.push(c),
        }
    }
}

/// True if a character has a meaning in regular expressions.
fn regex_syntax_has(c: char) -> bool {
    r"\.+*?()|[]{}^$#&-~/".contains(c)
}

#[cfg(test)]
mod tests;
