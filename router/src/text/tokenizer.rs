//! The checkpoint's tokenizer (`tokenizer.json`): encode, decode, and the bytes of single tokens.

mod quoted;

use std::{borrow::Cow, collections::HashSet};

use rayon::prelude::*;
use tokenizers::{AddedToken, DecoderWrapper, Encoding, Tokenizer as Inner};
use tutti_runtime::Error;

use super::{
    quoting::{QuotedText, is_private},
    segments,
    special::SpecialTexts,
    template::files::TokenizerFiles,
};

/// The treatment of special tokens by an encoding or a decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Encoding adds the special tokens of the tokenizer's post-processor. Decoding shows special tokens.
    Include,
    /// Encoding adds no special tokens. Decoding skips special tokens.
    Exclude,
}

impl SpecialTokens {
    /// `Include` if `included` is true.
    pub fn included(included: bool) -> Self {
        if included { Self::Include } else { Self::Exclude }
    }
}

/// Encodes text, decodes tokens, and gives the bytes of each token.
pub struct Tokenizer {
    inner: Inner,
    special: HashSet<u32>,
    special_texts: SpecialTexts,
    /// Private characters in added tokens.
    private_chars: HashSet<char>,
    /// True if some special tokens are found in normalised text.
    finds_in_normalised: bool,
    added: HashSet<u32>,
    /// True if the decoder is byte-level: text is then the concatenation of the tokens' bytes.
    byte_level: bool,
    /// Length of the longest token in bytes.
    longest: usize,
    /// True if a long text may be encoded in segments.
    cuttable: bool,
}

/// Upper bound of the factor by which normalisation shortens a text. Unicode composition shortens a text the most, by a
/// factor of at most three.
const MOST_SHORTENED: usize = 4;

/// Target size of a segment of a long text, in bytes.
const SEGMENT_BYTES: usize = 32 << 10;

/// Maximum size in bytes of a run without a break, such as white space or letters only. The pre-tokenizer may turn a
/// run into one piece. A piece takes memory for each of its characters while its tokens are merged, and the regular
/// expression engine gives up on runs of a million characters without an error.
pub const MAX_RUN_BYTES: usize = 256 << 10;

/// Maximum number of bytes per allowed token of a text that is encoded. Texts and programs have 3 to 6 bytes per token
/// in the vocabularies in use. The longest token gives no useful limit, because it is often a run of spaces.
const TEXT_BYTES_PER_TOKEN: usize = 16;

/// Size in bytes up to which a text is encoded whatever the limit of tokens is, because its encoding is quick.
const ALWAYS_ENCODED_BYTES: usize = 64 << 10;

/// Maximum size in bytes of a text that may have this many tokens.
pub fn max_text_bytes(tokens: u32) -> usize {
    (tokens as usize).saturating_mul(TEXT_BYTES_PER_TOKEN).max(ALWAYS_ENCODED_BYTES)
}

