//! Incremental detokenisation: text from tokens as they arrive.
//!
//! Only whole characters are released. Each token is decoded a bounded number of times. The concatenated text equals
//! the text of decoding all tokens at once. One exception: with byte fallback, bytes that are not valid UTF-8 may give
//! a different number of U+FFFD characters. A byte-fallback decoder needs the whole run of such bytes, and a stream
//! cannot wait for the end of the run.

use std::sync::Arc;

use super::tokenizer::{SpecialTokens, Tokenizer};

/// Maximum number of tokens that wait for a character to become complete, with decoders that are not byte-level. The
/// longest UTF-8 character has four bytes, and a decoder may look at a neighbouring token.
const MAX_HELD: usize = 8;

/// Bytes of the longest character.
const MAX_CHARACTER_BYTES: usize = 4;

/// Turns the tokens of one output into text.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    special_tokens: SpecialTokens,
    state: State,
    /// Text of the incomplete character at the end of the prompt, until the output has text or continues the character.
    /// Empty if the output is to show it.
    hidden: String,
}

/// Treatment of an incomplete character at the end of a prompt, if the output does not complete it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfinished {
    /// It is a part of the prompt, and the output does not show it.
    Hidden,
    /// The output begins with U+FFFD, because the prompt is echoed without it.
    Shown,
}

/// Text that a token releases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Whole characters.
    pub text: String,
    /// Number of the leading characters that belong to earlier tokens alone: incomplete ones, which the token shows to
    /// stay so.
    pub earlier: usize,
}

enum State {
    /// Byte-level decoder: text is the concatenation of the tokens' bytes. Only an incomplete character is held.
    Bytes { held: Vec<u8> },
    /// Any other decoder: it may add or strip spaces depending on neighbouring tokens. A window of tokens is decoded
    /// twice, with and without the tokens whose text is not released yet. The difference is the new text.
    Window {
        tokens: Vec<u32>,
        /// Number of leading `tokens` whose text has been released.
        taken: usize,
    },
}

