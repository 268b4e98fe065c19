use super::*;

/// The share whose turn it is among `waiting`.
fn next(shares: &Shares, waiting: &[ShareId]) -> ShareId {
    *waiting.iter().min_by_key(|&&share| shares.turn(share)).unwrap()
}

#[test]
fn shares_take_turns_by_tokens() {
    let mut shares = Shares::default();
    (0..4).for_each(|_| shares.arrive(1));
    (0..40).for_each(|_| shares.arrive(2));
    let mut given = [0; 3];
    for _ in 0..40 {
        let share = next(&shares, &[1, 2]);
        let tokens = if share == 1 { 100 } else { 10 };
        given[share as usize] += tokens;
        shares.admit(share, tokens);
        assert!(given[1].abs_diff(given[2]) <= 100, "{given:?}");
    }
}

#[test]
fn a_share_that_begins_to_wait_pays_nothing_and_has_saved_nothing() {
    let mut shares = Shares::default();
    (0..100).for_each(|_| shares.arrive(1));
    for _ in 0..50 {
        shares.admit(1, 10);
        (0..10).for_each(|_| shares.output(1));
    }
    // Share 2 arrives late. It is next, and then the two shares take turns.
    (0..4).for_each(|_| shares.arrive(2));
    assert_eq!(next(&shares, &[1, 2]), 2);
    shares.admit(2, 30);
    assert_eq!(next(&shares, &[1, 2]), 1);
    shares.admit(1, 10);
    shares.admit(1, 10);
    assert_eq!(next(&shares, &[1, 2]), 2);
}

#[test]
fn one_that_comes_again_and_again_does_not_always_come_first() {
    let mut shares = Shares::default();
    (0..10).for_each(|_| shares.arrive(1));
    shares.admit(1, 50);
    let mut first = 0;
    while first < 100 {
        shares.arrive(2);
        if next(&shares, &[1, 2]) == 1 {
            break;
        }
        shares.admit(2, 10);
        shares.leave(2);
        first += 1;
    }
    assert!(first <= 6, "{first} requests came before one that was there");
}

#[test]
fn shares_without_requests_are_forgotten() {
    let mut shares = Shares::default();
    for share in 0..1000 {
        shares.arrive(share);
        shares.admit(share, 10);
        shares.leave(share);
    }
    shares.arrive(7);
    shares.admit(7, 1);
    shares.admit(7, 1);
    shares.leave(7);
    assert!(shares.by_id.len() <= 1000);
    shares.arrive(1);
    shares.admit(1, 100);
    shares.admit(1, 100);
    shares.leave(1);
    assert_eq!(shares.by_id.len(), 1);
}
