//! Rewrites what published templates use and minijinja lacks into what minijinja has.
//!
//! - `{% generation %}`, which marks an assistant's words for training, becomes `{% with %}`. Both open a scope.
//! - `'%s' % value`, Python's formatting of texts, becomes `'%s'|format(value)`.

/// Maximum depth of formattings inside the operands of formattings. Deeper ones are not rewritten, so their template
/// does not compile.
const MOST_NESTED: usize = 32;

/// Returns a template's source in minijinja's language.
pub fn rewrite(source: &str) -> String {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (text, tag) = rest.split_at(at);
        output.push_str(text);
        let unchanged = match tag.as_bytes().get(1) {
            Some(b'#') => Some(tag.find("#}").map_or(tag.len(), |end| end + 2)),
            Some(b'%') if statement(tag).is_some_and(|(name, _)| name == "raw") => Some(raw_block(tag)),
            Some(b'%' | b'{') => None,
            _ => Some(1),
        };
        let length = match unchanged {
            Some(length) => {
                output.push_str(&tag[..length]);
                length
            }
            None if tag.starts_with("{%") => copy_tag(tag, "%}", 0, &mut output),
            None => copy_tag(tag, "}}", 0, &mut output),
        };
        rest = &tag[length..];
    }
    output.push_str(rest);
    output
}

/// The name of a statement, such as `if`, and its place in the tag.
fn statement(tag: &str) -> Option<(&str, usize)> {
    let inside = tag.strip_prefix("{%")?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside).trim_start();
    let end = inside.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(inside.len());
    Some((&inside[..end], tag.len() - inside.len()))
}

/// Length of a block whose text is not a template.
fn raw_block(tag: &str) -> usize {
    let mut from = 2;
    while let Some(at) = tag[from..].find("{%") {
        let start = from + at;
        if statement(&tag[start..]).is_some_and(|(name, _)| name == "endraw") {
            return tag[start..].find("%}").map_or(tag.len(), |end| start + end + 2);
        }
        from = start + 2;
    }
    tag.len()
}

/// Copies a tag up to `end`, rewritten. Returns the tag's length. The tag is inside the operands of `nested`
/// formattings.
fn copy_tag(tag: &str, end: &str, nested: usize, output: &mut String) -> usize {
    let renamed = statement(tag).and_then(|(name, at)| match name {
        "generation" => Some(("with", at, name.len())),
        "endgeneration" => Some(("endwith", at, name.len())),
        _ => None,
    });
    let mut at = 2;
    output.push_str(&tag[..2]);
    if let Some((name, from, length)) = renamed {
        output.push_str(&tag[2..from]);
        output.push_str(name);
        at = from + length;
    }
    // Braces of objects inside the tag, which `}}` does not close.
    let mut depth = 0;
    while let Some(c) = tag[at..].chars().next() {
        if depth == 0 && tag[at..].starts_with(end) {
            output.push_str(end);
            return at + end.len();
        }
        match c {
            '\'' | '"' => {
                let length = string_length(&tag[at..]);
                let literal = &tag[at..at + length];
                output.push_str(literal);
                at += length;
                // The search for the operand's end may read the whole rest, so the limit also bounds the time.
                let operand = if nested < MOST_NESTED { formatted(&tag[at..]) } else { None };
                if let Some(operand) = operand {
                    let written = rewrite_expression(operand.text, nested + 1);
                    let spread = if literal.contains("%(") { "**" } else { "" };
                    output.push_str(&format!("|format({spread}{written})"));
                    at += operand.end;
                }
                continue;
            }
            '{' => depth += 1,
            '}' => depth = i32::max(depth - 1, 0),
            _ => {}
        }
        output.push(c);
        at += c.len_utf8();
    }
    tag.len()
}

/// Rewrites an expression that stands in no tag of its own.
fn rewrite_expression(expression: &str, nested: usize) -> String {
    let tag = format!("{{{{{expression}}}}}");
    let mut output = String::new();
    copy_tag(&tag, "}}", nested, &mut output);
    output.strip_prefix("{{").and_then(|text| text.strip_suffix("}}")).unwrap_or(expression).to_owned()
}

/// Length of the string literal at the start of a text, with its quotes.
fn string_length(text: &str) -> usize {
    let mut chars = text.char_indices();
    let quote = chars.next().map(|(_, c)| c);
    let mut escaped = false;
    for (at, c) in chars {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if Some(c) == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// The operand of a `%` behind a string literal.
struct Operand<'a> {
    /// The arguments of the formatting.
    text: &'a str,
    /// End of the operand in the text that was searched.
    end: usize,
}

/// Finds `% operand` at the start of a text, but not the end of a tag.
fn formatted(text: &str) -> Option<Operand<'_>> {
    let after = text.trim_start().strip_prefix('%').filter(|after| !after.starts_with('}'))?;
    let operand = after.trim_start();
    let start = text.len() - operand.len();
    let length = operand_length(operand)?;
    let whole = &operand[..length];
    // A tuple's members become the arguments.
    let members = whole.strip_prefix('(').and_then(|whole| whole.strip_suffix(')'));
    let text = match members.filter(|_| bracket_length(whole) == whole.len()) {
        Some(members) => members.trim_end().trim_end_matches(','),
        None => whole,
    };
    Some(Operand { text, end: start + length })
}

/// Length of a bracketed text, with its brackets.
fn bracket_length(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while let Some(c) = text[at..].chars().next() {
        match c {
            '\'' | '"' => {
                at += string_length(&text[at..]);
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        at += c.len_utf8();
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// Length of an operand: a literal, a name or a bracketed expression, with members, calls and filters behind it.
fn operand_length(text: &str) -> Option<usize> {
    let mut at = if text.starts_with('-') { 1 } else { 0 };
    at += match text[at..].chars().next()? {
        '\'' | '"' => string_length(&text[at..]),
        '(' | '[' | '{' => bracket_length(&text[at..]),
        c if is_word(c) => word_length(&text[at..]),
        _ => return None,
    };
    loop {
        let rest = &text[at..];
        at += match rest.chars().next() {
            Some('(' | '[') => bracket_length(rest),
            Some('.') => 1 + word_length(&rest[1..]),
            _ => match rest.trim_start().strip_prefix('|') {
                Some(filter) => {
                    let name = filter.trim_start();
                    let length = word_length(name);
                    rest.len() - name.len() + length
                }
                None => return Some(at),
            },
        };
    }
}

fn word_length(text: &str) -> usize {
    text.find(|c| !is_word(c)).unwrap_or(text.len())
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests;
