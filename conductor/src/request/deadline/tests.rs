use super::*;

#[test]
fn what_is_left_shrinks_to_nothing_and_not_before() {
    let came = Instant::now();
    let deadline = Deadline::new(came, 30).unwrap();
    let left = |us| deadline.left_ms(came + Duration::from_micros(us));
    assert_eq!([left(0), left(10_000), left(29_999), left(30_000), left(90_000)], [30, 20, 1, 0, 0]);
}

#[test]
fn no_time_is_no_deadline() {
    let error = Deadline::new(Instant::now(), 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
}
