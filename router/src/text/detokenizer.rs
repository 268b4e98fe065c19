//! Text from tokens as they come: whole characters only, each token looked at a bounded number of times, and in the
//! end the same text as decoding all tokens at once. (With byte fallback, bytes that are no UTF-8 may show as more or
//! fewer U+FFFD: that decoder judges a run of bytes by its end, which a stream cannot wait for.)

use std::sync::Arc;

use super::tokenizer::Tokenizer;

/// With decoders that are not by bytes, how many tokens may wait for a character to become whole. The longest UTF-8
/// character has four bytes; decoders may look at a neighbour.
const MAX_HELD: usize = 8;

/// The state of one output's text.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    state: State,
}

enum State {
    /// Byte-level tokens are strings of bytes: text is their concatenation, so only a cut character is held.
    Bytes { held: Vec<u8> },
    /// Any other decoder may join tokens with spaces or strip them, depending on the neighbours: a window of tokens is
    /// decoded with and without the new one, and the difference is the new text.
    Window {
        tokens: Vec<u32>,
        /// How many of `tokens` have had their text taken.
        taken: usize,
    },
}

impl Detokenizer {
    /// An output with no tokens yet.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        let state = if tokenizer.is_byte_level() {
            State::Bytes { held: Vec::new() }
        } else {
            State::Window { tokens: Vec::new(), taken: 0 }
        };
        Self { tokenizer, skip_special_tokens, state }
    }

    /// Takes a token; returns the text that is now certain.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special_tokens && self.tokenizer.is_special(id) {
            return String::new();
        }
        match &mut self.state {
            State::Bytes { held } => {
                held.extend(self.tokenizer.token_bytes(id));
                take_whole_characters(held)
            }
            State::Window { tokens, taken } => {
                tokens.push(id);
                let (before, all) = window(&self.tokenizer, tokens, *taken);
                let cut = all.ends_with('\u{fffd}') && tokens.len() - *taken < MAX_HELD;
                if cut || all.len() <= before.len() {
                    return String::new();
                }
                let new = after(&all, &before);
                // The tokens just taken stay as the next one's left neighbours; older ones have had their effect.
                tokens.drain(..*taken);
                *taken = tokens.len();
                new
            }
        }
    }

    /// The rest of the text, at the end of the output; a character left incomplete shows as U+FFFD.
    pub fn flush(&mut self) -> String {
        match &mut self.state {
            State::Bytes { held } => String::from_utf8_lossy(&std::mem::take(held)).into_owned(),
            State::Window { tokens, taken } => {
                let (before, all) = window(&self.tokenizer, tokens, *taken);
                tokens.clear();
                *taken = 0;
                after(&all, &before)
            }
        }
    }
}

/// The window's text without and with the tokens whose text has not been taken.
fn window(tokenizer: &Tokenizer, tokens: &[u32], taken: usize) -> (String, String) {
    // Specials that should be skipped never enter the window, so the decoder need not skip any. A decoder that fails on
    // tokens of its own vocabulary has no text for them.
    let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap_or_default();
    (decode(&tokens[..taken]), decode(tokens))
}

/// What `all` has behind `before`; a decoder that changed its mind about `before` is followed from where they part.
fn after(all: &str, before: &str) -> String {
    match all.strip_prefix(before) {
        Some(new) => new.to_owned(),
        None => all.chars().skip(before.chars().count()).collect(),
    }
}

/// Takes all complete characters off the front; bytes that can never become one turn into U+FFFD, exactly as decoding
/// the whole would have it.
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::test_support;

    fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip: bool) -> (Vec<String>, String) {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip);
        let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
        pieces.push(detokenizer.flush());
        let whole = pieces.concat();
        (pieces, whole)
    }

    #[test]
    fn an_emoji_appears_whole_with_its_last_byte() {
        let tokenizer = test_support::tokenizer();
        let ids = tokenizer.encode("a🎻b", false).unwrap();
        let (pieces, _) = streamed(&tokenizer, &ids, true);
        assert_eq!(pieces, ["a", "", "", "", "🎻", "b", ""]);
    }

    #[test]
    fn what_stays_incomplete_is_flushed_as_a_replacement() {
        let tokenizer = test_support::tokenizer();
        let ids = tokenizer.encode("🎻", false).unwrap();
        assert_eq!(streamed(&tokenizer, &ids[..3], true).1, "\u{fffd}");
    }

    proptest! {
        #[test]
        fn pieces_add_up_to_the_whole_decode(
            ids in prop::collection::vec(0..test_support::VOCAB, 0..40),
            skip in any::<bool>(),
        ) {
            let tokenizer = test_support::tokenizer();
            prop_assert_eq!(streamed(&tokenizer, &ids, skip).1, tokenizer.decode(&ids, skip).unwrap());
        }

        #[test]
        fn no_piece_of_valid_text_holds_half_a_character(text in "[a-c é日🎻]{0,20}") {
            let tokenizer = test_support::tokenizer();
            let ids = tokenizer.encode(&text, false).unwrap();
            let (pieces, whole) = streamed(&tokenizer, &ids, true);
            let broken = pieces.iter().any(|piece| piece.contains('\u{fffd}'));
            prop_assert!(!broken);
            prop_assert_eq!(whole, text);
        }

        #[test]
        fn bytes_to_fall_back_on_become_characters(text in "[a-c é日🎻]{0,12}") {
            let tokenizer = test_support::byte_fallback_tokenizer();
            let ids = tokenizer.encode(&text, false).unwrap();
            let (pieces, whole) = streamed(&tokenizer, &ids, true);
            let broken = pieces.iter().any(|piece| piece.contains('\u{fffd}'));
            prop_assert!(!broken);
            prop_assert_eq!(&whole, &tokenizer.decode(&ids, true).unwrap());
            prop_assert_eq!(whole, text);
        }

        #[test]
        fn a_decoder_that_looks_at_neighbours_agrees_too(words in prop::collection::vec(0u32..6, 0..20)) {
            let tokenizer = test_support::metaspace_tokenizer();
            let (_, whole) = streamed(&tokenizer, &words, true);
            prop_assert_eq!(whole, tokenizer.decode(&words, true).unwrap());
        }
    }
}
