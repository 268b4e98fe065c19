//! Quotes special tokens in clients' text, so that the chat template and the tokenizer take them for text.
//!
//! A template joins its own text, whose special tokens are control tokens, with text of clients, whose special tokens
//! are not. In the rendered text the two look alike. So before rendering, one character of each special token in a
//! client's text is replaced by a *stand-in*: a private character of Unicode that occurs nowhere else in the request.
//! The tokenizer then finds only the template's special tokens, and puts the characters back before it does anything
//! else ([`Tokenizer::encode_up_to`]). A text without special tokens is not changed, and takes the ordinary way.

use std::{collections::HashSet, ops::Range};

use tutti_runtime::Error;

use super::{special::Fragments, tokenizer::Tokenizer};

/// The private characters of Unicode's last plane.
const PRIVATE: Range<char> = '\u{100000}'..'\u{10fffe}';

/// True if the character may become a stand-in.
pub fn is_private(c: &char) -> bool {
    PRIVATE.contains(c)
}

/// The stand-ins of one request. Without any, texts have no quotes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotes {
    /// Each stand-in's character, and the stand-in.
    pairs: Vec<(char, char)>,
}

impl Quotes {
    /// True if nothing is quoted.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// The character for which a stand-in stands; any other character itself.
    pub fn original(&self, c: char) -> char {
        if !is_private(&c) {
            return c;
        }
        self.pairs.iter().find(|(_, stand_in)| *stand_in == c).map_or(c, |(original, _)| *original)
    }

    /// The text without quotes.
    pub fn unquote(&self, text: &str) -> String {
        text.chars().map(|c| self.original(c)).collect()
    }
}

/// A text in which some special tokens may be quoted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotedText {
    /// The text with stand-ins.
    pub text: String,
    /// The stand-ins.
    pub quotes: Quotes,
}

impl From<String> for QuotedText {
    fn from(text: String) -> Self {
        Self { text, quotes: Quotes::default() }
    }
}

impl QuotedText {
    /// Size of the text without quotes, in bytes.
    pub fn unquoted_bytes(&self) -> usize {
        if self.quotes.is_empty() {
            return self.text.len();
        }
        self.text.chars().map(|c| self.quotes.original(c).len_utf8()).sum()
    }

    /// The text without quotes.
    pub fn into_unquoted(self) -> String {
        if self.quotes.is_empty() { self.text } else { self.quotes.unquote(&self.text) }
    }
}

/// Quotes the texts of one request.
pub struct Quoter<'a> {
    tokenizer: &'a Tokenizer,
    /// Private characters that occur in the request or in the template.
    taken: HashSet<char>,
    quotes: Quotes,
}

impl<'a> Quoter<'a> {
    /// A quoter whose stand-ins occur in none of these texts, and in no added token.
    pub fn new<'t>(tokenizer: &'a Tokenizer, texts: impl Iterator<Item = &'t str>) -> Self {
        let mut taken: HashSet<char> = texts.flat_map(str::chars).filter(is_private).collect();
        taken.extend(tokenizer.private_chars());
        Self { tokenizer, taken, quotes: Quotes::default() }
    }

    /// Quotes the special tokens in a text, and the parts of special tokens that the text around could complete.
    pub fn quote(&mut self, text: &mut String, parts: Fragments) -> Result<(), Error> {
        let mut at: Vec<usize> = self.tokenizer.find_special(text, parts);
        if at.is_empty() {
            return Ok(());
        }
        at.sort_unstable();
        at.dedup();
        let mut quoted = String::with_capacity(text.len() + 4 * at.len());
        let mut at = at.into_iter().peekable();
        for (offset, c) in text.char_indices() {
            let is_quoted = at.next_if_eq(&offset).is_some();
            quoted.push(if is_quoted { self.stand_in(c)? } else { c });
        }
        *text = quoted;
        Ok(())
    }

    /// The stand-ins that were used.
    pub fn finish(self) -> Quotes {
        self.quotes
    }

    fn stand_in(&mut self, c: char) -> Result<char, Error> {
        let pairs = &mut self.quotes.pairs;
        if let Some((_, stand_in)) = pairs.iter().find(|(original, _)| *original == c) {
            return Ok(*stand_in);
        }
        let Some(free) = PRIVATE.into_iter().find(|c| !self.taken.contains(c)) else {
            return Err(Error::invalid("messages", "use every private character from U+100000 to U+10FFFD"));
        };
        self.taken.insert(free);
        pairs.push((c, free));
        Ok(free)
    }
}

/// Offset in `token` of the character that is replaced if the token is quoted. Preferably it is a character that no
/// filter of a template changes: no letter or digit, no white space and none that JSON escapes.
pub fn quoted_char(token: &str) -> usize {
    let is_plain: fn(char) -> bool =
        |c| !c.is_alphanumeric() && !c.is_whitespace() && !c.is_control() && c != '"' && c != '\\';
    let first = |is: fn(char) -> bool| token.char_indices().find(|(_, c)| is(*c)).map(|(at, _)| at);
    first(is_plain).or_else(|| first(|c| !c.is_whitespace())).unwrap_or(0)
}

#[cfg(test)]
mod tests;