impl Detokenizer {
    /// Creates the state of an output without tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, special_tokens: SpecialTokens) -> Self {
        let state = if tokenizer.is_byte_level() {
            State::Bytes { held: Vec::new() }
        } else {
            State::Window { tokens: Vec::new(), taken: 0 }
        };
        Self { tokenizer, special_tokens, state, hidden: String::new() }
    }

    /// Creates the state of an output that continues a prompt: its first word keeps the space before it. Special tokens
    /// of the prompt are before the output, too, whether they are shown or not.
    pub fn after(
        prompt: &[u32],
        tokenizer: Arc<Tokenizer>,
        special_tokens: SpecialTokens,
        unfinished: Unfinished,
    ) -> Self {
        let mut from = prompt.len().saturating_sub(MAX_HELD);
        // The text begins with a whole character: the bytes of a broken one would break those behind it.
        for _ in 1..MAX_CHARACTER_BYTES {
            from -= usize::from(
                from > 0 && tokenizer.token_bytes(prompt[from]).first().is_some_and(is_continuation),
            );
        }
        let mut detokenizer = Self::new(tokenizer, SpecialTokens::Include);
        for &id in &prompt[from..] {
            detokenizer.push(id);
        }
        let hidden = match unfinished {
            Unfinished::Hidden => detokenizer.held(),
            Unfinished::Shown => String::new(),
        };
        Self { special_tokens, hidden, ..detokenizer }
    }

    /// Adds a token. Returns the text that can no longer change.
    pub fn push(&mut self, id: u32) -> Piece {
        if self.special_tokens == SpecialTokens::Exclude && self.tokenizer.is_special(id) {
            return Piece::default();
        }
        let mut piece = self.add(id);
        if piece.text.is_empty() {
            // Bytes that the output adds to the character share its U+FFFD, which is then the output's.
            if matches!(self.state, State::Bytes { .. }) && !self.tokenizer.token_bytes(id).is_empty() {
                self.hidden.clear();
            }
            return piece;
        }
        let hidden = std::mem::take(&mut self.hidden);
        if piece.earlier > 0
            && let Some(shown) = piece.text.strip_prefix(&hidden)
        {
            piece.text = shown.to_owned();
            piece.earlier -= hidden.chars().count();
        }
        piece
    }

    fn add(&mut self, id: u32) -> Piece {
        match &mut self.state {
            State::Bytes { held } => {
                let earlier = held.len();
                held.extend(self.tokenizer.token_bytes(id));
                let broken = std::str::from_utf8(held).err().is_some_and(|error| {
                    error.valid_up_to() == 0 && error.error_len().is_some_and(|length| length == earlier)
                });
                Piece { text: take_whole_characters(held), earlier: usize::from(broken) }
            }
            // An unknown id has no text, and the decoder does not see it.
            State::Window { .. } if !self.tokenizer.is_known(id) => Piece::default(),
            State::Window { tokens, taken } => {
                tokens.push(id);
                let (before, all) = window(&self.tokenizer, tokens, *taken);
                let cut = all.ends_with('\u{fffd}') && tokens.len() - *taken < MAX_HELD;
                if cut || all.len() <= before.len() {
                    // Tokens without text are removed, so that any number of them fits into the window. The first such
                    // token stays, because a decoder may treat the first token of a text differently.
                    if tokens.len() - *taken > MAX_HELD {
                        tokens.remove(*taken + 1);
                    }
                    return Piece::default();
                }
                let text = after(&all, &before);
                let earlier = match tokens.len() - *taken {
                    1 => 0,
                    _ => {
                        let (_, held) = window(&self.tokenizer, &tokens[..tokens.len() - 1], *taken);
                        let held = after(&held, &before);
                        if text.starts_with(&held) { held.chars().count() } else { 0 }
                    }
                };
                // The tokens released now stay as the left neighbours of the next token. Older tokens no longer affect
                // the text and are dropped.
                tokens.drain(..*taken);
                *taken = tokens.len();
                Piece { text, earlier }
            }
        }
    }

    /// Releases the text so far, before a token that is a marker and no part of the text around it. An incomplete
    /// character becomes U+FFFD.
    pub fn release(&mut self) -> String {
        let text = self.held();
        match &mut self.state {
            State::Bytes { held } => held.clear(),
            // Released tokens stay as the left neighbours of the next one.
            State::Window { tokens, taken } if tokens.len() > *taken => {
                tokens.drain(..*taken);
                *taken = tokens.len();
            }
            State::Window { .. } => {}
        }
        let hidden = std::mem::take(&mut self.hidden);
        text.strip_prefix(&hidden).map(str::to_owned).unwrap_or(text)
    }

    /// Releases the rest of the text, at the end of the output. An incomplete character becomes U+FFFD.
    pub fn flush(&mut self) -> String {
        let held = self.held();
        match &mut self.state {
            State::Bytes { held } => held.clear(),
            State::Window { tokens, taken } => {
                tokens.clear();
                *taken = 0;
            }
        }
        let hidden = std::mem::take(&mut self.hidden);
        held.strip_prefix(&hidden).map(str::to_owned).unwrap_or(held)
    }

    /// The text that is not released yet, as if no token came.
    fn held(&self) -> String {
        match &self.state {
            State::Bytes { held } => String::from_utf8_lossy(held).into_owned(),
            State::Window { tokens, taken } => {
                let (before, all) = window(&self.tokenizer, tokens, *taken);
                after(&all, &before)
            }
        }
    }
}

/// True for a byte inside a character, behind its first.
fn is_continuation(byte: &u8) -> bool {
    byte & 0xc0 == 0x80
}

/// The text of the first `taken` tokens, and the text of all tokens in the window.
fn window(tokenizer: &Tokenizer, tokens: &[u32], taken: usize) -> (String, String) {
    // Special tokens that are skipped never enter the window, so the decoder need not skip any. If the decoder fails,
    // the tokens have no text.
    let decode = |ids: &[u32]| tokenizer.decode(ids, SpecialTokens::Include).unwrap_or_default();
    (decode(&tokens[..taken]), decode(tokens))
}

/// The text of `all` after `before`. If `all` does not begin with `before`, the decoder has changed the earlier text.
/// In that case, skips as many characters as `before` has.
fn after(all: &str, before: &str) -> String {
    match all.strip_prefix(before) {
        Some(new) => new.to_owned(),
        None => all.chars().skip(before.chars().count()).collect(),
    }
}

/// Removes all complete characters from the front of `held` and returns them. Invalid bytes become U+FFFD, exactly as
/// if the whole text were decoded at once.
fn take_whole_characters(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(held) {
            Ok(whole) => {
                text.push_str(whole);
                held.clear();
                return text;
            }
            Err(error) => {
                text.push_str(&String::from_utf8_lossy(&held[..error.valid_up_to()]));
                match error.error_len() {
                    Some(invalid) => {
                        text.push('\u{fffd}');
                        held.drain(..error.valid_up_to() + invalid);
                    }
                    None => {
                        held.drain(..error.valid_up_to());
                        return text;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
