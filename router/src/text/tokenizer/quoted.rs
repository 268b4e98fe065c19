//! Encodes texts in which some special tokens are quoted ([`quoting`](super::super::quoting)).
//!
//! The steps are those of the library: added tokens are taken out of the text, the rest is normalised, cut into pieces
//! and encoded by the model. Between the first two steps, the stand-ins become the characters for which they stand. So
//! quoted special tokens are encoded as with `split_special_tokens` of Hugging Face's transformers, and everything else
//! as without.

use std::collections::HashSet;

use tokenizers::{
    Encoding, Model, NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType,
    PreTokenizer, Result, Token,
};

use super::Tokenizer;
use crate::text::{
    quoting::{Quotes, quoted_char},
    special::Fragments,
};

/// The tokenizer's normalizer, behind the removal of quotes.
struct Unquote<'a> {
    quotes: &'a Quotes,
    then: Option<&'a NormalizerWrapper>,
}

impl Normalizer for Unquote<'_> {
    fn normalize(&self, text: &mut NormalizedString) -> Result<()> {
        unquote(text, self.quotes);
        self.then.map_or(Ok(()), |normalizer| normalizer.normalize(text))
    }
}

fn unquote(text: &mut NormalizedString, quotes: &Quotes) {
    text.map(|c| quotes.original(c));
}

impl Tokenizer {
    /// Private characters of Unicode in added tokens.
    pub fn private_chars(&self) -> &HashSet<char> {
        &self.private_chars
    }

    /// Finds the special tokens in a text, and parts of them that the text around could complete. Returns the offset of
    /// one character of each, without which it is no special token.
    pub fn find_special(&self, text: &str, parts: Fragments) -> Vec<usize> {
        let mut found = self.special_texts.find(text, parts);
        if self.finds_in_normalised {
            let added = self.inner.get_added_vocabulary();
            let pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
            let is_special = |tokens: &Option<Vec<Token>>| {
                tokens.iter().flatten().any(|token| self.special.contains(&token.id))
            };
            let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
            found.extend(
                pieces.into_iter().filter(|piece| is_special(piece.2)).map(|piece| piece.1.0..piece.1.1),
            );
        }
        found.into_iter().map(|range| range.start + quoted_char(&text[range])).collect()
    }

    /// Encodes a text, without the special tokens of the post-processor.
    pub(super) fn encode_quoted(&self, text: &str, quotes: &Quotes) -> Result<Encoding> {
        let (added, normalizer) = (self.inner.get_added_vocabulary(), self.inner.get_normalizer());
        let mut pieces = if self.finds_in_normalised {
            // The quotes must last until the special tokens of the normalised text are found.
            let mut pieces = added.extract_and_normalize(normalizer, text);
            pieces.normalize(|piece| {
                unquote(piece, quotes);
                Ok(())
            })?;
            pieces
        } else {
            added.extract_and_normalize(Some(&Unquote { quotes, then: normalizer }), text)
        };
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.encode_piece(piece.get()))?;
        pieces.into_encoding(None, 0, OffsetType::None)
    }

    /// Encodes a piece by the model. Some models have special tokens in their own vocabulary, and would find them in a
    /// text: Unigram does, and models of whole words. Such a text is cut behind the first character of the token.
    fn encode_piece(&self, piece: &str) -> Result<Vec<Token>> {
        let (mut tokens, mut rest) = (Vec::new(), vec![piece]);
        while let Some(text) = rest.pop() {
            let encoded = self.inner.get_model().tokenize(text)?;
            let cuts = encoded.iter().filter_map(|token| self.cut_in(token, text));
            let cuts: Vec<usize> = cuts.collect();
            if cuts.is_empty() {
                tokens.extend(encoded);
                continue;
            }
            let (mut parts, mut left, mut from) = (Vec::with_capacity(cuts.len() + 1), text, 0);
            for cut in cuts {
                let (part, after) = left.split_at(cut - from);
                parts.push(part);
                (left, from) = (after, cut);
            }
            parts.push(left);
            rest.extend(parts.into_iter().rev());
        }
        Ok(tokens)
    }

    /// The offset behind the first character of a special token that is spelt out in a text. None for other tokens, and
    /// for a token of one character, which has no place for a cut.
    fn cut_in(&self, token: &Token, text: &str) -> Option<usize> {
        let spelt = text.get(token.offsets.0..token.offsets.1)?;
        let is_special = self.special.contains(&token.id) && self.inner.id_to_token(token.id)? == spelt;
        let first = spelt.chars().next().filter(|first| is_special && first.len_utf8() < spelt.len())?;
        Some(token.offsets.0 + first.len_utf8())
    }
}

#[cfg(test)]
mod tests;
