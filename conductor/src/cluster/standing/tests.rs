use super::*;

const PAUSE: Duration = Duration::from_secs(60);

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Compares once a second from `from` on, with a step before each comparison, until the worker is set aside. Returns
/// the time of that and the pause.
fn slow_from(record: &mut Record, from: u64) -> (u64, Duration) {
    for second in from..from + 10 {
        if let Some(pace) = record.note(Finding::Slow(9.0), Some(s(second)), s(second)) {
            assert_eq!(pace, 9.0);
            record.set_aside(pace, PAUSE, s(second));
            return (second, record.pause.unwrap());
        }
    }
    panic!("the worker is not set aside")
}

#[test]
fn a_worker_is_set_aside_once_its_steps_have_been_slow_for_a_while() {
    let mut record = Record::default();
    assert!(record.is_usual() && record.turn(9) == Turn::Usual);
    assert_eq!(slow_from(&mut record, 10), (13, PAUSE));
    assert!(record.is_aside() && record.turn(0) == Turn::Last);
    assert_eq!(record.aside_at(), Some(9.0));
    assert!(record.describe(s(20)).starts_with("slow: its steps take at least 9.0 times as long"));
    assert!(record.describe(s(20)).ends_with("tried again in 53 s"));
}

#[test]
fn a_burst_of_slow_steps_before_idleness_is_not_enough() {
    let mut record = Record::default();
    for second in 10..40 {
        assert_eq!(record.note(Finding::Slow(9.0), Some(s(11)), s(second)), None, "{second}");
    }
}

#[test]
fn slowness_begins_anew_after_a_sound_comparison() {
    let mut record = Record::default();
    for (second, finding) in
        [Finding::Slow(9.0), Finding::Slow(9.0), Finding::Sound, Finding::Slow(9.0)].into_iter().enumerate()
    {
        let now = s(2 * second as u64);
        assert_eq!(record.note(finding, Some(now), now), None, "{second}");
    }
    assert_eq!(slow_from(&mut record, 7).0, 9);
}

#[test]
fn a_worker_that_is_tried_holds_one_request_until_it_proves_sound() {
    let mut record = Record::default();
    slow_from(&mut record, 10);
    assert!(!record.is_due(s(72)) && record.is_due(s(73)));
    record.try_again(s(73));
    assert!(!record.is_aside() && !record.is_usual());
    assert!(record.turn(0) == Turn::Usual && record.turn(1) == Turn::AfterUsual);
    assert!(record.describe(s(74)).starts_with("was slow"));
    record.note(Finding::Sound, Some(s(75)), s(75));
    assert!(!record.is_usual(), "a moment proves nothing");
    record.note(Finding::Sound, Some(s(76)), s(76));
    assert!(record.is_usual() && record.turn(9) == Turn::Usual && record.describe(s(76)).is_empty());
}

#[test]
fn a_trial_without_findings_ends() {
    let mut record = Record::default();
    slow_from(&mut record, 10);
    record.try_again(s(73));
    record.note(Finding::Nothing, None, s(132));
    assert!(!record.is_usual());
    record.note(Finding::Nothing, None, s(133));
    assert!(record.is_usual());
}

#[test]
fn a_worker_that_is_slow_again_and_again_stays_aside_for_longer() {
    let mut record = Record::default();
    let mut now = 0;
    let mut pauses = Vec::new();
    for _ in 0..7 {
        let (at, pause) = slow_from(&mut record, now);
        pauses.push(pause.as_secs());
        now = at + pause.as_secs();
        assert!(!record.is_due(s(now - 1)) && record.is_due(s(now)));
        record.try_again(s(now));
    }
    assert_eq!(pauses, [60, 120, 240, 480, 960, 960, 960]);
    // It has been sound for as long as it was last aside.
    assert_eq!(slow_from(&mut record, now + 960).1, PAUSE);
}
