//! Tests with several steps in flight: requests that end or are preempted while they have rows in two steps, and steps
//! that never run.

mod common;

use std::time::Duration;

use common::{EOS, WORD, commit, config, key, scheduler, set, text, words};
use tutti_scheduler::{
    Finish, Outcome, RowOutcome, Scheduler, SchedulerConfig, StepPlan, Stopping, TransferError, Turn,
};
use tutti_settings::Admission;

fn two_in_flight() -> SchedulerConfig {
    SchedulerConfig { steps_in_flight: 2, ..config() }
}

fn step(scheduler: &mut Scheduler) -> StepPlan {
    scheduler.plan(Duration::ZERO).step.expect("something can run")
}

/// Returns the request and the start of each row, and true if the row continues a row in flight.
fn rows(step: &StepPlan) -> Vec<(u64, usize, bool)> {
    step.rows.iter().map(|row| (row.key.request.0, row.positions.start, row.continues)).collect()
}

#[test]
fn a_row_continues_the_row_that_samples_its_token_until_that_row_is_back() {
    let mut scheduler = scheduler(two_in_flight());
    scheduler.add(text(1, 20, 9)).unwrap();
    let first = step(&mut scheduler);
    let second = step(&mut scheduler);
    assert_eq!((rows(&first), rows(&second)), (vec![(1, 0, false)], vec![(1, 16, false)]));
    assert_eq!((first.rows[0].slot, second.rows[0].epoch.0), (second.rows[0].slot, 1));
    assert!(scheduler.plan(Duration::ZERO).step.is_none(), "two steps are in flight");
    let _ = commit(&mut scheduler, first);
    let third = step(&mut scheduler);
    assert_eq!(rows(&third), [(1, 20, true)]);
    let _ = commit(&mut scheduler, second);
    let _ = commit(&mut scheduler, third);
    let fourth = step(&mut scheduler);
    assert_eq!(rows(&fourth), [(1, 21, false)], "the token is known");
    scheduler.abort(fourth);
}

#[test]
fn a_row_prepared_before_its_input_is_known_continues_only_if_it_still_is_not() {
    let mut scheduler = scheduler(two_in_flight());
    scheduler.add(text(1, 4, 9)).unwrap();
    let first = step(&mut scheduler);
    scheduler.plan_ahead();
    let second = step(&mut scheduler);
    assert_eq!(rows(&second), [(1, 4, true)]);
    scheduler.plan_ahead();
    let _ = commit(&mut scheduler, first);
    let _ = commit(&mut scheduler, second);
    let third = step(&mut scheduler);
    assert_eq!((rows(&third), scheduler.load().tally.rows_ahead), (vec![(1, 5, false)], 2));
    scheduler.abort(third);
}

#[test]
fn no_row_is_planned_beyond_max_tokens() {
    let mut scheduler = scheduler(SchedulerConfig { steps_in_flight: 4, ..config() });
    scheduler.add(text(1, 4, 2)).unwrap();
    let (first, second) = (step(&mut scheduler), step(&mut scheduler));
    assert!(scheduler.plan(Duration::ZERO).step.is_none());
    let _ = commit(&mut scheduler, first);
    assert!(scheduler.plan(Duration::ZERO).step.is_none());
    let ending = commit(&mut scheduler, second).remove(0).ending.unwrap();
    assert_eq!(ending.outcome, Outcome::Finished { reason: Finish::Length, generated: 2 });
}

#[test]
fn the_rows_behind_an_end_are_void_and_the_planes_are_held_until_they_are_back() {
    for fails in [false, true] {
        let mut scheduler = scheduler(two_in_flight());
        let stopping = Stopping::new(9, 0, &[EOS], &[]);
        scheduler.add(tutti_scheduler::GraphLaunch { stopping, ..text(1, 4, 9) }).unwrap();
        scheduler.add(text(2, 4, 9)).unwrap();
        let (first, second) = (step(&mut scheduler), step(&mut scheduler));
        let used = scheduler.load().pages_used;
        let ends = if fails { RowOutcome::Failed("NaN".into()) } else { RowOutcome::Sampled(EOS) };
        let commits = scheduler.commit(first, vec![ends, RowOutcome::Sampled(WORD)], Duration::ZERO);
        assert_eq!(commits[0].ending.as_ref().unwrap().passes.0, u32::from(!fails));
        let load = scheduler.load();
        assert_eq!((load.running, load.pages_used, load.slots_used), (1, used, 2), "its planes drain");
        let commits = commit(&mut scheduler, second);
        let [void, sound] = &commits[..] else { panic!("{commits:?}") };
        assert!(void.is_void && void.sampled.is_none() && void.ending.is_none());
        assert!(!sound.is_void && sound.sampled.is_some_and(|token| token.index == 1));
        let load = scheduler.load();
        assert_eq!((load.pages_used, load.slots_used, load.tally.void_rows), (used / 2, 1, 1));
    }
}

