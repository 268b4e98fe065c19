use super::*;

#[test]
fn a_minute_s_worth_is_given_at_once_and_then_one_by_one() {
    let start = Instant::now();
    let mut bucket = Bucket::full(start);
    for _ in 0..30 {
        bucket.take_one(30, start).unwrap();
    }
    let after = bucket.take_one(30, start).unwrap_err();
    assert!((after.as_secs_f64() - 2.0).abs() < 1e-6, "{after:?}");
    bucket.take_one(30, start + Duration::from_secs(2)).unwrap();
    assert!(bucket.take_one(30, start + Duration::from_secs(3)).is_err());
    // The bucket holds at most one minute's amount.
    let later = start + Duration::from_secs(3600);
    assert_eq!((0..100).filter(|_| bucket.take_one(30, later).is_ok()).count(), 30);
}

#[test]
fn what_was_used_beyond_the_limit_is_earned_first() {
    let start = Instant::now();
    let mut bucket = Bucket::full(start);
    bucket.charge(300, 100, start);
    let after = bucket.is_positive(100, start).unwrap_err();
    assert!((after.as_secs_f64() - 120.6).abs() < 1e-6, "{after:?}");
    bucket.is_positive(100, start + after).unwrap();
}

#[test]
fn an_amount_is_reserved_whole_and_given_back() {
    let start = Instant::now();
    let mut bucket = Bucket::full(start);
    bucket.reserve(60, 100, start).unwrap();
    let after = bucket.reserve(60, 100, start).unwrap_err();
    assert!((after.as_secs_f64() - 12.0).abs() < 1e-6, "{after:?}");
    bucket.give_back(60, 100, start);
    // A reservation of more than one minute's amount makes a full bucket negative. The bucket must refill above zero
    // before its next use.
    bucket.reserve(300, 100, start).unwrap();
    assert!(bucket.is_positive(100, start + Duration::from_secs(119)).is_err());
    bucket.give_back(1000, 100, start + Duration::from_secs(119));
    assert!(
        bucket.reserve(101, 100, start + Duration::from_secs(119)).is_ok(),
        "it holds a minute's worth at most"
    );
    assert!(bucket.reserve(300, 100, start + Duration::from_secs(119)).is_err());
}
