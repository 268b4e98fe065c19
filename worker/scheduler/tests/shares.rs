//! Tests of fair shares among several callers.

mod common;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use common::{TEXT, commit, config, scheduler, set, text, words};
use proptest::prelude::*;
use tutti_scheduler::{GraphLaunch, Scheduler, SchedulerConfig, ShareId, StepPlan};
use tutti_settings::{Admission, PrefillSharing};

fn step(scheduler: &mut Scheduler) -> StepPlan {
    scheduler.plan(Duration::ZERO).step.expect("something can run")
}

fn of(share: ShareId, launch: GraphLaunch) -> GraphLaunch {
    GraphLaunch { share, ..launch }
}

/// Runs steps until the request has ended. Returns the requests that ended, in order.
fn until(scheduler: &mut Scheduler, request: u64) -> Vec<u64> {
    let mut ended = Vec::new();
    while !ended.contains(&request) {
        let step = step(scheduler);
        let commits = commit(scheduler, step);
        ended.extend(commits.iter().filter_map(|commit| Some(commit.ending.as_ref()?.key.request.0)));
    }
    ended
}

#[test]
fn a_flood_of_one_share_delays_another_by_its_part() {
    let mut scheduler = scheduler(SchedulerConfig { max_waiting_requests: 600, ..config() });
    (0..500).for_each(|request| scheduler.add(of(1, text(request, 8, 8))).unwrap());
    let _ = until(&mut scheduler, 20);
    // Eight requests run at a time. A request of another share is admitted as soon as one of the eight ends.
    for request in [1000, 1001, 1002] {
        scheduler.add(of(2, text(request, 8, 8))).unwrap();
        let ahead = until(&mut scheduler, request).len() - 1;
        assert!(ahead <= 16, "{ahead} requests of the flood ended before {request}");
    }
    while !scheduler.is_empty() {
        let step = step(&mut scheduler);
        let _ = commit(&mut scheduler, step);
    }
}

#[test]
fn the_first_request_of_a_share_does_not_wait_for_an_end() {
    for admission in [Admission::WholeLife, Admission::Optimistic] {
        let config = SchedulerConfig { max_waiting_requests: 600, steps_in_flight: 2, ..config() };
        let mut scheduler = scheduler(set(config, |settings| settings.admission = admission));
        (0..500).for_each(|request| scheduler.add(of(1, text(request, 8, 100))).unwrap());
        let mut flying = VecDeque::from([step(&mut scheduler), step(&mut scheduler)]);
        let mut left_out = 0;
        for request in 1000..1004 {
            scheduler.add(of(2, text(request, 8, 1))).unwrap();
            let mut steps = 0;
            let mut ended = false;
            while !ended {
                let step = flying.pop_front().expect("a step is in flight");
                let commits = commit(&mut scheduler, step);
                ended = commits
                    .iter()
                    .any(|commit| commit.row.key.request.0 == request && commit.ending.is_some());
                let turn = scheduler.plan(Duration::ZERO);
                left_out += turn.preempted.len();
                flying.extend(turn.step);
                steps += 1;
            }
            assert!(steps <= 8, "{request} took {steps} steps, and a request of the flood takes 100");
        }
        assert!((1..=4).contains(&left_out), "{left_out} requests began again");
        while let Some(step) = flying.pop_front() {
            let _ = commit(&mut scheduler, step);
            flying.extend(scheduler.plan(Duration::ZERO).step);
        }
        assert!(scheduler.is_empty());
        assert_eq!(scheduler.load().pages_used, 0);
    }
}

#[test]
fn within_a_share_the_order_stays() {
    let mut scheduler = scheduler(set(config(), |settings| settings.max_running_requests = Some(1)));
    for request in 0..4 {
        scheduler
            .add(of(request % 2, GraphLaunch { priority: -(request as i32 / 2), ..text(request, 8, 2) }))
            .unwrap();
    }
    let mut ended = Vec::new();
    while !scheduler.is_empty() {
        let step = step(&mut scheduler);
        let commits = commit(&mut scheduler, step);
        ended.extend(commits.iter().filter_map(|commit| Some(commit.ending.as_ref()?.key.request.0)));
    }
    // The more urgent request of each share ends first.
    assert_eq!(ended, [2, 3, 0, 1]);
}

