//! Tests of the policies' decisions. The expected numbers are worked out by hand.

mod common;

use std::time::Duration;

use common::{
    AUDIO, DECODE, SPEECH, SPEECH_DECODE, SPEECH_MIXED, TEXT, commit, config, key, scheduler, segments, set,
    text, tokens,
};
use tutti_scheduler::{HEAD_START, MediaMark, Outcome, Scheduler, SchedulerConfig, StepPlan};
use tutti_settings::{Admission, PrefillSharing};

fn step(scheduler: &mut Scheduler) -> StepPlan {
    scheduler.plan(Duration::ZERO).step.expect("something can run")
}

/// Runs the next step. Returns the positions that each request computed.
fn shares(scheduler: &mut Scheduler) -> Vec<(u64, std::ops::Range<usize>)> {
    let step = step(scheduler);
    let shares = step.rows.iter().map(|row| (row.key.request.0, row.positions.clone())).collect();
    let _ = commit(scheduler, step);
    shares
}

fn fair() -> SchedulerConfig {
    set(config(), |settings| settings.prefill_sharing = PrefillSharing::Fair)
}

#[test]
fn fair_shares_are_equal_and_what_the_smallest_leaves_is_shared() {
    let mut scheduler = scheduler(set(fair(), |settings| settings.max_step_tokens = 24));
    for (request, prompt) in [(1, 40), (2, 2), (3, 40)] {
        scheduler.add(text(request, prompt, 1)).unwrap();
    }
    assert_eq!(shares(&mut scheduler), [(1, 0..8), (2, 0..2), (3, 0..12)], "eleven each, on a grid of four");
    assert_eq!(shares(&mut scheduler), [(1, 8..20), (3, 12..24)]);
}

#[test]
fn first_come_gives_all_to_the_first() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(1, 30, 1)).unwrap();
    scheduler.add(text(2, 30, 1)).unwrap();
    assert_eq!(shares(&mut scheduler), [(1, 0..16)]);
    assert_eq!(shares(&mut scheduler), [(1, 16..30)], "two tokens would be a sliver of the second");
    assert_eq!(shares(&mut scheduler), [(2, 0..16)]);
}

#[test]
fn the_first_has_half_and_the_shortest_the_rest() {
    let prefill_sharing = PrefillSharing::ShortestFirst;
    let mut scheduler = scheduler(set(config(), |settings| {
        settings.max_step_tokens = 24;
        settings.prefill_sharing = prefill_sharing;
    }));
    for (request, prompt) in [(1, 40), (2, 20), (3, 2), (4, 30)] {
        scheduler.add(text(request, prompt, 1)).unwrap();
    }
    assert_eq!(
        shares(&mut scheduler),
        [(3, 0..2), (2, 0..8), (1, 0..12)],
        "12 and 10 are left, on a grid of four"
    );
    assert_eq!(shares(&mut scheduler), [(2, 8..20), (1, 12..24)]);
    assert_eq!(shares(&mut scheduler), [(1, 24..40), (4, 0..8)], "which the first needs no longer");
}

#[test]
fn where_there_is_less_than_a_chunk_for_each_they_take_turns() {
    let mut scheduler = scheduler(set(fair(), |settings| settings.max_step_tokens = 8));
    for request in 1..=4 {
        scheduler.add(text(request, 100, 1)).unwrap();
    }
    let requests = |shares: Vec<(u64, _)>| shares.into_iter().map(|(request, _)| request).collect::<Vec<_>>();
    let turns: Vec<_> = (0..3).map(|_| requests(shares(&mut scheduler))).collect();
    assert_eq!(turns, [[1, 2], [3, 4], [1, 2]]);
}

