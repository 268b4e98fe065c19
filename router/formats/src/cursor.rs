//! The reader of formats: an output that is read like a whole text, although it arrives in pieces.
//!
//! A format is an `async` function that reads through a [`Cursor`]. Where a synchronous reader would need a byte that
//! has not arrived, the function is suspended, and it goes on with the next piece. So each format reads like the
//! grammar that it is, keeps its state in its local variables, and never looks at a consumed byte again. Nothing here
//! needs a runtime: [`Parser`](crate::Parser) polls the function once per piece.

mod buffer;
mod calls;
mod markers;

use std::{collections::HashMap, future::poll_fn, sync::Arc, task::Poll};

use parking_lot::Mutex;

use self::buffer::{Buffer, Match, Search};
pub use self::markers::Vocabulary;
pub(crate) use self::markers::{Lexicon, Markers};
use crate::{
    json::{Extent, JsonValue},
    limits::{MAX_BLANK, MAX_HELD, MAX_NAME},
    output::Output,
};

/// Why a format stops reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    /// The text does not follow the format.
    Malformed,
    /// The output ends.
    End,
}

/// An output as it is read. Clones share one position.
#[derive(Clone)]
pub(crate) struct Cursor {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    buffer: Buffer,
    output: Output,
    tokens: HashMap<u32, String>,
    ended: bool,
}

/// How the value of a parameter stands between its tags.
pub(crate) struct ValueEnd<'a> {
    pub close: &'a Markers,
    /// Markers that may follow the closing tag. A closing tag before anything else is text of the value.
    pub followers: &'a Markers,
    /// True if the value stands on lines of its own: one newline on each side is the format's.
    pub framed: bool,
}

