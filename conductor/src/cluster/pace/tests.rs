use super::*;

const RULE: Rule = Rule { ratio: Some(4.0), steps: 8 };
const MS: u32 = 1000;
const NOW: Duration = Duration::from_secs(1000);

/// A step of decodes: each row samples its only token.
fn decodes(rows: u32, attended: u64, us: u32) -> pb::StepReport {
    let work = pb::StepWork {
        run_us: us,
        tokens: rows,
        decode_rows: rows,
        attended_tokens: attended,
        ..Default::default()
    };
    pb::StepReport { work: Some(work), batch_walk: 1, ..Default::default() }
}

/// A step of one prefill that does not end its prompt.
fn prefill(tokens: u32, attended: u64, us: u32) -> pb::StepReport {
    let work =
        pb::StepWork { run_us: us, tokens, prefill_rows: 1, attended_tokens: attended, ..Default::default() };
    pb::StepReport { work: Some(work), ..Default::default() }
}

/// Steps that are all reported at `now`.
fn reported(now: Duration, reports: impl IntoIterator<Item = pb::StepReport>) -> Steps {
    let mut steps = Steps::default();
    reports.into_iter().for_each(|report| steps.take(&report, &RULE, now));
    steps
}

/// Decodes of 4 rows that attend to 1000 tokens and took these times.
fn steps(now: Duration, times: &[u32]) -> Steps {
    reported(now, times.iter().map(|us| decodes(4, 1000, *us)))
}

fn pace(own: &Steps, peers: &[&Steps], now: Duration) -> Option<f64> {
    let medians: Vec<Medians> = peers.iter().map(|peer| peer.medians(now)).collect();
    own.pace(medians.iter(), &RULE, now)
}

#[test]
fn a_pace_is_the_mean_ratio_to_the_peers_medians() {
    let now = NOW;
    let (own, peer) = (steps(now, &[60 * MS; 8]), steps(now, &[10 * MS; 8]));
    assert_eq!(pace(&own, &[&peer], now), Some(6.0));
    assert_eq!(pace(&peer, &[&own], now), Some(1.0 / 6.0));
    assert!(RULE.is_slow(6.0) && RULE.is_slow(4.0) && !RULE.is_slow(3.9));
    assert!(!Rule { ratio: None, ..RULE }.is_slow(1e9));
}

#[test]
fn numbers_of_any_size_are_compared() {
    let huge = || reported(NOW, (0..8).map(|_| decodes(u32::MAX, u64::MAX, u32::MAX)));
    assert_eq!(pace(&huge(), &[&huge()], NOW), Some(1.0));
    assert!(pace(&huge(), &[&steps(NOW, &[10 * MS; 8])], NOW).is_some());
}

#[test]
fn workers_that_are_equally_slow_are_not_slow() {
    let now = NOW;
    let all: Vec<Steps> = (0..3).map(|_| steps(now, &[900 * MS; 8])).collect();
    assert_eq!(pace(&all[0], &[&all[1], &all[2]], now), Some(1.0));
}

#[test]
fn two_slow_workers_of_three_do_not_hide_each_other() {
    let now = NOW;
    let (slow, fast) = (steps(now, &[80 * MS; 8]), steps(now, &[8 * MS; 8]));
    assert_eq!(pace(&slow, &[&steps(now, &[80 * MS; 8]), &fast], now), Some(10.0));
}

#[test]
fn one_long_pause_is_not_slowness() {
    let now = NOW;
    let mut times = [10 * MS; 8];
    times[3] = 5000 * MS;
    let paused = pace(&steps(now, &times), &[&steps(now, &[10 * MS; 8])], now).unwrap();
    assert_eq!(paused, 1.0);
    assert!(!RULE.is_slow(paused));
}

#[test]
fn a_worker_that_is_stopped_most_of_the_time_is_slow_though_most_of_its_steps_are_not() {
    let now = NOW;
    let mut times = [10 * MS; 64];
    times.iter_mut().step_by(5).for_each(|us| *us = 300 * MS);
    let rule = Rule { steps: 64, ..RULE };
    let mut own = Steps::default();
    times.iter().for_each(|us| own.take(&decodes(4, 1000, *us), &rule, now));
    let peer = steps(now, &[10 * MS; 8]).medians(now);
    let pace = own.pace(std::iter::once(&peer), &rule, now).unwrap();
    assert!(rule.is_slow(pace), "{pace}");
}

#[test]
fn short_steps_do_not_differ() {
    let now = NOW;
    assert_eq!(pace(&steps(now, &[4 * MS; 8]), &[&steps(now, &[50; 8])], now), Some(1.0));
}