#[test]
fn a_long_prefill_is_capped_only_beside_others() {
    let capped = set(config(), |settings| settings.long_prefill_token_threshold = Some(8));
    let mut scheduler = scheduler(capped);
    scheduler.add(text(1, 36, 1)).unwrap();
    assert_eq!(shares(&mut scheduler), [(1, 0..16)]);
    scheduler.add(text(2, 6, 1)).unwrap();
    assert_eq!(shares(&mut scheduler), [(1, 16..24), (2, 0..6)]);
}

#[test]
fn prefill_beside_decodes_keeps_their_pace_and_alone_takes_all() {
    let target_itl_ms = Some(20);
    let mut scheduler = scheduler(set(config(), |settings| {
        settings.max_step_tokens = 64;
        settings.target_itl_ms = target_itl_ms;
    }));
    let run = |scheduler: &mut Scheduler| {
        let step = step(scheduler);
        let prefill = step.rows.iter().filter(|row| row.walk == TEXT).map(|row| row.positions.len()).sum();
        // A step has a fixed cost of 10 ms, and costs 1 ms per prefill token.
        let took = Duration::from_millis(10 + prefill as u64);
        let outcomes = common::words(&step);
        let _ = scheduler.commit(step, outcomes, took);
        prefill
    };
    scheduler.add(text(1, 4, 200)).unwrap();
    let _: Vec<usize> = (0..20).map(|_| run(&mut scheduler)).collect();
    scheduler.add(text(2, 400, 1)).unwrap();
    let prefilled: Vec<usize> = (0..30).map(|_| run(&mut scheduler)).collect();
    assert!(prefilled[15..].iter().all(|&tokens| tokens == 8), "10 ms are left, two pages: {prefilled:?}");
    scheduler.cancel(key(1));
    assert_eq!(run(&mut scheduler), 64);
}

#[test]
fn a_prompt_that_starts_alike_computes_the_rest() {
    let prompt: Vec<u32> = (0..14).collect();
    let mut scheduler = scheduler(config());
    scheduler.add(tokens(1, &prompt, 3)).unwrap();
    while !scheduler.is_empty() {
        let _ = shares(&mut scheduler);
    }
    assert_eq!((scheduler.load().pages_used, scheduler.load().pages_cached), (0, 4), "16 of 17 tokens");
    scheduler.add(tokens(2, &prompt, 1)).unwrap();
    let second = step(&mut scheduler);
    assert_eq!(second.rows[0].positions, 12..14);
    let ending = commit(&mut scheduler, second).remove(0).ending.unwrap();
    assert_eq!(ending.cached_tokens, 12);

    scheduler.add(tokens(3, &prompt[..12], 1)).unwrap();
    assert_eq!(shares(&mut scheduler), [(3, 8..12)], "at least one token is computed");
    let mut other = tokens(4, &prompt, 1);
    other.content.as_mut().unwrap().media.push(MediaMark { first: 5, digest: [1; 16] });
    scheduler.add(other).unwrap();
    assert_eq!(shares(&mut scheduler), [(4, 4..14)], "the first block is before its media");
    let mut scored = tokens(5, &prompt, 1);
    scored.content.as_mut().unwrap().may_reuse = false;
    scheduler.add(scored).unwrap();
    assert_eq!(shares(&mut scheduler), [(5, 0..14)]);
}

#[test]
fn a_cached_prefix_never_ends_inside_what_must_not_be_cut() {
    let prompt: Vec<u32> = (0..30).collect();
    let launch = |request| {
        let mut launch = tokens(request, &prompt, 1);
        launch.prefill = segments(0, &[(TEXT, 6), (AUDIO, 12), (TEXT, 12)], 1).prefill;
        launch
    };
    let mut scheduler = scheduler(set(config(), |settings| settings.max_step_tokens = 64));
    let mut short = tokens(1, &prompt[..16], 1);
    short.prefill = segments(0, &[(TEXT, 16)], 1).prefill;
    scheduler.add(short).unwrap();
    let _ = shares(&mut scheduler);
    scheduler.add(launch(2)).unwrap();
    assert_eq!(shares(&mut scheduler), [(2, 4..6)], "16 are known, but 6 to 18 are one segment");
}

