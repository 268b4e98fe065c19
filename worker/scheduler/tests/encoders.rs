//! Tests of graphs that encode media, and of requests that wait for the embeddings of their media.

mod common;

use std::time::Duration;

use common::{AUDIO, commit, config, key, scheduler, segments, set, text, tokens, words};
use tutti_scheduler::{
    GraphLaunch, GraphRole, MediaMark, Outcome, OutputToken, RowOutcome, Scheduler, SchedulerConfig,
    StepPlan, Stopping,
};
use tutti_settings::Admission;

fn encode(request: u64, items: &[usize]) -> GraphLaunch {
    let items: Vec<_> = items.iter().map(|&tokens| (AUDIO, tokens)).collect();
    let stopping = Stopping::new(0, 0, &[], &[]);
    GraphLaunch { role: GraphRole::Encode, decode: None, stopping, ..segments(request, &items, 0) }
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    scheduler.plan(Duration::ZERO).step.expect("something can run")
}

/// Runs the next step. Returns the positions that each request computed.
fn shares(scheduler: &mut Scheduler) -> Vec<(u64, std::ops::Range<usize>)> {
    let step = step(scheduler);
    let shares = step.rows.iter().map(|row| (row.key.request.0, row.positions.clone())).collect();
    assert!(commit(scheduler, step).iter().all(|commit| commit.ending.is_none()));
    shares
}

#[test]
fn an_encoder_s_graph_runs_item_by_item_holds_no_page_and_stays_until_its_export_is_complete() {
    let mut scheduler =
        scheduler(SchedulerConfig { pages: 2, ..set(config(), |settings| settings.max_step_tokens = 16) });
    // The items have more tokens than the pool holds, and one item is larger than the budget of a step.
    scheduler.add(encode(1, &[6, 40, 3])).unwrap();
    let items = [(1, 0..6), (1, 6..46), (1, 46..49)];
    for item in items {
        assert!(scheduler.complete_export(key(1)).is_none());
        assert_eq!((shares(&mut scheduler), scheduler.load().pages_used), (vec![item], 0));
    }
    assert!(scheduler.plan(Duration::ZERO).step.is_none());
    assert_eq!(scheduler.load().running, 1);
    let ending = scheduler.complete_export(key(1)).unwrap();
    assert_eq!((ending.outcome, ending.passes.0), (Outcome::HandedOver { generated: 0 }, 3));
    assert!(scheduler.is_empty());
}

#[test]
fn an_encoder_s_row_that_fails_ends_its_graph_alone() {
    let mut scheduler = scheduler(config());
    scheduler.add(encode(1, &[4])).unwrap();
    scheduler.add(encode(2, &[4])).unwrap();
    let both = step(&mut scheduler);
    let mut outcomes = words(&both);
    outcomes[0] = RowOutcome::Failed("noise".into());
    let commits = scheduler.commit(both, outcomes, Duration::ZERO);
    let failed: Vec<_> = commits.iter().filter_map(|commit| commit.ending.as_ref()).collect();
    assert_eq!((failed.len(), failed[0].key), (1, key(1)));
    assert!(scheduler.complete_export(key(2)).is_some() && scheduler.is_empty());
}

#[test]
fn a_request_that_waits_for_media_delays_no_other_and_then_keeps_its_place_in_the_order() {
    let mut scheduler = scheduler(set(config(), |settings| settings.max_running_requests = Some(1)));
    let waits = |request| GraphLaunch { awaits_media: true, ..text(request, 8, 4) };
    for request in [1, 2] {
        scheduler.add(waits(request)).unwrap();
    }
    scheduler.add(text(3, 8, 4)).unwrap();
    scheduler.add(text(4, 8, 4)).unwrap();
    assert_eq!(scheduler.load().waiting, 4);
    assert_eq!(shares(&mut scheduler), [(3, 0..8)]);
    assert!(scheduler.media_here(key(2)) && !scheduler.media_here(key(2)) && !scheduler.media_here(key(3)));
    scheduler.cancel(key(1));
    scheduler.cancel(key(3));
    let turn = scheduler.plan(Duration::ZERO);
    let ended: Vec<_> = turn.endings.iter().map(|ending| ending.key).collect();
    assert_eq!(ended, [key(1), key(3)]);
    assert_eq!(turn.step.unwrap().rows[0].key, key(2), "it arrived before 4");
}

#[test]
fn a_request_whose_media_do_not_arrive_in_time_is_late() {
    let mut scheduler = scheduler(config());
    let deadline = Some(Duration::from_millis(5));
    scheduler.add(GraphLaunch { awaits_media: true, deadline, ..text(1, 8, 4) }).unwrap();
    assert!(scheduler.plan(Duration::from_millis(4)).endings.is_empty());
    let turn = scheduler.plan(Duration::from_millis(5));
    assert_eq!(turn.endings[0].outcome, Outcome::DeadlineExceeded);
    assert!(scheduler.is_empty() && !scheduler.media_here(key(1)));
}

#[test]
fn a_decode_that_could_not_encode_its_prompt_again_is_never_preempted() {
    let config = SchedulerConfig {
        pages: 9,
        ..set(config(), |settings| {
            settings.admission = Admission::Optimistic;
            settings.no_prefix_cache = true;
        })
    };
    let mut scheduler = scheduler(config);
    let mut handed = GraphLaunch { role: GraphRole::Decode, ..tokens(2, &[7; 8], 9) };
    handed.content.as_mut().unwrap().media = vec![MediaMark { first: 2, digest: [1; 16] }];
    scheduler.add(text(1, 8, 20)).unwrap();
    assert_eq!(shares(&mut scheduler), [(1, 0..8)]);
    scheduler.add(handed).unwrap();
    let turn = scheduler.plan(Duration::ZERO);
    assert_eq!(turn.reserved.len(), 1);
    scheduler.abort(turn.step.unwrap());
    assert_eq!(
        scheduler.load().pages_used,
        3 + 5,
        "pages for its whole life, though admission is optimistic"
    );
    scheduler.complete_import(key(2), OutputToken { token: common::WORD, index: 0 }, 8).unwrap();
    let mut ended = 0;
    while ended < 2 {
        let turn = scheduler.plan(Duration::ZERO);
        assert!(turn.preempted.is_empty(), "{:?}", turn.preempted);
        let step = turn.step.expect("a request goes on");
        ended += commit(&mut scheduler, step).iter().filter(|commit| commit.ending.is_some()).count();
    }
}
