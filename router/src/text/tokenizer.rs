//! The checkpoint's tokenizer (`tokenizer.json`), with what serving asks of it beyond encode and decode.

use std::{borrow::Cow, collections::HashSet};

use tokenizers::{DecoderWrapper, Tokenizer as Inner};
use tutti_runtime::Error;

/// Encodes text, decodes tokens, and knows each token's own bytes.
pub struct Tokenizer {
    inner: Inner,
    special: HashSet<u32>,
    added: HashSet<u32>,
    /// Whether the decoder is the byte-level one: text is then the concatenation of the tokens' bytes.
    byte_level: bool,
    /// Bytes of the longest token.
    longest: usize,
}

/// Normalisation may shorten a text before it is cut into tokens; composing characters does so the most, to a third.
const MOST_SHORTENED: usize = 4;

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn from_bytes(json: &[u8]) -> Result<Self, Error> {
        let invalid = |e: tokenizers::Error| Error::invalid("tokenizer", format!("tokenizer.json: {e}"));
        let mut inner = Inner::from_bytes(json).map_err(invalid)?;
        // A prompt is encoded whole: what a training run once truncated or padded to is not the server's business.
        inner.with_truncation(None).map_err(invalid)?;
        inner.with_padding(None);
        let added = inner.get_added_tokens_decoder();
        let longest = inner.get_vocab(true).keys().map(String::len).max().unwrap_or(0);
        Ok(Self {
            longest,
            special: added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect(),
            added: added.keys().copied().collect(),
            byte_level: matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))),
            inner,
        })
    }

    /// The text's token ids; `add_special_tokens` puts those around it that the tokenizer's post-processor adds.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Error> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|e| Error::invalid("prompt", format!("cannot be tokenised: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether a text of this many bytes has more than so many tokens for sure, which is told without encoding it.
    pub fn surely_exceeds(&self, bytes: usize, tokens: u32) -> bool {
        // Other decoders have tokens for unknown words of any length.
        self.byte_level && bytes / MOST_SHORTENED > self.longest.saturating_mul(tokens as usize)
    }

    /// The vocabulary's own spelling of each token.
    pub fn spellings(&self, ids: &[u32]) -> Vec<String> {
        ids.iter().map(|&id| self.inner.id_to_token(id).unwrap_or_default()).collect()
    }

    /// The tokens' text. Ids that the tokenizer does not know (a padded vocabulary has some) stand for nothing.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, Error> {
        self.inner
            .decode(ids, skip_special_tokens)
            .map_err(|e| Error::internal(format!("tokens {ids:?} do not decode: {e}")))
    }

    /// Whether the token is one of those that `skip_special_tokens` removes.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether decoding is concatenation of the tokens' bytes, read as UTF-8.
    pub fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// What one token stands for by itself; part of a character for some. Empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.inner.id_to_token(id) else { return Vec::new() };
        if self.byte_level {
            return byte_level_bytes(&token);
        }
        if self.added.contains(&id) {
            return token.into_bytes();
        }
        if let Some(byte) = fallback_byte(&token) {
            return vec![byte];
        }
        self.inner.decode(&[id], false).unwrap_or(token).into_bytes()
    }

    /// One token as logprobs show it: its text, or `bytes:\x..` where it is no whole text, as OpenAI's API writes it.
    pub fn token_string(&self, id: u32) -> String {
        let bytes = self.token_bytes(id);
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let hex = error.as_bytes().iter().map(|byte| Cow::Owned(format!("\\x{byte:02x}")));
                [Cow::Borrowed("bytes:")].into_iter().chain(hex).collect()
            }
        }
    }
}

/// The byte of a byte-fallback token such as `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Undoes the byte-level alphabet; a token with a character outside of it stands for itself, as the decoder has it.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// GPT-2's printable stand-ins: printable Latin-1 characters are themselves, and the 68 other bytes, in order, are the
/// characters from U+0100 on.
fn byte_of(stand_in: char) -> Option<u8> {
    let code = u32::from(stand_in);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::tokenizer;

    #[test]
    fn the_byte_alphabet_covers_every_byte_once() {
        let mut seen: Vec<u8> = (0u32..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        // The best-known stand-ins: space and newline.
        assert_eq!((byte_of('Ġ'), byte_of('Ċ')), (Some(b' '), Some(b'\n')));
    }

    #[test]
    fn text_survives_a_round_trip_and_token_bytes_add_up_to_it() {
        let tokenizer = tokenizer();
        let text = "hello 🎻 Grüße\n";
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
        assert_eq!(bytes, text.as_bytes());
    }

    #[test]
    fn a_text_too_long_for_any_tokens_is_told_without_encoding_it() {
        let tokenizer = tokenizer();
        // The longest token is `<|begin|>`.
        assert!(!tokenizer.surely_exceeds(4 * 9 * 10, 10));
        assert!(tokenizer.surely_exceeds(4 * 9 * 10 + 4, 10));
    }

    #[test]
    fn part_of_a_character_is_shown_as_bytes() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("é", false).unwrap();
        let shown: Vec<String> = ids.iter().map(|&id| tokenizer.token_string(id)).collect();
        assert_eq!(shown, [r"bytes:\xc3", r"bytes:\xa9"]);
    }

    #[test]
    fn broken_json_is_named() {
        let error = Tokenizer::from_bytes(b"{\"version\":").err().unwrap();
        assert_eq!(error.field(), Some("tokenizer"));
    }
}
