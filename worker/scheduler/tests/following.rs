//! Tests that requests with equal prompts that arrive together compute the prompt once.

mod common;

use std::time::Duration;

use common::{commit, config, key, scheduler, set, text, tokens};
use proptest::prelude::*;
use tutti_proto::{
    CacheSalt,
    declaration::{ModelDeclaration, Plane, PlaneKind},
};
use tutti_scheduler::{GraphLaunch, RowOutcome, Scheduler, SchedulerConfig, StepPlan};
use tutti_settings::{Admission, PrefillSharing};

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| 100 + token).collect()
}

/// A configuration whose running set holds all requests of a test.
fn wide() -> SchedulerConfig {
    let config = SchedulerConfig { pages: 4097, slots: 400, max_waiting_requests: 256, ..config() };
    set(config, |settings| (settings.max_step_tokens, settings.max_running_requests) = (256, Some(200)))
}

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

/// Runs all requests to their ends. Returns the number of positions that prefills computed.
fn prefilled(scheduler: &mut Scheduler, prompt: usize) -> usize {
    let mut tokens = 0;
    while !scheduler.is_empty() {
        let step = step(scheduler);
        let prefill =
            |row: &tutti_scheduler::Row| row.positions.end.min(prompt).saturating_sub(row.positions.start);
        tokens += step.rows.iter().map(prefill).sum::<usize>();
        let _ = commit(scheduler, step);
    }
    tokens
}

#[test]
fn choices_compute_the_whole_blocks_of_their_prompt_once() {
    for (n, length) in [(16, 830), (64, 830), (128, 830), (128, 832), (3, 4), (16, 5)] {
        let mut scheduler = scheduler(wide());
        (0..n).for_each(|request| scheduler.add(tokens(request, &prompt(length), 4)).unwrap());
        let whole = (length - 1) / 4 * 4;
        let expected = length + (n as usize - 1) * (length - whole);
        assert_eq!(prefilled(&mut scheduler, length), expected, "{n} choices of {length} tokens");
        let tally = scheduler.load().tally;
        assert_eq!((tally.prefill_tokens - tally.cached_tokens) as usize, expected);
    }
}

/// A scheduler for a model with keys and values in pages, and a state in slots.
fn hybrid(config: SchedulerConfig) -> Scheduler {
    let page_tokens = config.page_tokens as u32;
    let plane = |name: &str, kind| Plane { name: name.into(), kind };
    let planes = vec![
        plane(
            "kv",
            PlaneKind::Paged {
                page_tokens,
                ratio: 1,
                bytes_per_entry: 64,
                element_type: tutti_proto::cluster::v1::ElementType::Unspecified,
            },
        ),
        plane("state", PlaneKind::Slot { bytes: 96 }),
    ];
    let model = common::model();
    let model = ModelDeclaration::new(model.nodes().to_vec(), model.walks().to_vec(), planes);
    Scheduler::new(config, &model.expect("the planes are consistent")).expect("something can run")
}

#[test]
fn choices_of_a_model_with_state_begin_from_the_last_snapshot_of_the_first() {
    let mut scheduler = hybrid(wide());
    (0..64).for_each(|request| scheduler.add(tokens(request, &prompt(830), 4)).unwrap());
    assert_eq!(prefilled(&mut scheduler, 830), 830 + 63 * 2);
    // With one slot besides the null slot, no snapshot can be kept, so nothing is shared. Each request computes its
    // whole prompt.
    let mut scheduler = hybrid(SchedulerConfig { slots: 2, ..wide() });
    (0..3).for_each(|request| scheduler.add(tokens(request, &prompt(30), 1)).unwrap());
    assert_eq!(prefilled(&mut scheduler, 30), 90);
}

#[test]
fn the_others_begin_as_soon_as_the_shared_blocks_are_computed() {
    let mut scheduler = scheduler(config());
    let mut other = prompt(40);
    other[20] = 7;
    scheduler.add(tokens(1, &prompt(40), 1)).unwrap();
    scheduler.add(tokens(2, &other, 1)).unwrap();
    assert_eq!(shares(&mut scheduler), [(1, 0..16)]);
    assert_eq!(scheduler.load().waiting, 1);
    assert_eq!(shares(&mut scheduler), [(1, 16..32)]);
    // The first five blocks are equal.
    assert_eq!(shares(&mut scheduler), [(1, 32..40), (2, 20..28)]);
    assert_eq!(shares(&mut scheduler), [(2, 28..40)]);
}

#[test]
fn followers_delay_no_other_request() {
    let mut scheduler = scheduler(config());
    for request in [1, 2, 3] {
        scheduler.add(tokens(request, &prompt(40), 1)).unwrap();
    }
    scheduler.add(text(4, 4, 1)).unwrap();
    assert_eq!(shares(&mut scheduler), [(1, 0..16)]);
    let load = scheduler.load();
    assert_eq!((load.running, load.waiting), (2, 2));
}

#[test]
fn a_follower_goes_on_alone_if_its_leader_ends() {
    let mut scheduler = scheduler(wide());
    for request in [1, 2, 3] {
        scheduler.add(tokens(request, &prompt(600), 1)).unwrap();
    }
    assert_eq!(shares(&mut scheduler), [(1, 0..256)]);
    scheduler.cancel(key(1));
    // The blocks that the leader has computed stay cached. The next request leads.
    assert_eq!(shares(&mut scheduler), [(2, 256..512)]);
    assert_eq!(shares(&mut scheduler), [(2, 512..600)]);
    assert_eq!(shares(&mut scheduler), [(3, 596..600)]);
    assert!(scheduler.is_empty());
}