#[test]
fn a_worker_that_runs_bigger_steps_is_not_slow() {
    let peer = steps(NOW, &[10 * MS; 8]);
    let of = |reports: Vec<pb::StepReport>| pace(&reported(NOW, reports), &[&peer], NOW);
    // An equal worker may take as many times as long as its step has more of any one number.
    for (rows, attended, at_most) in
        [(64, 1000, 16), (4, 16_000, 16), (64, 64_000, 64), (5, 1000, 1), (4, 1999, 1)]
    {
        let pace = of(vec![decodes(rows, attended, at_most * 10 * MS); 8]).unwrap();
        assert!(pace <= 1.0, "{rows} rows, {attended} attended: {pace}");
    }
    // Nothing smaller excuses it.
    for (rows, attended) in [(4, 1000), (1, 1000), (4, 10), (1, 1)] {
        assert_eq!(
            of(vec![decodes(rows, attended, 50 * MS); 8]),
            Some(5.0),
            "{rows} rows, {attended} attended"
        );
    }
    assert_eq!(of(vec![decodes(8, 1000, 100 * MS); 8]), Some(5.0));
}

#[test]
fn a_chunk_deep_in_a_prompt_and_one_at_its_beginning_are_not_alike() {
    // 512 tokens of a short prompt, and 512 tokens after 100,000 others.
    let (shallow, deep) = (512 * 256, 512 * 100_256);
    let peer = reported(NOW, vec![prefill(512, shallow, 20 * MS); 8]);
    let pace = pace(&reported(NOW, vec![prefill(512, deep, 900 * MS); 8]), &[&peer], NOW).unwrap();
    assert!(pace <= 1.0, "{pace}");
}

#[test]
fn rows_that_sample_are_dearer_than_rows_of_a_prefill() {
    let peer = reported(NOW, vec![prefill(64, 6400, 10 * MS); 8]);
    let mut decoding = vec![decodes(64, 6400, 80 * MS); 8];
    decoding.iter_mut().for_each(|report| report.batch_walk = 0);
    let pace = pace(&reported(NOW, decoding), &[&peer], NOW).unwrap();
    assert!(pace <= 1.0, "{pace}");
}

#[test]
fn steps_of_another_walk_say_nothing() {
    let peer = reported(NOW, vec![prefill(512, 1000, MS); 8]);
    assert_eq!(pace(&steps(NOW, &[900 * MS; 8]), &[&peer], NOW), None);
    // Nor do they if most steps are of it.
    let mixed = |decoding| {
        let prefills = vec![prefill(512, 1000, 900 * MS); 8 - decoding];
        reported(NOW, prefills.into_iter().chain(vec![decodes(4, 1000, 50 * MS); decoding]))
    };
    let peer = steps(NOW, &[10 * MS; 8]);
    assert_eq!([3, 4].map(|decoding| pace(&mixed(decoding), &[&peer], NOW)), [None, Some(5.0)]);
}

#[test]
fn a_few_steps_and_old_steps_say_nothing() {
    let now = NOW;
    let peer = steps(now, &[10 * MS; 8]);
    assert_eq!(pace(&steps(now, &[100 * MS; 7]), &[&peer], now), None);
    assert_eq!(pace(&steps(now, &[100 * MS; 8]), &[&steps(now, &[10 * MS; 3])], now), None);
    assert_eq!(pace(&Steps::default(), &[&peer], now), None);
    assert_eq!(pace(&steps(now, &[100 * MS; 8]), &[], now), None);
    let later = now + Duration::from_secs(31);
    assert_eq!(pace(&steps(later, &[100 * MS; 8]), &[&peer], later), None, "the peer has no current steps");
    let mut own = steps(now, &[100 * MS; 8]);
    own.clear();
    assert_eq!(pace(&own, &[&peer], now), None);
}

#[test]
fn steps_that_are_too_long_to_be_many_are_compared() {
    let rule = Rule { steps: 64, ..RULE };
    let peer = |now| steps(now, &[100 * MS; 8]).medians(now);
    for (seconds, pace) in [(4, 40.0), (20, 64.0), (100, 64.0)] {
        let mut own = Steps::default();
        let mut now = NOW;
        let paces: Vec<Option<f64>> = (0..4)
            .map(|_| {
                now += Duration::from_secs(seconds);
                own.take(&decodes(4, 1000, seconds as u32 * 1000 * MS), &rule, now);
                own.pace(std::iter::once(&peer(now)), &rule, now)
            })
            .collect();
        assert_eq!(paces, [None, None, Some(pace), Some(pace)], "{seconds} s");
    }
}

#[test]
fn a_long_pause_among_few_steps_is_not_slowness() {
    let rule = Rule { steps: 64, ..RULE };
    let peer = steps(NOW, &[100 * MS; 8]).medians(NOW);
    let mut own = Steps::default();
    for us in [100 * MS, 60_000 * MS, 100 * MS] {
        own.take(&decodes(4, 1000, us), &rule, NOW);
    }
    assert_eq!(own.pace(std::iter::once(&peer), &rule, NOW), Some(1.0));
}

#[test]
fn paces_near_the_usual_are_equal_to_placement() {
    let percents = [None, Some(0.2), Some(1.9), Some(2.0), Some(7.5)].map(cost_percent);
    assert_eq!(percents, [100, 100, 100, 200, 750]);
}