impl Cursor {
    pub fn new(output: Output) -> Self {
        let shared = Shared { buffer: Buffer::default(), output, tokens: HashMap::new(), ended: false };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Shared) -> T) -> T {
        work(&mut self.shared.lock())
    }

    /// Works on the output alone.
    pub fn output<T>(&self, work: impl FnOnce(&mut Output) -> T) -> T {
        self.with(|shared| work(&mut shared.output))
    }

    // The parser's end.

    /// Says which tokens are markers.
    pub fn watch(&self, tokens: HashMap<u32, String>) {
        self.with(|shared| shared.tokens = tokens);
    }

    pub fn is_marker(&self, token: u32) -> bool {
        self.with(|shared| shared.tokens.contains_key(&token))
    }

    /// Adds a token and the text that it released.
    pub fn push(&self, token: u32, text: &str) {
        self.with(|shared| {
            let Some(marker) = shared.tokens.get(&token) else {
                return shared.buffer.push(text);
            };
            // The token's text may be left out of the piece, and the end of a broken character may stand before it.
            let (before, behind) = text.rsplit_once(marker.as_str()).unwrap_or((text, ""));
            shared.buffer.push(before);
            shared.buffer.push_token(token, marker);
            shared.buffer.push(behind);
        });
    }

    /// Adds text without a token.
    pub fn push_text(&self, text: &str) {
        self.with(|shared| shared.buffer.push(text));
    }

    /// Says that nothing follows.
    pub fn end(&self) {
        self.with(|shared| shared.ended = true);
    }

    /// Number of bytes that were looked at.
    pub fn examined(&self) -> u64 {
        self.with(|shared| shared.buffer.examined)
    }

    /// Number of bytes that are not consumed, or may be given back.
    pub fn kept(&self) -> usize {
        self.with(|shared| shared.buffer.kept())
    }

    // The reader's end.

    /// Waits for another piece. `Err` at the end of the output.
    async fn more(&self) -> Result<(), Break> {
        let seen = self.with(|shared| shared.buffer.arrived);
        poll_fn(|_| {
            self.with(|shared| match shared.buffer.arrived != seen {
                true => Poll::Ready(Ok(())),
                false if shared.ended => Poll::Ready(Err(Break::End)),
                false => Poll::Pending,
            })
        })
        .await
    }

    /// The next character.
    pub async fn peek(&self) -> Result<char, Break> {
        loop {
            if let Some(next) = self.with(|shared| shared.buffer.rest().chars().next()) {
                return Ok(next);
            }
            self.more().await?;
        }
    }

    /// Takes the next character.
    pub async fn next(&self) -> Result<char, Break> {
        let next = self.peek().await?;
        self.with(|shared| shared.buffer.consume(next.len_utf8()));
        Ok(next)
    }

    /// Takes the next character if it is this one.
    pub async fn next_is(&self, expected: char) -> Result<bool, Break> {
        let found = self.peek().await? == expected;
        if found {
            self.next().await?;
        }
        Ok(found)
    }

    /// Takes this character. Any other breaks the call.
    pub async fn expect(&self, expected: char) -> Result<(), Break> {
        if self.next_is(expected).await? { Ok(()) } else { Err(Break::Malformed) }
    }

    /// Takes white space inside a call.
    pub async fn skip_blank(&self) -> Result<(), Break> {
        let mut skipped = 0;
        while self.peek().await?.is_ascii_whitespace() {
            self.next().await?;
            skipped += 1;
            if skipped > MAX_BLANK {
                return Err(Break::Malformed);
            }
        }
        Ok(())
    }

    /// Passes white space outside calls on.
    pub async fn pass_blank(&self) -> Result<(), Break> {
        loop {
            self.with(|Shared { buffer, output, .. }| {
                let rest = buffer.rest();
                let blank = rest.len() - rest.trim_start().len();
                output.text(&rest[..blank]);
                buffer.consume(blank);
            });
            if self.with(|shared| !shared.buffer.rest().is_empty()) {
                return Ok(());
            }
            self.more().await?;
        }
    }

    /// Takes a marker of the set, if one stands here, and returns its position in the set.
    pub async fn next_marker(&self, markers: &Markers) -> Option<usize> {
        loop {
            let found = self.with(|Shared { buffer, .. }| {
                let found = buffer.match_here(markers);
                if let Match::Whole { end, .. } = found {
                    buffer.consume_marker(buffer.position(), end);
                }
                found
            });
            match found {
                Match::Whole { marker, .. } => return Some(marker),
                Match::No => return None,
                Match::Undecided => self.more().await.ok()?,
            }
        }
    }

    /// Takes the text up to the first marker of the set, and the marker. The text is passed on as it arrives, except
    /// for the longest end of it that may be the beginning of a marker.
    pub async fn stream_until(
        &self,
        markers: &Markers,
        mut take: impl FnMut(&mut Output, &str),
    ) -> Result<usize, Break> {
        loop {
            let found = self.with(|Shared { buffer, output, .. }| match buffer.search(markers) {
                Search::Found { marker, start, end } => {
                    take(output, buffer.up_to(start));
                    buffer.consume_marker(start, end);
                    Some(marker)
                }
                Search::None { from } => {
                    take(output, buffer.up_to(from));
                    buffer.consume_to(from);
                    None
                }
            });
            if let Some(marker) = found {
                return Ok(marker);
            }
            if let Err(end) = self.more().await {
                self.with(|Shared { buffer, output, .. }| {
                    take(output, buffer.rest());
                    buffer.consume_to(buffer.end());
                });
                return Err(end);
            }
        }
    }

    /// Takes a short text up to the first marker of the set, and the marker.
    pub async fn word_until(&self, markers: &Markers) -> Result<(String, usize), Break> {
        let word = self.word_before(markers).await?;
        let marker = self.next_marker(markers).await.ok_or(Break::Malformed)?;
        Ok((word, marker))
    }

    /// Takes a short text up to the first marker of the set, and leaves the marker.
    pub async fn word_before(&self, markers: &Markers) -> Result<String, Break> {
        let mut word = String::new();
        loop {
            let is_whole = self.with(|Shared { buffer, .. }| {
                let most = MAX_NAME - word.len();
                let found = buffer.search_near(most, markers);
                let (Search::Found { start: to, .. } | Search::None { from: to }) = found;
                // Too long a word breaks at the same byte however the output is divided.
                let text = buffer.up_to(to);
                let taken = text.floor_char_boundary(most);
                let is_long = taken < text.len();
                word.push_str(&text[..taken]);
                buffer.consume_to(buffer.position() + taken);
                if is_long { Err(Break::Malformed) } else { Ok(matches!(found, Search::Found { .. })) }
            });
            match is_whole? {
                true => return Ok(word),
                false => self.more().await?,
            }
        }
    }

    /// Takes the value of a parameter and its closing tag. The value is passed on as it arrives.
    pub async fn value(
        &self,
        end: ValueEnd<'_>,
        mut take: impl FnMut(&mut Output, &str),
    ) -> Result<(), Break> {
        if end.framed {
            self.next_is('\n').await?;
        }
        loop {
            let step = self.with(|Shared { buffer, output, .. }| {
                let found = buffer.search(end.close);
                let (Search::Found { start: to, .. } | Search::None { from: to }) = found;
                // The newline before a closing tag is the format's, and waits for it.
                let newline = usize::from(end.framed && buffer.up_to(to).ends_with('\n'));
                take(output, buffer.up_to(to - newline));
                buffer.consume_to(to - newline);
                let Search::Found { end: closed, .. } = found else { return Match::Undecided };
                let behind = buffer.match_behind(closed, end.followers);
                match behind {
                    Match::Whole { .. } => buffer.consume_to(closed),
                    Match::No => {
                        take(output, buffer.up_to(closed));
                        buffer.consume_to(closed);
                    }
                    Match::Undecided => {}
                }
                behind
            });
            match step {
                Match::Whole { .. } => return Ok(()),
                Match::No => {}
                Match::Undecided => {
                    if let Err(ended) = self.more().await {
                        return self.end_of_value(end.close, take).ok_or(ended);
                    }
                }
            }
        }
    }

    /// Takes the rest of a value where the output ends. `None` if the value has no closing tag.
    fn end_of_value(&self, close: &Markers, mut take: impl FnMut(&mut Output, &str)) -> Option<()> {
        self.with(|Shared { buffer, output, .. }| {
            let found = buffer.search(close);
            if !matches!(found, Search::Found { .. }) {
                take(output, buffer.rest());
            }
            buffer.consume_to(buffer.end());
            matches!(found, Search::Found { .. }).then_some(())
        })
    }

    /// Takes one JSON value. It is passed on as it arrives.
    pub async fn json(&self, mut take: impl FnMut(&mut Output, &str)) -> Result<(), Break> {
        self.json_while(|output, part| {
            take(output, part);
            true
        })
        .await
    }

    /// Takes one JSON value of a bounded length. A longer one breaks its call.
    pub async fn held_json(&self) -> Result<String, Break> {
        let mut held = String::new();
        let read = self.json_while(|_, part| {
            held.push_str(part);
            held.len() <= MAX_HELD
        });
        read.await?;
        Ok(held)
    }

    /// Takes one JSON value, as long as `take` takes its parts.
    async fn json_while(&self, mut take: impl FnMut(&mut Output, &str) -> bool) -> Result<(), Break> {
        let mut value = JsonValue::default();
        loop {
            let extent = self.with(|Shared { buffer, output, .. }| {
                let segment = buffer.segment();
                if segment.first_is_token && !value.in_string() {
                    return Extent::Broken(0);
                }
                let extent = value.feed(segment.text);
                let taken = match extent {
                    Extent::Whole(taken) | Extent::Broken(taken) => taken,
                    Extent::Open => segment.text.len(),
                };
                let goes_on = take(output, &segment.text[..taken]);
                buffer.consume(taken);
                if goes_on { extent } else { Extent::Broken(taken) }
            });
            match extent {
                Extent::Whole(_) => return Ok(()),
                Extent::Broken(_) => return Err(Break::Malformed),
                Extent::Open if self.with(|shared| shared.buffer.rest().is_empty()) => self.more().await?,
                Extent::Open => {}
            }
        }
    }
}
