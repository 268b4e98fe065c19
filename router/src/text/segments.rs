//! Cuts a long text into segments that can be encoded one by one, with the same token ids as the whole text.
//!
//! A cut is safe if the pre-tokenizer always ends a piece there, whether or not the text on the other side is present.
//! The regular expressions of GPT-2 and its successors have no look-behind. They look ahead by one character, and only
//! at the end of white space. For these expressions, two kinds of cuts are safe:
//!
//! - before a space between two ASCII letters, as in `one| two`: a piece of letters ends there, and the next piece is
//!   the space with the letters after it;
//! - after a newline between a visible ASCII character and an ASCII letter, as in `one\n|two`: the newline ends its
//!   piece, because no expression joins a newline to a letter after it.
//!
//! Unicode's composition (NFC) changes no text across such a cut, since both sides are ASCII characters that do not
//! compose with each other.

use tokenizers::{
    NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer,
    pre_tokenizers::split::SplitPattern,
};

/// The expressions for which the cuts are known to be safe, in the spelling of published `tokenizer.json` files.
const KNOWN: [&str; 6] = [
    // GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // GPT-4 (cl100k), in two spellings.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    // Qwen 2, 2.5 and 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // GPT-4o (o200k).
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // DeepSeek V3's last expression, and Qwen 3.5.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// True if texts for this tokenizer may be cut.
pub fn allowed(tokenizer: &Tokenizer) -> bool {
    let normalizer = matches!(tokenizer.get_normalizer(), None | Some(NormalizerWrapper::NFC(_)));
    // Added tokens are found in a text first. None of them may contain a space or a newline, where a cut could be, or
    // absorb the white space beside it.
    let mut added = tokenizer.get_added_vocabulary().get_added_tokens_decoder().values();
    let tokens = added.all(|token| !token.lstrip && !token.rstrip && !token.content.contains([' ', '\n']));
    normalizer && tokens && tokenizer.get_pre_tokenizer().is_some_and(cuts)
}

fn cuts(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(level) => !level.add_prefix_space && level.use_regex,
        PreTokenizerWrapper::Sequence(parts) => match parts.as_ref() {
            [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(level)] => {
                let known =
                    matches!(&split.pattern, SplitPattern::Regex(regex) if KNOWN.contains(&regex.as_str()));
                let isolated = split.behavior == SplitDelimiterBehavior::Isolated && !split.invert;
                known && isolated && !level.add_prefix_space && !level.use_regex
            }
            _ => false,
        },
        _ => false,
    }
}

/// Cuts a text into segments. Each cut is at the first safe place that leaves at least `bytes` bytes in the segment.
/// The concatenated segments are the text.
pub fn cut(text: &str, bytes: usize) -> Vec<&str> {
    let mut segments = Vec::with_capacity(text.len() / bytes.max(1) + 1);
    let mut rest = text;
    while rest.len() > bytes {
        let Some(at) = (bytes.max(2)..rest.len()).find(|&at| safe(rest.as_bytes(), at)) else { break };
        // A safe place has an ASCII character on both sides, so it is a character boundary.
        let (segment, after) = rest.split_at(at);
        segments.push(segment);
        rest = after;
    }
    segments.push(rest);
    segments
}

/// True if a text may be cut before the byte `at`, which is at least 2.
fn safe(text: &[u8], at: usize) -> bool {
    let [before, last, next] = [text[at - 2], text[at - 1], text[at]];
    let after_newline = last == b'\n' && before.is_ascii_graphic() && next.is_ascii_alphabetic();
    let before_space = next == b' ' && last.is_ascii_alphabetic();
    after_newline || (before_space && text.get(at + 1).is_some_and(u8::is_ascii_alphabetic))
}

/// Length in bytes of the longest run of characters of one class: white space, letters, digits, or all other
/// characters. A pre-tokenizer of GPT-2's kind may turn such a run into one piece.
pub fn longest_run(text: &str) -> usize {
    let class = |c: char| match c {
        c if c.is_whitespace() => 0,
        c if c.is_alphabetic() => 1,
        c if c.is_numeric() => 2,
        _ => 3,
    };
    let (mut longest, mut length, mut current) = (0, 0, 4);
    for c in text.chars() {
        let class = class(c);
        length = if class == current { length + c.len_utf8() } else { c.len_utf8() };
        current = class;
        longest = longest.max(length);
    }
    longest
}

#[cfg(test)]
mod tests;
