use tutti_constraints::{Environment, Kind};

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
fn a_mask_of_another_token_is_never_used() {
    let guide = Guide::of(guided(Some("a+"), None)).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    assert!(!guide.finish_work(None, Next::Ready(NextMask::ALL), Duration::ZERO));
    assert!(matches!(guide.wait(0, until), Next::Ready(_)));
    assert!(matches!(guide.wait(1, until), Next::Failed(why) if why.contains("token 0")));
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