#[test]
fn prefills_of_two_shares_have_equal_parts_of_a_step() {
    for sharing in [PrefillSharing::ShortestFirst, PrefillSharing::Fair, PrefillSharing::FirstCome] {
        let mut scheduler = scheduler(set(config(), |settings| settings.prefill_sharing = sharing));
        (0..6).for_each(|request| scheduler.add(of(1, text(request, 40, 1))).unwrap());
        scheduler.add(of(2, text(6, 40, 1))).unwrap();
        let mut tokens = 0;
        for _ in 0..4 {
            let step = step(&mut scheduler);
            let row = step.rows.iter().find(|row| row.key.request.0 == 6);
            tokens += row.map_or(0, |row| row.positions.len());
            let _ = commit(&mut scheduler, step);
        }
        assert_eq!(tokens, 32, "{sharing:?}: half of four steps of 16 tokens");
    }
}

/// Runs a request of share 2 that decodes, then a flood of prompts of `flood` beside it. Returns the numbers of prefill
/// tokens of the steps, without those in which the costs are learnt. A step takes 10 ms, and 1 ms per prefill token.
fn prefilled_beside_a_decode(flood: ShareId) -> Vec<usize> {
    let config = SchedulerConfig { max_waiting_requests: 600, ..config() };
    let mut scheduler = scheduler(set(config, |settings| settings.max_step_tokens = 64));
    let mut prefilled = Vec::new();
    scheduler.add(of(2, text(1000, 4, 200))).expect("there is room");
    for number in 0..120 {
        if number == 20 {
            (0..500).for_each(|request| {
                scheduler.add(of(flood, text(request, 40, 2))).expect("there is room");
            });
        }
        let step = step(&mut scheduler);
        assert!(step.rows.iter().any(|row| row.key.request.0 == 1000), "each step has the decode");
        let prefill = step.rows.iter().filter(|row| row.walk == TEXT).map(|row| row.positions.len()).sum();
        prefilled.push(prefill);
        let outcomes = words(&step);
        let _ = scheduler.commit(step, outcomes, Duration::from_millis(10 + prefill as u64));
    }
    prefilled.split_off(40)
}

#[test]
fn a_flood_of_prompts_slows_the_decodes_of_another_share_by_a_factor() {
    let beside = prefilled_beside_a_decode(1);
    // 15 tokens make a step 2.5 times as long, and three pages have 12. One step in eight measures the decodes.
    assert!(beside.iter().all(|&tokens| tokens == 0 || (12..=15).contains(&tokens)), "{beside:?}");
    assert_eq!(beside.iter().filter(|tokens| **tokens == 0).count(), beside.len() / 8, "{beside:?}");
    let own = prefilled_beside_a_decode(2);
    assert!(own.iter().any(|&tokens| tokens > 50), "a share may delay its own decodes: {own:?}");
}

proptest! {
    /// While several shares wait, the numbers of tokens that were computed for them differ by no more than the running
    /// requests can take. A request that yielded computes tokens again, and these count again.
    #[test]
    fn shares_that_wait_are_given_equal_tokens(
        requests in proptest::collection::vec((0_u64..3, 1_usize..60, 1_u32..20), 10..120),
        running in 1_usize..8,
        budget in 8_usize..64,
    ) {
        let config = SchedulerConfig { max_waiting_requests: 200, ..config() };
        let mut scheduler = scheduler(set(config, |settings| {
            settings.max_running_requests = Some(running);
            settings.max_step_tokens = budget;
        }));
        let mut waiting = BTreeMap::<u64, usize>::new();
        for (request, &(share, prompt, output)) in requests.iter().enumerate() {
            scheduler.add(of(share, text(request as u64, prompt, output))).unwrap();
            *waiting.entry(share).or_default() += 1;
        }
        let (mut given, mut begun) = (BTreeMap::<u64, usize>::new(), vec![false; requests.len()]);
        while !scheduler.is_empty() {
            let step = step(&mut scheduler);
            for row in &step.rows {
                let request = row.key.request.0 as usize;
                let (share, ..) = requests[request];
                if !std::mem::replace(&mut begun[request], true) {
                    *waiting.entry(share).or_default() -= 1;
                }
                *given.entry(share).or_default() += row.positions.len();
            }
            let backlogged = waiting.iter().filter(|(_, left)| **left > 0);
            let given: Vec<usize> = backlogged.map(|(share, _)| given.get(share).copied().unwrap_or(0)).collect();
            if let (Some(least), Some(most)) = (given.iter().min(), given.iter().max()) {
                // A request has at most 60 prompt tokens and 20 output tokens. The bound counts each running request,
                // and one request that is admitted but has not begun.
                prop_assert!(most - least <= (60 + 20) * (running + 1), "{given:?}");
            }
            let _ = commit(&mut scheduler, step);
        }
    }
}
