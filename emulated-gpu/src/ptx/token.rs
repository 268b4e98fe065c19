//! Tokens of PTX text.

use crate::DecodeError;

/// A token: a word, a string with its quotes, or one punctuation character.
#[derive(Clone, Copy, Debug)]
pub struct Token<'a> {
    pub text: &'a str,
    pub line: u32,
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Returns the end of the word that starts at `from`. A double colon is part of a word (`.shared::cta`). A single colon
/// is not, because it ends a label.
fn word_end(bytes: &[u8], from: usize) -> usize {
    let mut at = from;
    loop {
        match bytes.get(at) {
            Some(&byte) if in_word(byte) => at += 1,
            Some(b':') if bytes.get(at + 1) == Some(&b':') => at += 2,
            _ => return at,
        }
    }
}

/// Splits text into tokens, without comments.
///
/// # Errors
///
/// If a comment or a string does not end.
pub fn tokens(text: &str) -> Result<Vec<Token<'_>>, DecodeError> {
    let bytes = text.as_bytes();
    let mut found = Vec::with_capacity(bytes.len() / 4);
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let start = at;
        if rest[0] == b'\n' {
            line += 1;
            at += 1;
        } else if rest[0].is_ascii_whitespace() || rest[0] == 0 {
            at += 1;
        } else if rest.starts_with(b"//") {
            at += rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            let Some(end) = rest.windows(2).position(|w| w == b"*/") else {
                return Err(DecodeError { line, what: "a comment does not end".to_owned() });
            };
            line += rest[..end].iter().filter(|&&b| b == b'\n').count() as u32;
            at += end + 2;
        } else if rest[0] == b'"' {
            let Some(end) = rest[1..].iter().position(|&b| b == b'"') else {
                return Err(DecodeError { line, what: "a string does not end".to_owned() });
            };
            at += end + 2;
            found.push(Token { text: &text[start..at], line });
        } else if in_word(rest[0]) {
            at = word_end(bytes, at);
            found.push(Token { text: &text[start..at], line });
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
            found.push(Token { text: &text[start..at], line });
        }
    }
    Ok(found)
}
