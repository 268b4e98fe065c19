//! Tests of slots and snapshots. The expected copies are worked out by hand.

mod common;

use std::{ops::Range, time::Duration};

use common::{WORD, commit, config, scheduler, set, tokens};
use tutti_proto::declaration::{ModelDeclaration, Plane, PlaneKind};
use tutti_scheduler::{
    GraphLaunch, GraphRole, OutputToken, Scheduler, SchedulerConfig, SlotCopy, SlotId, StepPlan,
};
use tutti_settings::Admission;

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

fn step(scheduler: &mut Scheduler) -> StepPlan {
    scheduler.plan(Duration::ZERO).step.expect("something can run")
}

/// The positions of a row, and the copies of its step as pairs of source slot and destination slot.
type Ran = (Range<usize>, Vec<(u32, u32)>);

/// Runs the only request. Returns the positions and the copies of each of its rows.
fn run(scheduler: &mut Scheduler) -> Vec<Ran> {
    let mut rows = Vec::new();
    while !scheduler.is_empty() {
        let step = step(scheduler);
        let copies = step.copies.iter().map(|copy| (copy.from.0, copy.to.0)).collect();
        rows.push((step.rows[0].positions.clone(), copies));
        let _ = commit(scheduler, step);
    }
    rows
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| 100 + token).collect()
}

#[test]
fn chunks_stop_at_rungs_and_an_equal_prompt_resumes_behind_the_last_one() {
    let mut scheduler = hybrid(SchedulerConfig { slots: 20, ..config() });
    scheduler.add(tokens(1, &prompt(30), 1)).unwrap();
    let expected = [(0..16, vec![(0, 1)]), (16..28, vec![(1, 2)]), (28..30, vec![(1, 3)])];
    assert_eq!(run(&mut scheduler), expected);
    let load = scheduler.load();
    assert_eq!((load.slots_used, load.slots_cached, load.slots_total), (0, 2, 19));
    scheduler.add(tokens(2, &prompt(30), 1)).unwrap();
    assert_eq!(run(&mut scheduler), [(28..30, vec![(3, 1)])]);
    // A prompt that differs from position 22 on resumes after the last snapshot before that position, at 16. The page
    // boundary at 20 has no snapshot.
    let mut other = prompt(30);
    other[22] = 1;
    scheduler.add(tokens(3, &other, 1)).unwrap();
    assert_eq!(run(&mut scheduler), [(16..28, vec![(2, 1)]), (28..30, vec![(1, 4)])]);
}

#[test]
fn a_model_without_slot_planes_copies_nothing_and_is_not_cut() {
    let mut scheduler = scheduler(config());
    scheduler.add(tokens(1, &prompt(30), 1)).unwrap();
    assert_eq!(run(&mut scheduler), [(0..16, vec![]), (16..30, vec![])]);
    assert_eq!(scheduler.load().slots_cached, 0);
}

#[test]
fn without_the_prefix_cache_a_slot_is_set_to_zeros_and_never_saved() {
    let mut scheduler = hybrid(set(config(), |settings| settings.no_prefix_cache = true));
    scheduler.add(tokens(1, &prompt(30), 1)).unwrap();
    assert_eq!(run(&mut scheduler), [(0..16, vec![(0, 1)]), (16..30, vec![])]);
}

#[test]
fn a_request_needs_a_slot_and_takes_that_of_the_snapshot_unused_for_longest() {
    let mut scheduler = hybrid(SchedulerConfig { slots: 3, ..config() });
    // Besides the null slot there are two slots: the request's own, and one for all saves of the request in turn.
    scheduler.add(tokens(1, &prompt(26), 1)).unwrap();
    let expected = [(0..16, vec![(0, 1)]), (16..24, vec![(1, 2)]), (24..26, vec![(1, 2)])];
    assert_eq!(run(&mut scheduler), expected);
    assert_eq!((scheduler.load().slots_used, scheduler.load().slots_cached), (0, 1));
    let others = [prompt(40)[20..29].to_vec(), prompt(60)[40..49].to_vec(), prompt(80)[60..69].to_vec()];
    for (request, other) in (2..).zip(&others) {
        scheduler.add(tokens(request, other, 4)).unwrap();
    }
    let both = step(&mut scheduler);
    let copies: Vec<_> = both.copies.iter().map(|copy| (copy.from, copy.to)).collect();
    assert_eq!(copies, [(SlotId::NULL, SlotId(1)), (SlotId::NULL, SlotId(2))]);
    let load = scheduler.load();
    assert_eq!((load.running, load.waiting, load.slots_cached), (2, 1, 0), "the third request has no slot");
    scheduler.abort(both);
}

