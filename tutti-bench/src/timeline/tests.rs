use super::*;

#[test]
fn a_long_run_keeps_its_counts_in_as_many_intervals() {
    let mut timeline = Timeline::default();
    for second in 0..5_000 {
        let bin = timeline.at(Duration::from_secs(second));
        bin.sent += 1;
        bin.in_flight = bin.in_flight.max(second);
        bin.first_token(Duration::from_millis(second));
    }
    let intervals = timeline.intervals();
    assert_eq!((intervals.len(), timeline.width()), (313, Duration::from_secs(16)));
    assert!(intervals[..312].iter().all(|interval| interval.sent == 16));
    assert_eq!(intervals.iter().map(|interval| interval.sent).sum::<u64>(), 5_000);
    let second = &intervals[1];
    assert_eq!((second.start_s, second.max_in_flight), (16.0, 31));
    assert_eq!((second.ttft_mean_ms, second.ttft_max_ms), (Some(23.5), Some(31.0)));
}

#[test]
fn an_empty_interval_has_no_first_tokens() {
    let mut timeline = Timeline::default();
    timeline.at(Duration::from_secs(2)).sent += 1;
    let intervals = timeline.intervals();
    assert_eq!(intervals.len(), 3);
    assert!(intervals.iter().all(|interval| interval.ttft_mean_ms.is_none()));
}
