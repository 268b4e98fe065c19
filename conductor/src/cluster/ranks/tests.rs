use super::*;

#[test]
fn a_crash_loop_is_told_with_its_last_sign_until_a_process_stays_up() {
    let mut record = RankRecord::default();
    for exits in 1..=3 {
        assert!(!record.is_crash_looping());
        record.observe_trouble("signal 9".into());
        record.ended(exits);
    }
    record.joined();
    record.ready();
    let detail = record.detail().unwrap();
    assert!(detail.contains("crash loop, 3 processes") && detail.contains("signal 9"), "{detail}");
    assert!(!record.is_hopeless(), "it was ready in between");
    record.well();
    assert_eq!(record.detail(), None);
}

#[test]
fn one_that_never_gets_ready_is_hopeless() {
    let mut record = RankRecord::default();
    (1..=3).for_each(|exits| record.ended(exits));
    assert!(record.is_hopeless());
}
