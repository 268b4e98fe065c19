//! The text that a parser holds: what has arrived and is not consumed, or may have to be given back.

use std::collections::VecDeque;

use super::markers::Markers;
use crate::limits::MAX_BLANK;

/// Text that waits, with the positions of tokens that are markers.
#[derive(Default)]
pub(super) struct Buffer {
    text: String,
    /// Offset up to which the text is consumed.
    at: usize,
    /// Offset from which text is kept although it is consumed.
    anchor: Option<usize>,
    /// Offset of the marker that was consumed last.
    marker: usize,
    /// Offset and id of each token that is a marker and not consumed.
    tokens: VecDeque<(usize, u32)>,
    /// Number of pieces that have arrived.
    pub arrived: u64,
    /// Number of bytes looked at. Tests show by it that the time is linear.
    pub examined: u64,
}

/// Result of a search. Numbers are offsets in the text.
pub(super) enum Search {
    /// The first marker of the set.
    Found { marker: usize, start: usize, end: usize },
    /// No marker. The text from `from` on may be the beginning of one.
    None { from: usize },
}

/// Whether a marker stands at a position.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Match {
    /// The marker of this position in the set ends at `end`.
    Whole {
        marker: usize,
        end: usize,
    },
    /// The text ends before it is decided.
    Undecided,
    No,
}

impl Buffer {
    /// Appends text. Consumed text is removed first.
    pub fn push(&mut self, text: &str) {
        let base = self.base();
        if base > 0 {
            self.text.drain(..base);
            self.at -= base;
            self.marker = self.marker.saturating_sub(base);
            self.anchor = self.anchor.map(|anchor| anchor - base);
            self.tokens.iter_mut().for_each(|(offset, _)| *offset -= base);
        }
        self.text.push_str(text);
        self.arrived += 1;
    }

    /// Appends a token that is a marker.
    pub fn push_token(&mut self, id: u32, text: &str) {
        self.push("");
        self.tokens.push_back((self.text.len(), id));
        self.text.push_str(text);
    }

    /// Number of bytes that the next piece leaves here.
    pub fn kept(&self) -> usize {
        self.text.len() - self.base()
    }

    /// Offset of the first byte that is needed.
    fn base(&self) -> usize {
        self.anchor.unwrap_or(self.at).min(self.at)
    }

    /// The text that is not consumed.
    pub fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    /// The text from the present position to an offset.
    pub fn up_to(&self, offset: usize) -> &str {
        &self.text[self.at..offset]
    }

    /// Offset of the present position.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Offset of the end of the text.
    pub fn end(&self) -> usize {
        self.text.len()
    }

    /// Moves on to an offset.
    pub fn consume_to(&mut self, offset: usize) {
        self.at = offset;
        while self.tokens.front().is_some_and(|&(start, _)| start < offset) {
            self.tokens.pop_front();
        }
    }

    /// Moves on by some bytes.
    pub fn consume(&mut self, bytes: usize) {
        self.examined += bytes as u64;
        self.consume_to(self.at + bytes);
    }

    /// Moves on behind a marker.
    pub fn consume_marker(&mut self, start: usize, end: usize) {
        self.consume_to(end);
        self.marker = start;
    }

    /// Keeps the text from the last marker on.
    pub fn anchor(&mut self) {
        self.anchor = Some(self.marker);
    }

    /// Keeps the text from the present position on.
    pub fn anchor_here(&mut self) {
        self.anchor = Some(self.at);
    }

    /// Keeps consumed text no longer, and returns what was kept.
    pub fn release(&mut self) -> &str {
        self.anchor.take().map_or("", |anchor| &self.text[anchor..self.at])
    }

    /// The text up to the next token that is a marker; with the token's text if it stands first.
    pub fn segment(&self) -> Segment<'_> {
        let first_is_token = self.tokens.front().is_some_and(|&(start, _)| start == self.at);
        let next = self.tokens.get(usize::from(first_is_token)).map_or(self.text.len(), |&(start, _)| start);
        Segment { text: self.up_to(next), first_is_token }
    }

    /// Looks for the first marker of a set from the present position on.
    pub fn search(&mut self, markers: &Markers) -> Search {
        self.search_to(self.text.len(), markers)
    }

    /// Looks for the first marker of a set that has at most `bytes` bytes before it, and not further.
    pub fn search_near(&mut self, bytes: usize, markers: &Markers) -> Search {
        // The search reaches one character beyond the bound, which shows that a text is too long.
        let last = self.at + self.rest().floor_char_boundary(bytes);
        let to = self.text.len().min(last + self.text[last..].chars().next().map_or(0, char::len_utf8));
        self.search_to(to, markers)
    }

    /// Looks for the first marker of a set that begins before the offset `to`.
    fn search_to(&mut self, to: usize, markers: &Markers) -> Search {
        let bytes = self.text.as_bytes();
        let from = self.at;
        let starts = (from..to).filter(|&start| markers.firsts[usize::from(bytes[start])]);
        for start in starts {
            match self.match_at(start, markers) {
                Match::Whole { marker, end } => {
                    self.examined += (end - from) as u64;
                    return Search::Found { marker, start, end };
                }
                Match::Undecided => {
                    self.examined += (to - from) as u64;
                    return Search::None { from: start };
                }
                Match::No => {}
            }
        }
        self.examined += (to - from) as u64;
        Search::None { from: to }
    }

    /// Compares the text at the present position with the markers of a set.
    pub fn match_here(&mut self, markers: &Markers) -> Match {
        self.examined += 1;
        self.match_at(self.at, markers)
    }

    /// Compares the text behind an offset and behind white space with the markers of a set.
    pub fn match_behind(&mut self, offset: usize, markers: &Markers) -> Match {
        let rest = &self.text[offset..];
        let blank = rest.len() - rest.trim_ascii_start().len();
        self.examined += blank as u64;
        if blank > MAX_BLANK { Match::No } else { self.match_at(offset + blank, markers) }
    }

    fn match_at(&self, start: usize, markers: &Markers) -> Match {
        let rest = &self.text.as_bytes()[start..];
        let mut undecided = rest.is_empty();
        for (position, marker) in markers.markers.iter().enumerate() {
            let text = marker.text.as_bytes();
            match marker.id {
                Some(id) => {
                    if self.tokens.binary_search(&(start, id)).is_ok() {
                        return Match::Whole { marker: position, end: start + text.len() };
                    }
                }
                None if rest.starts_with(text) => {
                    return Match::Whole { marker: position, end: start + text.len() };
                }
                None => undecided |= text.starts_with(rest),
            }
        }
        if undecided { Match::Undecided } else { Match::No }
    }
}

/// See [`Buffer::segment`].
pub(super) struct Segment<'a> {
    pub text: &'a str,
    pub first_is_token: bool,
}
