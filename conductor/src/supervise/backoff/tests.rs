use super::*;

#[test]
fn early_exits_wait_longer_up_to_a_bound_and_a_long_one_starts_over() {
    let mut backoff = Backoff::default();
    let pauses: Vec<_> = (0..9).map(|_| backoff.after(Duration::ZERO)).collect();
    assert_eq!(pauses[..3], [FIRST, FIRST * 2, FIRST * 4]);
    assert_eq!(pauses[8], LONGEST);
    assert_eq!(backoff.early_exits(), 9);
    assert_eq!(backoff.after(WELL), FIRST);
    assert_eq!(backoff.early_exits(), 0);
}
