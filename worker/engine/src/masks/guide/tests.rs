use tutti_constraints::{Environment, Kind, Progress};

use super::*;
use crate::masks::testing::{self, END};

fn guided<'a>(pattern: Option<&str>, thinking: Option<&'a pb::Thinking>) -> Guided<'a> {
    let constraint = pattern.map(|pattern| Constraint::new(Kind::Regex(pattern.to_owned())));
    let key = pb::GraphKey::default().into();
    Guided { key, constraint, thinking, generated: &[], stop_tokens: &[], vocabulary: 250 }
}

fn matcher(guide: &Guide) -> Matcher {
    let environment = Environment::new(&testing::bytes()).unwrap();
    environment.compile(guide.constraint().unwrap()).unwrap()
}

fn allowed(next: &Next) -> Vec<u32> {
    let Next::Ready(NextMask { mask: Some(mask), .. }) = next else { panic!("{next:?}") };
    (0..32 * mask.words().len() as u32).filter(|token| mask.allows(*token)).collect()
}

#[test]
fn a_request_whose_tokens_are_free_has_no_guide() {
    let unlimited = pb::Thinking { begin: None, end: 3, max_tokens: None };
    assert!(Guide::of(guided(None, None)).is_none());
    assert!(Guide::of(guided(None, Some(&unlimited))).is_none());
}

#[test]
fn a_mask_has_the_width_of_the_logits() {
    let guide = Guide::of(guided(Some(".*"), None)).unwrap();
    let next = guide.next_of(&mut matcher(&guide)).unwrap();
    let allowed = allowed(&next);
    // The vocabulary has more tokens than the logits; their bits are cleared.
    assert!(allowed.contains(&65) && allowed.iter().all(|token| *token < 250), "{allowed:?}");
}

#[test]
fn own_stop_tokens_may_come_where_the_text_may_end() {
    let guide = Guide::of(Guided { stop_tokens: &[200, 999], ..guided(Some("ab?"), None) }).unwrap();
    let mut matcher = matcher(&guide);
    assert_eq!(allowed(&guide.next_of(&mut matcher).unwrap()), [97]);
    matcher.commit(97).unwrap();
    assert_eq!(allowed(&guide.next_of(&mut matcher).unwrap()), [98, 200]);
}

#[test]
fn min_tokens_do_not_hold_where_every_allowed_token_ends_the_request() {
    let only_ends = |stop_tokens: &[u32], before: &[u32]| {
        let guide = Guide::of(Guided { stop_tokens, vocabulary: 257, ..guided(Some("ab?"), None) }).unwrap();
        let mut matcher = matcher(&guide);
        before.iter().for_each(|&token| assert_eq!(matcher.commit(token).unwrap(), Progress::Continues));
        let Next::Ready(next) = guide.next_of(&mut matcher).unwrap() else { panic!("it is ready") };
        next.only_ends
    };
    assert!(!only_ends(&[], &[]));
    assert!(!only_ends(&[98, 200], &[]));
    assert!(only_ends(&[97, 97], &[]), "the text itself needs the stop token");
    assert!(!only_ends(&[], &[97]));
    assert!(only_ends(&[98, END], &[97]));
    assert!(!only_ends(&[200, END], &[97]));
}

#[test]
fn a_thinking_block_that_a_stop_token_closes_ends_the_request_before_min_tokens() {
    let thinking = pb::Thinking { begin: None, end: 7, max_tokens: Some(0) };
    for (stop_tokens, expected) in [(&[7][..], true), (&[8][..], false)] {
        let guide = Guide::of(Guided { stop_tokens, ..guided(None, Some(&thinking)) }).unwrap();
        let Next::Ready(next) = guide.next_or_await() else { panic!("it is ready") };
        assert_eq!(next.only_ends, expected);
    }
}

#[test]
fn a_mask_of_another_token_is_never_used() {
    let guide = Guide::of(guided(Some("a+"), None)).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    assert!(!guide.finish_work(None, Next::Ready(NextMask::ALL), Duration::ZERO));
    assert!(matches!(guide.wait(0, until), Next::Ready(_)));
    assert!(matches!(guide.wait(1, until), Next::Failed(why) if why.why.contains("token 0")));
    assert!(guide.begin_advance(97));
    assert!(matches!(guide.wait(1, Instant::now()), Next::Pending));
    guide.finish_work(None, Next::Ready(NextMask::ALL), Duration::ZERO);
    assert!(matches!(guide.wait(1, until), Next::Ready(_)));
    assert!(matches!(guide.wait(0, until), Next::Failed(_)));
}

#[test]
fn the_pool_tells_of_a_mask_once_and_only_if_it_is_awaited() {
    let guide = Guide::of(guided(Some("a+"), None)).unwrap();
    assert!(guide.await_next());
    assert!(guide.finish_work(None, Next::Complete, Duration::ZERO));
    assert!(!guide.await_next(), "it is there");
    assert!(!guide.finish_work(None, Next::Complete, Duration::ZERO));
}

#[test]
fn the_end_of_the_text_is_the_end_token() {
    let guide = Guide::of(Guided { vocabulary: 400, ..guided(Some("a*"), None) }).unwrap();
    let next = guide.next_of(&mut matcher(&guide)).unwrap();
    assert_eq!(allowed(&next), [97, END]);
}
