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
fn what_follows_a_flush_is_matched_from_its_start() {
    let mut matcher = matcher(&["abcdefgh", "X"]);
    matcher.pass("abcdef");
    assert_eq!(matcher.flush(), "abcdef");
    assert_eq!(matcher.push("X"), Progress::Matched { before: String::new(), stop: 1 });
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

#[test]
fn a_match_may_begin_but_not_end_in_passed_text() {
    let mut stop = matcher(&["END", "aa"]);
    assert_eq!(stop.pass("x END E"), "x END ");
    assert_eq!(stop.push("ND y"), Progress::Matched { before: String::new(), stop: 0 });
    let mut stop = matcher(&["aa"]);
    assert_eq!((stop.pass("aa"), stop.pass("a")), ("a".into(), "a".into()));
    assert_eq!(stop.push("a"), Progress::Matched { before: String::new(), stop: 0 });
    let mut stop = matcher(&["éb"]);
    assert_eq!((stop.pass("aé"), stop.push("c")), ("a".into(), Progress::Text("éc".into())));
    assert_eq!((stop.pass("é"), stop.flush()), (String::new(), "é".into()));
}

/// The expected result, computed naively: the text so far is searched after each character.
fn oracle(stops: &[String], text: &str) -> (String, Option<usize>) {
    for (at, c) in text.char_indices() {
        let end = at + c.len_utf8();
        let ending = |(_, stop): &(usize, &String)| text[..end].ends_with(stop.as_str());
        let found = stops.iter().enumerate().filter(ending).max_by_key(|(i, s)| (s.len(), usize::MAX - i));
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