impl Tokenizer {
    /// Reads a `tokenizer.json` alone.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn from_bytes(json: &[u8]) -> Result<Self, Error> {
        Self::of(json, &TokenizerFiles::default())
    }

    /// Reads a `tokenizer.json`, and adds the tokens that other files name and this one lacks.
    pub fn of(json: &[u8], files: &TokenizerFiles) -> Result<Self, Error> {
        let invalid = |e: tokenizers::Error| Error::invalid("tokenizer", format!("tokenizer.json: {e}"));
        let mut inner = Inner::from_bytes(json).map_err(invalid)?;
        add_tokens(&mut inner, files).map_err(invalid)?;
        // Turns off the file's truncation and padding, which are meant for training. A prompt is always encoded whole.
        inner.with_truncation(None).map_err(invalid)?;
        inner.with_padding(None);
        let added = inner.get_added_tokens_decoder();
        let special = || added.values().filter(|token| token.special);
        let longest = inner.get_vocab(true).keys().map(String::len).max().unwrap_or(0);
        Ok(Self {
            longest,
            special_texts: SpecialTexts::new(special().map(|token| token.content.clone()).collect())?,
            private_chars: added
                .values()
                .flat_map(|token| token.content.chars())
                .filter(is_private)
                .collect(),
            finds_in_normalised: inner.get_normalizer().is_some() && special().any(|token| token.normalized),
            special: added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect(),
            added: added.keys().copied().collect(),
            cuttable: segments::allowed(&inner),
            byte_level: inner.get_decoder().is_some_and(is_byte_level),
            inner,
        })
    }

    /// Encodes a text into token ids.
    #[cfg(test)]
    pub fn encode(&self, text: &str, special_tokens: SpecialTokens) -> Result<Vec<u32>, Error> {
        let text = text.to_owned().into();
        self.encode_up_to(&text, special_tokens, usize::MAX).map(Option::unwrap_or_default)
    }

    /// Encodes a text into token ids. Special tokens become tokens, except for quoted ones. Returns `None` as soon as a
    /// long text is known to have more than `most` tokens. A short text is always encoded whole. If the tokenizer
    /// allows cuts, the segments of a long text are divided among the threads of the current pool.
    pub fn encode_up_to(
        &self,
        text: &QuotedText,
        special_tokens: SpecialTokens,
        most: usize,
    ) -> Result<Option<Vec<u32>>, Error> {
        let (text, quotes) = (text.text.as_str(), &text.quotes);
        check_runs(text)?;
        let include = special_tokens == SpecialTokens::Include;
        let segments = if self.cuttable { segments::cut(text, SEGMENT_BYTES) } else { vec![text] };
        let failed = |e| Error::invalid("prompt", format!("cannot be tokenised: {e}"));
        let encode = |segment: &str| match quotes.is_empty() {
            true => self.inner.encode_fast(segment, false),
            false => self.encode_quoted(segment, quotes),
        };
        if let [whole] = segments[..] {
            let encoding = match quotes.is_empty() {
                true => self.inner.encode_fast(whole, include),
                false => encode(whole).and_then(|encoding| self.inner.post_process(encoding, None, include)),
            };
            return Ok(Some(encoding.map_err(failed)?.get_ids().to_vec()));
        }
        let (mut parts, mut tokens) = (Vec::with_capacity(segments.len()), 0);
        for wave in segments.chunks(2 * rayon::current_num_threads()) {
            let encoded = wave.par_iter().map(|segment| encode(segment));
            let encoded = encoded.collect::<Result<Vec<Encoding>, _>>().map_err(failed)?;
            tokens += encoded.iter().map(|part| part.get_ids().len()).sum::<usize>();
            if tokens > most {
                return Ok(None);
            }
            parts.extend(encoded);
        }
        let whole = self.inner.post_process(Encoding::merge(parts, false), None, include).map_err(failed)?;
        Ok(Some(whole.get_ids().to_vec()))
    }

    /// True if a text of this many bytes certainly has more than `tokens` tokens. This is decided without encoding the
    /// text.
    pub fn surely_exceeds(&self, bytes: usize, tokens: u32) -> bool {
        // A tokenizer that is not byte-level may encode an unknown word of any length as one token, so the number of
        // bytes gives no limit.
        self.byte_level && bytes / MOST_SHORTENED > self.longest.saturating_mul(tokens as usize)
    }

    /// The vocabulary's own spelling of each token.
    pub fn spellings(&self, ids: &[u32]) -> Vec<String> {
        ids.iter().map(|&id| self.inner.id_to_token(id).unwrap_or_default()).collect()
    }

    /// Decodes tokens into text. Ids that the tokenizer does not know (a padded vocabulary has some) give no text.
    pub fn decode(&self, ids: &[u32], special_tokens: SpecialTokens) -> Result<String, Error> {
        self.inner
            .decode(ids, special_tokens == SpecialTokens::Exclude)
            .map_err(|e| Error::internal(format!("tokens {ids:?} do not decode: {e}")))
    }

    /// True if [`SpecialTokens::Exclude`] removes the token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// True if the vocabulary has the id.
    pub fn is_known(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
    }

    /// True if decoding concatenates the tokens' bytes and reads them as UTF-8.
    pub fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// The bytes of a single token inside a text, where a word keeps the space before it. They may be an incomplete
    /// character. An unknown id has no bytes.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.inner.id_to_token(id) else { return Vec::new() };
        if self.byte_level {
            return byte_level_bytes(&token);
        }
        if !self.added.contains(&id)
            && let Some(byte) = fallback_byte(&token)
        {
            return vec![byte];
        }
        // A decoder may treat the first token of a text differently, so the token follows itself.
        let decode = |ids: &[u32]| self.inner.decode(ids, false).ok();
        let (Some(first), Some(both)) = (decode(&[id]), decode(&[id, id])) else { return token.into_bytes() };
        let second = both.strip_prefix(first.as_str()).filter(|second| !second.is_empty());
        second.map_or_else(|| first.as_bytes().to_vec(), |second| second.as_bytes().to_vec())
    }

    /// Text and id of each added token.
    pub fn added_tokens(&self) -> impl Iterator<Item = (String, u32)> {
        self.inner.get_added_tokens_decoder().into_iter().map(|(id, token)| (token.content, id))
    }

    /// The text that is encoded into this token, if the token is an added one; else the token's string.
    pub fn added_text(&self, id: u32) -> String {
        let added = self.inner.id_to_token(id).filter(|_| self.added.contains(&id));
        added.unwrap_or_else(|| self.token_string(id))
    }

    /// A token's string in logprobs: its text, or `bytes:\x..` as in OpenAI's API if its bytes are not valid UTF-8.
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