#[test]
fn a_failed_leader_takes_no_follower_with_it() {
    let mut scheduler = scheduler(wide());
    for request in [1, 2] {
        scheduler.add(tokens(request, &prompt(600), 1)).unwrap();
    }
    let first = step(&mut scheduler);
    let failed = vec![RowOutcome::Failed("a fault".into()); first.rows.len()];
    let _ = scheduler.commit(first, failed, Duration::ZERO);
    assert_eq!(prefilled(&mut scheduler, 600), 600);
}

#[test]
fn an_urgent_request_waits_for_no_later_one() {
    let mut scheduler = scheduler(config());
    scheduler.add(tokens(1, &prompt(40), 1)).unwrap();
    scheduler.add(GraphLaunch { priority: -1, ..tokens(2, &prompt(40), 1) }).unwrap();
    assert_eq!(shares(&mut scheduler), [(2, 0..16)], "the urgent one is first and leads");
    scheduler.add(GraphLaunch { priority: -2, ..tokens(3, &prompt(40), 1) }).unwrap();
    // Request 3 begins behind the cached blocks at once. It is earlier in order than the leader and waits for none of
    // the leader's rows.
    assert_eq!(shares(&mut scheduler)[0], (3, 16..32));
}

#[test]
fn a_scored_prompt_is_computed_whole_and_can_be_followed() {
    let mut scheduler = scheduler(wide());
    let scored = |request| {
        let mut launch = tokens(request, &prompt(600), 1);
        launch.content.iter_mut().for_each(|content| content.may_reuse = false);
        launch
    };
    scheduler.add(scored(1)).unwrap();
    scheduler.add(scored(2)).unwrap();
    scheduler.add(tokens(3, &prompt(600), 1)).unwrap();
    assert_eq!(prefilled(&mut scheduler, 600), 600 + 600 + 4);
}

#[test]
fn requests_with_unequal_salts_neither_wait_for_one_another_nor_find_one_another_s_blocks() {
    for mut scheduler in [scheduler(wide()), hybrid(wide())] {
        let salts = [CacheSalt::default(), CacheSalt::new([1; 16]), CacheSalt::new([2; 16])];
        let salted = |request| {
            let mut launch = tokens(request, &prompt(80), 1);
            launch.content.iter_mut().for_each(|content| content.salt = salts[request as usize % 3]);
            launch
        };
        // The first three arrive together, and the others find what these have computed.
        (0..3).for_each(|request| scheduler.add(salted(request)).unwrap());
        assert_eq!(shares(&mut scheduler).len(), 3, "nobody waits");
        let rest = prefilled(&mut scheduler, 80);
        assert_eq!(
            (scheduler.load().tally.prefill_tokens, scheduler.load().tally.cached_tokens),
            (240, 0),
            "{rest}"
        );
        (3..6).for_each(|request| scheduler.add(salted(request)).unwrap());
        prefilled(&mut scheduler, 80);
        assert!(scheduler.load().tally.cached_tokens >= 3 * 64, "each salt has blocks of its own");
    }
}

#[test]
fn without_the_prefix_cache_each_choice_computes_its_prompt() {
    let mut scheduler = scheduler(set(wide(), |settings| settings.no_prefix_cache = true));
    (0..4).for_each(|request| scheduler.add(tokens(request, &prompt(100), 1)).unwrap());
    assert_eq!(prefilled(&mut scheduler, 100), 400);
}

proptest! {
    /// Plays choices of several prompts, some of them with equal starts, under all policies. Every request ends, and
    /// the prefills compute as many tokens as if the requests had arrived one after another.
    #[test]
    fn equal_prompts_cost_what_they_would_one_after_another(
        prompts in proptest::collection::vec((1_usize..200, 0_usize..200, 1_u64..12), 1..6),
        budget in 4_usize..64,
        sharing in prop_oneof![
            Just(PrefillSharing::ShortestFirst), Just(PrefillSharing::Fair), Just(PrefillSharing::FirstCome)
        ],
        optimistic in any::<bool>(),
        steps_in_flight in 1_usize..3,
    ) {
        let config = set(SchedulerConfig { steps_in_flight, ..wide() }, |settings| {
            settings.max_step_tokens = budget;
            settings.prefill_sharing = sharing;
            settings.admission = if optimistic { Admission::Optimistic } else { Admission::WholeLife };
        });
        let launch = |request: u64, family: usize, (length, alike, _): (usize, usize, u64)| {
            let first = |index: usize| if index < alike { 100 } else { 1000 * (family as u32 + 1) };
            let own = |index: usize| first(index) + index as u32;
            tokens(request, &(0..length).map(own).collect::<Vec<_>>(), 3)
        };
        let play = |at_once: bool| {
            let mut scheduler = scheduler(config.clone());
            let mut request = 0;
            for (family, &prompt) in prompts.iter().enumerate() {
                for _ in 0..prompt.2 {
                    scheduler.add(launch(request, family, prompt)).unwrap();
                    request += 1;
                    if !at_once {
                        while !scheduler.is_empty() {
                            let step = step(&mut scheduler);
                            let _ = commit(&mut scheduler, step);
                        }
                    }
                }
            }
            let mut steps = 0;
            while !scheduler.is_empty() {
                let step = step(&mut scheduler);
                let _ = commit(&mut scheduler, step);
                steps += 1;
                assert!(steps < 20_000, "requests do not end");
            }
            let tally = scheduler.load().tally;
            tally.prefill_tokens - tally.cached_tokens
        };
        prop_assert_eq!(play(true), play(false));
    }
}
