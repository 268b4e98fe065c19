use super::*;

const RULE: Rule = Rule { ratio: Some(4.0), steps: 8 };
const MS: u32 = 1000;

fn report(tokens: u32, pages: u32, us: u32) -> pb::StepReport {
    pb::StepReport {
        work: Some(pb::StepWork { run_us: us, tokens, ..Default::default() }),
        load: Some(pb::WorkerLoad { kv_pages_used: pages, ..Default::default() }),
        ..Default::default()
    }
}

/// Steps of 4 tokens and 100 pages that took these times, all at `now`.
fn steps(now: Instant, times: &[u32]) -> Steps {
    let mut steps = Steps::default();
    times.iter().for_each(|us| steps.take(&report(4, 100, *us), &RULE, now));
    steps
}

fn pace(own: &Steps, peers: &[&Steps], now: Instant) -> Option<f64> {
    let medians: Vec<Medians> = peers.iter().map(|peer| peer.medians(now)).collect();
    own.pace(medians.iter(), &RULE, now)
}

#[test]
fn a_pace_is_the_mean_ratio_to_the_peers_medians() {
    let now = Instant::now();
    let (own, peer) = (steps(now, &[60 * MS; 8]), steps(now, &[10 * MS; 8]));
    assert_eq!(pace(&own, &[&peer], now), Some(6.0));
    assert_eq!(pace(&peer, &[&own], now), Some(1.0 / 6.0));
    assert!(RULE.is_slow(6.0) && RULE.is_slow(4.0) && !RULE.is_slow(3.9));
    assert!(!Rule { ratio: None, ..RULE }.is_slow(1e9));
}

#[test]
fn workers_that_are_equally_slow_are_not_slow() {
    let now = Instant::now();
    let all: Vec<Steps> = (0..3).map(|_| steps(now, &[900 * MS; 8])).collect();
    assert_eq!(pace(&all[0], &[&all[1], &all[2]], now), Some(1.0));
}

#[test]
fn two_slow_workers_of_three_do_not_hide_each_other() {
    let now = Instant::now();
    let (slow, fast) = (steps(now, &[80 * MS; 8]), steps(now, &[8 * MS; 8]));
    assert_eq!(pace(&slow, &[&steps(now, &[80 * MS; 8]), &fast], now), Some(10.0));
}

#[test]
fn one_long_pause_is_not_slowness() {
    let now = Instant::now();
    let mut times = [10 * MS; 8];
    times[3] = 5000 * MS;
    let paused = pace(&steps(now, &times), &[&steps(now, &[10 * MS; 8])], now).unwrap();
    assert_eq!(paused, (7.0 + 4.0 * 4.0) / 8.0);
    assert!(!RULE.is_slow(paused));
}

#[test]
fn short_steps_do_not_differ() {
    let now = Instant::now();
    assert_eq!(pace(&steps(now, &[4 * MS; 8]), &[&steps(now, &[50; 8])], now), Some(1.0));
}

#[test]
fn a_step_is_compared_with_steps_that_do_as_much_or_more() {
    let now = Instant::now();
    let peer = steps(now, &[10 * MS; 8]);
    for (tokens, pages, expected) in
        [(64, 100, None), (4, 1000, None), (1, 100, Some(5.0)), (4, 0, Some(5.0)), (5, 70, Some(5.0))]
    {
        let mut own = Steps::default();
        (0..8).for_each(|_| own.take(&report(tokens, pages, 50 * MS), &RULE, now));
        assert_eq!(pace(&own, &[&peer], now), expected, "{tokens} tokens, {pages} pages");
    }
}

#[test]
fn a_few_steps_and_old_steps_say_nothing() {
    let now = Instant::now();
    let peer = steps(now, &[10 * MS; 8]);
    assert_eq!(pace(&steps(now, &[100 * MS; 7]), &[&peer], now), None);
    assert_eq!(pace(&steps(now, &[100 * MS; 8]), &[&steps(now, &[10 * MS; 3])], now), None);
    assert_eq!(pace(&steps(now, &[100 * MS; 8]), &[], now), None);
    let later = now + Duration::from_secs(31);
    assert_eq!(pace(&steps(later, &[100 * MS; 8]), &[&peer], later), None, "the peer has no current steps");
    let mut own = steps(now, &[100 * MS; 8]);
    own.clear();
    assert_eq!(pace(&own, &[&peer], now), None);
}

#[test]
fn steps_that_are_too_long_to_be_many_are_compared() {
    let now = Instant::now();
    let rule = Rule { steps: 64, ..RULE };
    let mut own = Steps::default();
    (0..8).for_each(|_| own.take(&report(4, 100, 2000 * MS), &rule, now));
    let peer = steps(now, &[100 * MS; 8]).medians(now);
    assert_eq!(own.pace(std::iter::once(&peer), &rule, now), Some(16.0));
}

#[test]
fn placement_weighs_only_paces_far_from_the_usual() {
    let percents = [None, Some(0.2), Some(1.9), Some(2.0), Some(7.5)].map(cost_percent);
    assert_eq!(percents, [100, 100, 100, 200, 750]);
}