/// Adds the tokens of other files that the tokenizer lacks, in the order of Hugging Face's transformers.
fn add_tokens(tokenizer: &mut Inner, files: &TokenizerFiles) -> tokenizers::Result<()> {
    let known: Vec<AddedToken> = tokenizer.get_added_tokens_decoder().into_values().collect();
    let mut missing: Vec<AddedToken> =
        files.added.iter().filter(|token| !known.contains(token)).cloned().collect();
    let is_in = |tokens: &[AddedToken], text: &str| tokens.iter().any(|token| token.content == text);
    for token in &files.declared {
        if !is_in(&known, &token.content) && !is_in(&missing, &token.content) {
            missing.push(token.clone());
        }
    }
    tokenizer.add_tokens(missing)?;
    Ok(())
}

/// Refuses a text with a run over [`MAX_RUN_BYTES`].
fn check_runs(text: &str) -> Result<(), Error> {
    if text.len() <= MAX_RUN_BYTES {
        return Ok(());
    }
    match segments::longest_run(text) {
        run if run > MAX_RUN_BYTES => {
            let message = format!(
                "has a run of {run} bytes without a break, such as white space or letters only; the limit is \
                 {MAX_RUN_BYTES}"
            );
            Err(Error::invalid("prompt", message))
        }
        _ => Ok(()),
    }
}

/// True if a decoder concatenates the tokens' bytes.
fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        // Written by some checkpoints for one decoder.
        DecoderWrapper::Sequence(parts) => match parts.get_decoders() {
            [only] => is_byte_level(only),
            _ => false,
        },
        _ => false,
    }
}

/// The byte of a byte-fallback token such as `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Converts a token from the byte-level alphabet into bytes. If a token has a character outside of the alphabet, the
/// result is the token's UTF-8, as in the decoder.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte of a character in GPT-2's byte-level alphabet: printable Latin-1 characters stand for themselves, and the
/// characters from U+0100 on stand for the 68 other bytes in order.
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
mod tests;
