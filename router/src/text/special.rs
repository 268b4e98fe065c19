//! Searches texts of clients for special tokens, and for parts of special tokens that the text around could complete.

use std::{cmp::Ordering, ops::Range};

use aho_corasick::AhoCorasick;
use tutti_runtime::Error;

/// The texts of a tokenizer's special tokens.
pub struct SpecialTexts {
    /// Finds whole tokens.
    whole: AhoCorasick,
    /// Sorted.
    texts: Vec<String>,
    /// Every proper suffix of every text, as index and byte offset, sorted by suffix.
    suffixes: Vec<(usize, usize)>,
    /// Length of the longest text in bytes.
    longest: usize,
}

/// Fragments of special tokens that are found besides whole ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragments {
    /// Every part that the text around could complete: the start of a token at the text's end, the end of a token at
    /// the text's start, and a text that is inside a token, such as `user` in `<|user|>`.
    All,
    /// Every part as in `All` that has a character other than letters and digits, so that words alone are no parts.
    WithoutWords,
}

impl SpecialTexts {
    /// The texts of special tokens. An empty text is left out, because it is found nowhere.
    pub fn new(mut texts: Vec<String>) -> Result<Self, Error> {
        texts.retain(|text| !text.is_empty());
        texts.sort_unstable();
        texts.dedup();
        let whole = AhoCorasick::new(&texts)
            .map_err(|e| Error::invalid("tokenizer", format!("tokenizer.json: its special tokens: {e}")))?;
        let mut suffixes: Vec<(usize, usize)> = Vec::new();
        for (index, text) in texts.iter().enumerate() {
            suffixes.extend(text.char_indices().skip(1).map(|(offset, _)| (index, offset)));
        }
        suffixes.sort_unstable_by_key(|&(index, offset)| &texts[index][offset..]);
        let longest = texts.iter().map(String::len).max().unwrap_or(0);
        Ok(Self { whole, texts, suffixes, longest })
    }

    /// Finds the ranges of a text that are special tokens, or parts of some. Ranges may overlap.
    pub fn find(&self, text: &str, parts: Fragments) -> Vec<Range<usize>> {
        let mut found: Vec<_> = self.whole.find_overlapping_iter(text).map(|found| found.range()).collect();
        let is_part = |part: &str| parts == Fragments::All || part.chars().any(|c| !c.is_alphanumeric());
        if !text.is_empty() && text.len() < self.longest && self.is_inside(text) && is_part(text) {
            found.push(0..text.len());
        }
        let ends = |at: &usize| text.is_char_boundary(*at);
        let most = text.len().min(self.longest.saturating_sub(1));
        let starts_token = |at: &usize| self.starts_some(&text[*at..]) && is_part(&text[*at..]);
        let first = text.len() - most;
        found.extend((first..text.len()).filter(ends).filter(starts_token).map(|at| at..text.len()));
        let ends_token = |at: &usize| self.ends_some(&text[..*at]) && is_part(&text[..*at]);
        found.extend((1..=most).filter(ends).filter(ends_token).map(|at| 0..at));
        found
    }

    /// True if some token starts with `part`.
    fn starts_some(&self, part: &str) -> bool {
        let at = self.texts.partition_point(|text| text.as_str() < part);
        self.texts.get(at).is_some_and(|text| text.starts_with(part))
    }

    /// True if `part` is a proper suffix of some token.
    fn ends_some(&self, part: &str) -> bool {
        self.suffixes.binary_search_by(|suffix| self.suffix(suffix).cmp(part)).is_ok()
    }

    /// True if `part` is inside some token, behind its first character.
    fn is_inside(&self, part: &str) -> bool {
        let at = self.suffixes.partition_point(|suffix| self.suffix(suffix).cmp(part) == Ordering::Less);
        self.suffixes.get(at).is_some_and(|suffix| self.suffix(suffix).starts_with(part))
    }

    fn suffix(&self, &(index, offset): &(usize, usize)) -> &str {
        &self.texts[index][offset..]
    }
}

#[cfg(test)]
mod tests;
