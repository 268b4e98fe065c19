use super::*;
use crate::{
    constraint::Kind,
    vocabulary::{Token, Vocabulary},
};

/// Each state of its lexer remembers the last letters, so nearly every token visits a new one.
fn letters() -> (Environment, Constraint, Vec<u32>) {
    let tokens = vec![Token::Text(b"a".into()), Token::Text(b"b".into()), Token::Special("<end>".into())];
    let environment = Environment::new(&Vocabulary::new(tokens, &[2]).unwrap()).unwrap();
    let constraint = Constraint::new(Kind::Regex("[ab]*a[ab]{16}".into()));
    let mut random = fastrand::Rng::with_seed(4);
    (environment, constraint, (0..3000).map(|_| random.u32(..2)).collect())
}

#[test]
fn a_replay_does_not_fail_where_the_first_matcher_did_not() {
    let (environment, constraint, tokens) = letters();
    let mut cache = BaseMatchers::new(usize::MAX);
    let mut first = cache.matcher(&environment, &constraint).unwrap();
    let (mut words, mut replayed_words) = ([0], [0]);
    for &token in &tokens {
        first.mask(&mut words).unwrap();
        first.commit(token).unwrap();
    }
    first.mask(&mut words).unwrap();
    let (mut replayed, _) = cache.replayed(&environment, &constraint, &tokens).unwrap();
    replayed.mask(&mut replayed_words).unwrap();
    assert_eq!(words, replayed_words);
    // The fuel of one step would not do.
    let mut starved = cache.matcher(&environment, &constraint).unwrap();
    assert!(starved.advance(&tokens).is_err());
}

#[test]
fn what_one_matcher_visits_does_not_count_for_another() {
    let (environment, constraint, tokens) = letters();
    let mut cache = BaseMatchers::new(usize::MAX);
    let fresh = cache.matcher(&environment, &constraint).unwrap().bytes();
    let mut first = cache.matcher(&environment, &constraint).unwrap();
    // It fails at a limit of its lexer.
    assert!(first.advance(&tokens).is_err());
    let mut second = cache.matcher(&environment, &constraint).unwrap();
    assert_eq!(second.bytes(), fresh);
    assert_eq!(second.advance(&tokens[..100]), Ok(Progress::Continues));
    assert!(second.bytes() > fresh);
    assert_eq!(cache.counts(), CacheCounts { hits: 2, compilations: 1 });
}

#[test]
fn the_constraint_that_was_used_longest_ago_is_dropped() {
    let (environment, ..) = letters();
    let of = |pattern: &str| Constraint::new(Kind::Regex(pattern.to_owned()));
    let mut cache = BaseMatchers::new(usize::MAX);
    cache.matcher(&environment, &of("a")).unwrap();
    cache.max_bytes = cache.bytes() * 5 / 2;
    for pattern in ["b", "a", "ab"] {
        cache.matcher(&environment, &of(pattern)).unwrap();
    }
    assert_eq!((cache.len(), cache.counts().compilations), (2, 3));
    cache.matcher(&environment, &of("a")).unwrap();
    assert_eq!(cache.counts().compilations, 3);
    cache.matcher(&environment, &of("b")).unwrap();
    assert_eq!(cache.counts().compilations, 4);
}
