use std::collections::BTreeMap;

use super::*;

fn totals(generated_tokens: u64, overloaded: u64) -> Totals {
    Totals {
        generated_tokens,
        in_flight: generated_tokens,
        refused: BTreeMap::from([("overloaded", overloaded), ("invalid", 7)]),
        first_token: vec![generated_tokens, 1],
        ..Totals::default()
    }
}

#[test]
fn a_sample_has_the_events_since_the_one_before_and_the_state_now() {
    let start = Instant::now();
    let mut ring = Ring::new(totals(5, 0), start);
    let queue = Queue { waiting: 3, oldest_waiting_ms: 40 };
    ring.take(totals(25, 2), queue, start + EVERY);
    ring.take(totals(26, 2), Queue::default(), start + 2 * EVERY);
    let samples = ring.after("", 0).samples;
    let [first, second] = &samples[..] else { panic!("{samples:?}") };
    assert_eq!((first.sequence, first.at_ms, first.took_ms), (1, 2000, 2000));
    assert_eq!((first.events.generated_tokens, first.events.in_flight, first.queue), (20, 25, queue));
    assert_eq!(first.events.refused, BTreeMap::from([("overloaded", 2)]));
    assert_eq!(first.events.first_token, [20, 0]);
    assert_eq!((second.events.generated_tokens, second.events.refused.len()), (1, 0));
}

#[test]
fn samples_are_bounded_and_each_is_answered_once() {
    let start = Instant::now();
    let mut ring = Ring::new(Totals::default(), start);
    for count in 1..=200 {
        ring.take(Totals::default(), Queue::default(), start + count * EVERY);
    }
    let own = ring.process.clone();
    let sequences = |process: &str, after| {
        ring.after(process, after).samples.iter().map(|sample| sample.sequence).collect::<Vec<_>>()
    };
    assert_eq!(sequences("", 0), (51..=200).collect::<Vec<_>>());
    assert_eq!(sequences(&own, 198), [199, 200]);
    assert!(sequences(&own, 200).is_empty());
    // The caller has the samples of another process.
    assert_eq!(sequences("another", 198).len(), 150);
    assert_eq!(ring.after("", 0).newest, 200);
}
