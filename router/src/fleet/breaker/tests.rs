use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn opened(now: Instant) -> Breaker {
    let mut breaker = Breaker::default();
    for _ in 0..THRESHOLD {
        let ticket = breaker.pass(now);
        breaker.judge(ticket, Verdict::Fault, now);
    }
    assert_eq!(breaker.position(), Position::Open);
    breaker
}

#[test]
fn faults_in_a_row_open_it_and_a_good_one_between_starts_the_count_again() {
    let (mut breaker, now) = (Breaker::default(), Instant::now());
    for verdict in [Verdict::Fault, Verdict::Fault, Verdict::Good, Verdict::Fault, Verdict::Fault] {
        let ticket = breaker.pass(now);
        breaker.judge(ticket, verdict, now);
    }
    assert_eq!(breaker.position(), Position::Closed);
    let ticket = breaker.pass(now);
    breaker.judge(ticket, Verdict::Fault, now);
    assert_eq!((breaker.position(), breaker.permits(now)), (Position::Open, false));
}

#[test]
fn refusals_never_open_it() {
    let (mut breaker, now) = (Breaker::default(), Instant::now());
    for _ in 0..100 {
        let ticket = breaker.pass(now);
        breaker.judge(ticket, Verdict::None, now);
    }
    assert_eq!(breaker.position(), Position::Closed);
}

#[test]
fn one_probe_at_a_time_decides() {
    let start = Instant::now();
    let mut breaker = opened(start);
    let later = start + SECOND;
    assert!(!breaker.permits(start) && breaker.permits(later));
    let probe = breaker.pass(later);
    assert!(!breaker.permits(later), "one probe is running");
    // A verdict on a request that passed before the breaker opened does not count.
    breaker.judge(Ticket { probe: None }, Verdict::Good, later);
    assert_eq!(breaker.position(), Position::HalfOpen);
    breaker.judge(probe, Verdict::Good, later);
    assert_eq!(breaker.position(), Position::Closed);
}

#[test]
fn a_probe_without_a_verdict_makes_room_for_the_next() {
    let start = Instant::now();
    let mut breaker = opened(start);
    let silent = breaker.pass(start + SECOND);
    assert!(breaker.permits(start + SECOND + PROBE_PATIENCE));
    let refused = breaker.pass(start + SECOND + PROBE_PATIENCE);
    breaker.judge(silent, Verdict::Fault, start);
    assert_eq!(breaker.position(), Position::HalfOpen, "the probe after it decides");
    breaker.judge(refused, Verdict::None, start);
    assert!(breaker.permits(start));
}

#[test]
fn pauses_double_up_to_the_longest() {
    let mut now = Instant::now();
    let mut breaker = opened(now);
    for pause in [2, 4, 8, 16, 30, 30] {
        now += LONGEST_PAUSE;
        let probe = breaker.pass(now);
        breaker.judge(probe, Verdict::Fault, now);
        let pause = pause * SECOND;
        assert!(!breaker.permits(now + pause - Duration::from_millis(1)) && breaker.permits(now + pause));
    }
}

proptest! {
    /// After any sequence of events, the breaker permits a request again once enough time has passed.
    #[test]
    fn a_conductor_is_never_shut_out_for_good(
        events in prop::collection::vec((0usize..4, 0u8..3, 0u64..20_000), 0..60),
    ) {
        let (mut breaker, mut now) = (Breaker::default(), Instant::now());
        let mut tickets = vec![Ticket { probe: None }];
        for (which, verdict, millis) in events {
            now += Duration::from_millis(millis);
            if which == 0 {
                tickets.push(breaker.pass(now));
            }
            let verdict = [Verdict::Good, Verdict::None, Verdict::Fault][usize::from(verdict)];
            breaker.judge(tickets[which * 7 % tickets.len()], verdict, now);
        }
        prop_assert!(breaker.permits(now + LONGEST_PAUSE));
        let probe = breaker.pass(now + LONGEST_PAUSE);
        breaker.judge(probe, Verdict::Good, now + LONGEST_PAUSE);
        prop_assert_eq!(breaker.position(), Position::Closed);
    }
}
