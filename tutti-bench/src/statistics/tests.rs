use super::*;
use crate::events::Usage;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// An answer of three tokens in two events. The first event comes after `first` milliseconds, the second after `last`.
fn served(first: u64, last: u64) -> Outcome {
    Outcome {
        arrivals: vec![(ms(first), 1), (ms(last), 2)],
        end: ms(last),
        usage: Some(Usage { prompt_tokens: 10, completion_tokens: 3 }),
        failure: None,
    }
}

fn failed(kind: FailureKind, message: &str) -> Outcome {
    Outcome { failure: Some(Failure::new(kind, message)), ..served(1, 2) }
}

fn statistics(objectives: Objectives, outcomes: Vec<(Sent, Outcome)>) -> Statistics {
    let mut statistics = Statistics::new(objectives);
    for (sent, outcome) in outcomes {
        statistics.send(sent);
        statistics.end(sent, outcome);
    }
    statistics
}

const PROMPT: Sent = Sent { due: Duration::ZERO, at: Duration::ZERO };

#[test]
fn figures_follow_from_the_outcomes() {
    let s = statistics(Objectives::default(), vec![(PROMPT, served(10, 30)), (PROMPT, served(20, 80))]);
    assert_eq!((s.sent, s.served, s.failed, s.good), (2, 2, 0, 2));
    assert_eq!((s.prompt_tokens, s.output_tokens), (20, 6));
    assert_eq!((s.ttft.summary().min, s.ttft.summary().max), (10.0, 20.0));
    assert_eq!((s.itl.summary().min, s.itl.summary().max), (20.0, 60.0));
    assert_eq!((s.tpot.summary().min, s.tpot.summary().max), (10.0, 30.0));
    assert_eq!((s.latency.summary().min, s.latency.summary().max), (30.0, 80.0));
}

#[test]
fn latency_counts_from_the_time_at_which_a_request_was_due() {
    let late = Sent { due: ms(500), at: ms(1500) };
    let s = statistics(Objectives { ttft: Some(ms(1009)), itl: None }, vec![(late, served(10, 30))]);
    assert_eq!(
        (s.ttft.summary().max, s.latency.summary().max, s.delay.summary().max),
        (1010.0, 1030.0, 1000.0)
    );
    assert_eq!(s.good, 0);
    // The gaps between tokens do not include a delay before sending.
    assert_eq!(s.itl.summary().max, 20.0);
    let intervals = s.timeline.intervals();
    assert_eq!((intervals[1].sent, intervals[1].served, intervals[1].output_tokens), (1, 1, 3));
}

#[test]
fn a_good_request_keeps_both_objectives() {
    let outcomes = || vec![(PROMPT, served(10, 30)), (PROMPT, served(20, 30)), (PROMPT, served(9, 90))];
    for (ttft, itl, good) in [
        (None, None, 3),
        (Some(10), None, 2),
        (None, Some(10), 2),
        (Some(10), Some(10), 1),
        (Some(8), None, 0),
    ] {
        let objectives = Objectives { ttft: ttft.map(ms), itl: itl.map(ms) };
        assert_eq!(statistics(objectives, outcomes()).good, good, "{objectives:?}");
    }
}

#[test]
fn failures_are_counted_by_kind_and_their_times_are_not() {
    let s = statistics(
        Objectives::default(),
        vec![
            (PROMPT, failed(FailureKind::Timeout, "late")),
            (PROMPT, failed(FailureKind::Status(503), "full")),
            (PROMPT, failed(FailureKind::Status(503), "full again")),
            (PROMPT, served(10, 30)),
        ],
    );
    let failures: Vec<_> = s.failures().into_iter().map(|f| (f.kind, f.count, f.example)).collect();
    assert_eq!(failures, [("status 503".into(), 2, "full".into()), ("timeout".into(), 1, "late".to_owned())]);
    assert_eq!((s.served, s.failed, s.ttft.count(), s.itl.count(), s.latency.count()), (1, 3, 1, 1, 1));
    assert_eq!(s.output_tokens, 3);
}

#[test]
fn an_answer_of_another_length_is_a_failure() {
    let judged = |exact, outcome: Outcome| {
        let mut outcome = outcome;
        outcome.judge(exact);
        outcome.failure.map(|failure| failure.kind)
    };
    assert_eq!(judged(Some(3), served(1, 2)), None);
    assert_eq!(judged(None, served(1, 2)), None);
    assert_eq!(judged(Some(4), served(1, 2)), Some(FailureKind::Length));
    assert_eq!(judged(None, Outcome::default()), Some(FailureKind::Empty));
    assert_eq!(judged(Some(3), failed(FailureKind::Broken, "")), Some(FailureKind::Broken));
}
