use super::*;

/// Number of operations that are skipped before the next one is admitted.
fn skipped(backoff: &mut Backoff) -> usize {
    (0..).take_while(|_| !backoff.admits()).count()
}

#[test]
fn failures_skip_more_and_more_and_a_success_starts_anew() {
    let mut backoff = Backoff::default();
    assert_eq!(skipped(&mut backoff), 0);
    for wanted in [8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
        backoff.failed();
        assert_eq!(skipped(&mut backoff), wanted);
    }
    backoff.succeeded();
    assert_eq!(skipped(&mut backoff), 0);
    backoff.failed();
    assert_eq!(skipped(&mut backoff), 8);
}

#[test]
fn candidates_are_ordered_by_panel_and_end_after_the_limit() {
    // Two rows of 33 panels.
    let marks = [1 << 15, 0b101, 1, 1 << 15, 0, 0];
    let pair = |panel, row| Candidate { panel, row };
    let all = [pair(15, 0), pair(15, 1), pair(16, 0), pair(18, 0), pair(32, 0)];
    let mut candidates = vec![pair(9, 9)];
    collect(&marks, 3, 5, &mut candidates);
    assert_eq!(candidates, all);
    collect(&marks, 3, 2, &mut candidates);
    assert_eq!(candidates.len(), 3);
}

#[test]
fn a_row_without_a_finite_bound_is_not_sound() {
    let sound =
        |exact, most| RowBound::new(RowNorms { exact, quantised: 1.0, difference: 0.0 }, 128, most).sound;
    assert!(sound(1.0, 1.0) && sound(9e18, 1e18));
    assert!(!sound(f32::NAN, 1.0) && !sound(f32::INFINITY, 1.0) && !sound(1.1e19, 1e18));
}