#[test]
fn a_cancel_a_deadline_or_a_failed_transfer_ends_a_request_inside_two_steps() {
    type End = fn(&mut Scheduler);
    let ends: [(End, Outcome); 3] = [
        (|scheduler| scheduler.cancel(key(1)), Outcome::Cancelled),
        (|_| {}, Outcome::DeadlineExceeded),
        (
            |scheduler| scheduler.fail_transfer(key(1), TransferError::Lost("gone".into())),
            Outcome::TransferFailed(TransferError::Lost("gone".into())),
        ),
    ];
    for (end, outcome) in ends {
        let mut scheduler = scheduler(two_in_flight());
        let deadline = Some(Duration::from_millis(5));
        scheduler.add(tutti_scheduler::GraphLaunch { deadline, ..text(1, 20, 9) }).unwrap();
        let (first, second) = (step(&mut scheduler), step(&mut scheduler));
        end(&mut scheduler);
        let Turn { endings, step, .. } = scheduler.plan(Duration::from_millis(5));
        assert_eq!((endings.len(), &endings[0].outcome, endings[0].passes.0), (1, &outcome, 0));
        assert!(step.is_none() && scheduler.is_empty());
        assert!(commit(&mut scheduler, first)[0].is_void);
        assert_eq!(scheduler.load().slots_used, 1, "the second step uses it");
        scheduler.abort(second);
        let load = scheduler.load();
        assert_eq!((load.pages_used, load.slots_used, load.tally.void_rows), (0, 0, 1));
    }
}

#[test]
fn a_victim_inside_steps_is_left_out_and_preempted_once_its_rows_are_back() {
    // Each of the two requests takes two of the four pages, and needs a third page for its ninth position.
    let mut scheduler = scheduler(SchedulerConfig {
        pages: 5,
        ..set(two_in_flight(), |settings| {
            settings.admission = Admission::Optimistic;
            settings.no_prefix_cache = true;
        })
    });
    scheduler.add(text(1, 6, 5)).unwrap();
    scheduler.add(text(2, 5, 5)).unwrap();
    let first = step(&mut scheduler);
    let second = step(&mut scheduler);
    assert_eq!(rows(&second), [(1, 6, true), (2, 5, true)]);
    let _ = commit(&mut scheduler, first);
    let third = step(&mut scheduler);
    assert_eq!(rows(&third), [(1, 7, true), (2, 6, true)]);
    let _ = commit(&mut scheduler, second);
    let turn = scheduler.plan(Duration::ZERO);
    assert!(turn.preempted.is_empty() && turn.step.is_none(), "1 waits for a page, and 2 is left out");
    let _ = commit(&mut scheduler, third);
    let turn = scheduler.plan(Duration::ZERO);
    assert_eq!(turn.preempted, [key(2)]);
    let fourth = turn.step.unwrap();
    assert_eq!(rows(&fourth), [(1, 8, false)]);
    let _ = commit(&mut scheduler, fourth);
}

#[test]
fn an_aborted_step_gives_way_to_an_equal_one_while_the_step_before_it_runs() {
    let mut scheduler = scheduler(two_in_flight());
    scheduler.add(text(1, 20, 9)).unwrap();
    scheduler.add(text(2, 3, 9)).unwrap();
    let running = step(&mut scheduler);
    let aborted = step(&mut scheduler);
    let before = format!("{:?}", aborted.rows);
    scheduler.abort(aborted);
    let again = step(&mut scheduler);
    assert_eq!(format!("{:?}", again.rows), before);
    let _ = commit(&mut scheduler, running);
    let _ = commit(&mut scheduler, again);
}

#[test]
#[should_panic(expected = "in the order of their plans")]
fn a_later_step_is_not_committed_first() {
    let mut scheduler = scheduler(two_in_flight());
    scheduler.add(text(1, 20, 9)).unwrap();
    let _first = step(&mut scheduler);
    let second = step(&mut scheduler);
    let outcomes = words(&second);
    let _ = scheduler.commit(second, outcomes, Duration::ZERO);
}