#[test]
fn a_step_that_never_ran_has_neither_begun_a_request_nor_saved_its_state() {
    let mut scheduler = hybrid(SchedulerConfig { slots: 20, ..config() });
    scheduler.add(tokens(1, &prompt(9), 1)).unwrap();
    let begins = step(&mut scheduler);
    let copies = begins.copies.clone();
    scheduler.abort(begins);
    let begins = step(&mut scheduler);
    assert_eq!((&begins.copies, copies.len()), (&copies, 1));
    let _ = commit(&mut scheduler, begins);
    let saves = step(&mut scheduler);
    let copies = saves.copies.clone();
    assert_eq!(copies, [SlotCopy { from: SlotId(1), to: SlotId(2) }]);
    scheduler.abort(saves);
    assert_eq!((scheduler.load().slots_used, scheduler.load().slots_cached), (1, 0));
    let saves = step(&mut scheduler);
    assert_eq!(saves.copies, copies);
    let _ = commit(&mut scheduler, saves);
    assert_eq!(scheduler.load().slots_cached, 1);
}

#[test]
fn a_snapshot_is_found_only_once_the_step_that_saves_it_is_committed() {
    let two_in_flight = SchedulerConfig { slots: 20, steps_in_flight: 2, ..config() };
    let mut scheduler = hybrid(set(two_in_flight, |settings| settings.max_step_tokens = 4));
    scheduler.add(tokens(1, &prompt(25), 1)).unwrap();
    for _ in 0..3 {
        let step = step(&mut scheduler);
        let _ = commit(&mut scheduler, step);
    }
    let (ends_at_rung, saves) = (step(&mut scheduler), step(&mut scheduler));
    assert_eq!(saves.copies, [SlotCopy { from: SlotId(1), to: SlotId(2) }]);
    let _ = commit(&mut scheduler, ends_at_rung);
    // These requests are more urgent, so they come first in order and follow no other request.
    let urgent = |request, priority| GraphLaunch { priority, ..tokens(request, &prompt(25), 1) };
    scheduler.add(urgent(2, -1)).unwrap();
    let zero = |step: &StepPlan| step.copies.iter().any(|copy| copy.from == SlotId::NULL);
    let turn = scheduler.plan(Duration::ZERO);
    let planned = turn.step.unwrap();
    assert!(zero(&planned), "the second one begins with the initial state");
    assert_eq!(scheduler.load().tally.cached_tokens, 0, "the blocks are cached, but their snapshot is not");
    let _ = commit(&mut scheduler, saves);
    scheduler.add(urgent(3, -2)).unwrap();
    let turn = scheduler.plan(Duration::ZERO);
    assert_eq!(scheduler.load().tally.cached_tokens, 16);
    let _ = commit(&mut scheduler, planned);
    turn.step.into_iter().for_each(|step| scheduler.abort(step));
}

#[test]
fn a_preempted_request_resumes_from_its_last_snapshot() {
    let mut scheduler = hybrid(SchedulerConfig {
        pages: 9,
        slots: 20,
        ..set(config(), |settings| settings.admission = Admission::Optimistic)
    });
    let (first, second) = (prompt(10), prompt(30)[20..30].to_vec());
    scheduler.add(tokens(1, &first, 14)).unwrap();
    scheduler.add(tokens(2, &second, 14)).unwrap();
    let mut preempted = false;
    let mut resumed = Vec::new();
    while !scheduler.is_empty() {
        let turn = scheduler.plan(Duration::ZERO);
        preempted |= !turn.preempted.is_empty();
        let step = turn.step.expect("a request goes on");
        let begins = step.rows.iter().filter(|row| preempted && row.key == common::key(2));
        let copies = begins.flat_map(|row| {
            let initial = step.copies.iter().filter(|copy| copy.to == row.slot);
            initial.map(|copy| (row.positions.start, copy.from != SlotId::NULL)).collect::<Vec<_>>()
        });
        resumed.extend(copies);
        let _ = commit(&mut scheduler, step);
    }
    let [(start, true)] = resumed[..] else { panic!("{resumed:?}") };
    assert!(start >= 8, "it resumes at {start}");
}

#[test]
fn pages_known_to_a_decoding_worker_need_no_snapshot() {
    let mut scheduler = hybrid(SchedulerConfig { slots: 4, ..config() });
    scheduler.add(tokens(1, &prompt(30), 1)).unwrap();
    let _ = run(&mut scheduler);
    scheduler.add(GraphLaunch { role: GraphRole::Decode, ..tokens(2, &prompt(30), 3) }).unwrap();
    let turn = scheduler.plan(Duration::ZERO);
    let [reserved] = &turn.reserved[..] else { panic!("{turn:?}") };
    assert_eq!(reserved.known, 7);
    assert!(reserved.slot != SlotId::NULL && turn.step.is_none());
    let slot = reserved.slot;
    scheduler.complete_import(common::key(2), OutputToken { token: WORD, index: 0 }, 30).unwrap();
    let decode = step(&mut scheduler);
    assert_eq!((decode.rows[0].slot, decode.rows[0].positions.clone()), (slot, 30..31));
    assert!(decode.copies.is_empty(), "the other worker has sent the state");
    scheduler.abort(decode);
}