#[test]
fn a_preempted_request_computes_everything_again_before_it_samples() {
    // The pool has eight pages of four tokens, and each request grows to six pages.
    let admission = Admission::Optimistic;
    let mut scheduler = scheduler(SchedulerConfig {
        pages: 9,
        ..set(config(), |settings| {
            settings.max_step_tokens = 8;
            settings.admission = admission;
        })
    });
    scheduler.add(text(1, 8, 16)).unwrap();
    scheduler.add(text(2, 8, 16)).unwrap();
    let mut preempted = Vec::new();
    let mut second = Vec::new();
    while !scheduler.is_empty() {
        let turn = scheduler.plan(Duration::ZERO);
        preempted.extend(turn.preempted);
        let step = turn.step.unwrap();
        let rows = step.rows.iter().filter(|row| row.key == key(2));
        second.extend(rows.map(|row| (row.positions.clone(), row.is_terminal())));
        let _ = commit(&mut scheduler, step);
    }
    assert_eq!(preempted, [key(2)], "the youngest");
    let again = second.iter().skip(1).position(|(positions, _)| positions.start == 0).unwrap() + 1;
    let known = second[again - 1].0.end + 1;
    assert_eq!(second[again], (0..8, false), "longer than the prompt of 8, and not yet terminal");
    assert_eq!(second[again + 1], (8..known, true));
    assert_eq!(scheduler.load().tally.preemptions, 1);
}

#[test]
fn a_priority_is_a_head_start_and_no_more() {
    let mut scheduler = scheduler(set(config(), |settings| settings.max_running_requests = Some(1)));
    scheduler.add(text(0, 4, HEAD_START as u32 + 10)).unwrap();
    let _ = shares(&mut scheduler);
    let mut low = text(1, 4, 1);
    low.priority = 1;
    scheduler.add(low).unwrap();
    scheduler.add(text(2, 4, 1)).unwrap();
    while scheduler.load().running == 1 && scheduler.load().steps < HEAD_START as u64 + 5 {
        let _ = shares(&mut scheduler);
    }
    scheduler.add(text(3, 4, 1)).unwrap();
    let mut order = Vec::new();
    while !scheduler.is_empty() {
        order.extend(shares(&mut scheduler).into_iter().map(|(request, _)| request));
    }
    order.retain(|request| *request != 0);
    assert_eq!(order, [2, 1, 3]);
}

#[test]
fn a_deadline_ends_a_request_in_every_state() {
    let mut scheduler = scheduler(set(config(), |settings| settings.max_running_requests = Some(1)));
    for request in [1, 2] {
        let launch = text(request, 4, 9);
        scheduler
            .add(tutti_scheduler::GraphLaunch { deadline: Some(Duration::from_secs(5)), ..launch })
            .unwrap();
    }
    let _ = shares(&mut scheduler);
    let late = scheduler.plan(Duration::from_secs(5));
    assert_eq!(late.endings.len(), 2);
    assert!(late.endings.iter().all(|ending| ending.outcome == Outcome::DeadlineExceeded));
    assert!(late.step.is_none() && scheduler.is_empty());
}

#[test]
fn partitions_take_turns() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(1, 4, 3)).unwrap();
    let mut talker = segments(2, &[(SPEECH, 4)], 3);
    talker.decode = Some(SPEECH_DECODE);
    scheduler.add(talker).unwrap();
    let mut walks = Vec::new();
    while !scheduler.is_empty() {
        let step = step(&mut scheduler);
        walks.push(step.batch_walk);
        let _ = commit(&mut scheduler, step);
    }
    let (mixed, decodes) = ([common::MIXED, SPEECH_MIXED], [DECODE, SPEECH_DECODE]);
    assert_eq!(walks, [mixed, decodes, decodes].concat());
}
