//! Stop strings in a stream of text: found across the borders of its pieces, and never shown even in part.

use std::sync::Arc;

/// Looks for stop strings in text that arrives in pieces. The result does not depend on how it is cut into pieces:
/// the match that is complete first wins, and of those that end together the one that began first.
pub struct StopMatcher {
    stops: Arc<[String]>,
    /// Text not yet let through: a proper beginning of some stop string.
    held: String,
}

/// What a piece of text brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Text that no stop string can reach any more.
    Text(String),
    /// A stop string was found.
    Matched {
        /// The text before it.
        before: String,
        /// Which of the stop strings.
        stop: usize,
    },
}

impl StopMatcher {
    /// A matcher for these strings, none of them empty.
    pub fn new(stops: Arc<[String]>) -> Self {
        Self { stops, held: String::new() }
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
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Progress::Text(std::mem::replace(&mut self.held, rest))
    }

    /// The text held back, at the end of the stream.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the winning match starts, and which stop string it is.
    fn first_match(&self) -> Option<(usize, usize)> {
        let matches = self.stops.iter().enumerate();
        matches
            .filter_map(|(i, stop)| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, i)))
            .min()
            .map(|(_, start, i)| (start, i))
    }
}

/// Length of the longest proper beginning of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(at, _)| at).rev().find(|&at| text.ends_with(&stop[..at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect())
    }

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = matcher(stops);
        let mut out = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                Progress::Text(text) => out.push_str(&text),
                Progress::Matched { before, stop } => return (out + &before, Some(stop)),
            }
        }
        (out + &matcher.flush(), None)
    }

    #[test]
    fn a_stop_across_pieces_is_cut_out() {
        assert_eq!(run(&["STOP"], &["go S", "T", "OP on"]), ("go ".into(), Some(0)));
    }

    #[test]
    fn only_what_may_become_a_stop_is_held_back() {
        let mut matcher = matcher(&["\n\n", "END"]);
        assert_eq!(matcher.push("a\n"), Progress::Text("a".into()));
        assert_eq!(matcher.push("bEN"), Progress::Text("\nb".into()));
        assert_eq!(matcher.flush(), "EN");
    }

    #[test]
    fn the_first_complete_match_wins_and_the_longest_of_a_tie() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), ("xa".into(), Some(1)));
        assert_eq!(run(&["c", "abc"], &["xabc"]), ("x".into(), Some(1)));
    }

    #[test]
    fn a_failed_match_keeps_a_later_beginning() {
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), Some(0)));
    }

    /// What the matcher must agree with: the text one character at a time, searched whole after each.
    fn oracle(stops: &[String], text: &str) -> (String, Option<usize>) {
        for (at, c) in text.char_indices() {
            let end = at + c.len_utf8();
            let ending = |(_, stop): &(usize, &String)| text[..end].ends_with(stop.as_str());
            let found =
                stops.iter().enumerate().filter(ending).max_by_key(|(i, s)| (s.len(), usize::MAX - i));
            if let Some((i, stop)) = found {
                return (text[..end - stop.len()].to_owned(), Some(i));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn pieces_never_matter(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,4}", 1..4),
            cuts in prop::collection::vec(0usize..24, 0..6),
        ) {
            let mut borders: Vec<usize> =
                cuts.into_iter().filter(|&c| c <= text.len() && text.is_char_boundary(c)).collect();
            borders.extend([0, text.len()]);
            borders.sort_unstable();
            let pieces: Vec<&str> = borders.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let by_name: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&by_name, &pieces), oracle(&stops, &text));
        }
    }
}
