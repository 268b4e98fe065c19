//! Finds stop strings in a stream of text. A match may extend over several pieces of the stream. No character of a
//! match is released.

use std::sync::Arc;

/// Looks for stop strings in text that arrives in pieces.
///
/// The result does not depend on how the text is cut into pieces. The match that ends first wins. If several matches
/// end at the same character, the longest wins.
pub struct StopMatcher {
    stops: Arc<[String]>,
    /// Text held back because it is a proper prefix of a stop string.
    held: String,
    /// Offset in `held` up to which no match may end.
    passed: usize,
}

/// Result of one piece of text.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// No stop string was found. The text can no longer be part of a stop string, and is released.
    Text(String),
    /// A stop string was found.
    Matched {
        /// The text before the stop string, apart from text released earlier.
        before: String,
        /// Index of the stop string.
        stop: usize,
    },
}

impl StopMatcher {
    /// Creates a matcher for these strings. None of them may be empty.
    pub fn new(stops: Arc<[String]>) -> Self {
        Self { stops, held: String::new(), passed: 0 }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Progress {
        if self.stops.is_empty() {
            return Progress::Text(piece.to_owned());
        }
        self.held.push_str(piece);
        if let Some((start, stop)) = self.first_match() {
            let mut before = std::mem::take(&mut self.held);
            before.truncate(start);
            return Progress::Matched { before, stop };
        }
        Progress::Text(self.release())
    }

    /// Takes the next piece of text, in which a stop string may begin but not end. Returns the released text.
    pub fn pass(&mut self, piece: &str) -> String {
        if self.stops.is_empty() {
            return piece.to_owned();
        }
        self.held.push_str(piece);
        self.passed = self.held.len();
        self.release()
    }

    /// Releases the text that can no longer be part of a stop string.
    fn release(&mut self) -> String {
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        let released = std::mem::replace(&mut self.held, rest);
        self.passed = self.passed.saturating_sub(released.len());
        released
    }

    /// Releases the text held back. What follows is matched on its own.
    pub fn flush(&mut self) -> String {
        self.passed = 0;
        std::mem::take(&mut self.held)
    }

    /// Byte offset of the winning match in `held`, and the index of its stop string.
    fn first_match(&self) -> Option<(usize, usize)> {
        let matches = self.stops.iter().enumerate();
        matches
            .filter_map(|(i, stop)| {
                let from = (self.passed + 1).saturating_sub(stop.len());
                let from = self.held.ceil_char_boundary(from);
                let start = from + self.held.get(from..)?.find(stop.as_str())?;
                Some((start + stop.len(), start, i))
            })
            .min()
            .map(|(_, start, i)| (start, i))
    }
}

/// Length in bytes of the longest proper prefix of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(at, _)| at).rev().find(|&at| text.ends_with(&stop[..at])).unwrap_or(0)
}

#[cfg(test)]
mod tests;
