//! Tests of requests whose tokens depend on masks: requests that wait for a mask, and rows whose mask is late.

mod common;

use std::time::Duration;

use common::{EOS, commit, config, key, scheduler, set, text, words};
use tutti_scheduler::{
    ConstraintFailure, FailureCause, Finish, GraphLaunch, NotSampled, Outcome, RowOutcome, Scheduler,
    SchedulerConfig, StepPlan, Stopping,
};
use tutti_settings::Admission;

fn masked(request: u64, prompt: usize, max_tokens: u32) -> GraphLaunch {
    GraphLaunch { is_masked: true, ..text(request, prompt, max_tokens) }
}

fn failure(why: &str) -> ConstraintFailure {
    ConstraintFailure { cause: FailureCause::Constraint, why: why.into() }
}

fn plan(scheduler: &mut Scheduler) -> Option<StepPlan> {
    scheduler.plan(Duration::ZERO).step
}

fn requests(step: &StepPlan) -> Vec<u64> {
    step.rows.iter().map(|row| row.key.request.0).collect()
}

fn late(scheduler: &mut Scheduler, step: StepPlan, request: u64) {
    let outcome = |(row, word): (&tutti_scheduler::Row, RowOutcome)| match row.key == key(request) {
        true => RowOutcome::NotSampled(NotSampled::Late),
        false => word,
    };
    let outcomes = step.rows.iter().zip(words(&step)).map(outcome).collect();
    for row in scheduler.commit(step, outcomes, Duration::ZERO) {
        assert!(row.ending.is_none() && !row.is_void);
        assert_eq!(row.sampled.is_none(), row.row.key == key(request));
    }
}

#[test]
fn a_request_holds_nothing_and_delays_no_other_until_its_first_mask_is_ready() {
    let mut scheduler = scheduler(config());
    scheduler.add(GraphLaunch { awaits_mask: true, ..masked(1, 8, 4) }).unwrap();
    assert!(plan(&mut scheduler).is_none());
    scheduler.add(text(2, 8, 4)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    assert_eq!((requests(&step), scheduler.load().waiting), (vec![2], 1));
    let _ = commit(&mut scheduler, step);
    scheduler.mask_ready(key(1));
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(requests(&step), [2, 1], "decodes come first");
    scheduler.abort(step);
}

#[test]
fn a_request_that_awaits_media_and_a_mask_waits_for_both() {
    for media_first in [false, true] {
        let mut scheduler = scheduler(config());
        let launch = GraphLaunch { awaits_mask: true, awaits_media: true, ..masked(1, 8, 4) };
        scheduler.add(launch).unwrap();
        if media_first {
            assert!(scheduler.media_here(key(1)));
        } else {
            scheduler.mask_ready(key(1));
        }
        assert!(plan(&mut scheduler).is_none());
        assert_eq!(scheduler.media_here(key(1)), !media_first, "media arrive once");
        scheduler.mask_ready(key(1));
        let step = plan(&mut scheduler).unwrap();
        scheduler.abort(step);
    }
}

#[test]
fn one_row_in_flight_samples_a_masked_token() {
    let mut scheduler = scheduler(SchedulerConfig { steps_in_flight: 3, ..config() });
    scheduler.add(masked(1, 20, 9)).unwrap();
    scheduler.add(text(2, 20, 9)).unwrap();
    let mut steps = Vec::new();
    while let Some(step) = plan(&mut scheduler) {
        steps.push(step);
    }
    let samples: Vec<u64> = steps
        .iter()
        .flat_map(|step| &step.rows)
        .filter(|row| row.is_terminal())
        .map(|row| row.key.request.0)
        .collect();
    assert_eq!(samples.iter().filter(|request| **request == 1).count(), 1, "{samples:?}");
    for step in steps {
        let _ = commit(&mut scheduler, step);
    }
    let step = plan(&mut scheduler).unwrap();
    assert!(step.rows.iter().all(|row| row.key != key(1) || !row.continues));
    scheduler.abort(step);
}

/// The engine makes the mask of the second row between the two steps. If the first row is late, the second one is void,
/// and both are planned again.
#[test]
fn a_request_that_runs_ahead_has_two_rows_in_flight() {
    for is_late in [false, true] {
        let mut scheduler = scheduler(SchedulerConfig { steps_in_flight: 3, ..config() });
        scheduler.add(masked(1, 8, 9)).unwrap();
        let prefill = plan(&mut scheduler).unwrap();
        let _ = commit(&mut scheduler, prefill);
        scheduler.run_ahead(key(1), true);
        let (first, second) = (plan(&mut scheduler).unwrap(), plan(&mut scheduler).unwrap());
        assert_eq!((first.rows[0].continues, second.rows[0].continues), (false, true));
        assert!(plan(&mut scheduler).is_none(), "a third row");
        if is_late {
            late(&mut scheduler, first, 1);
            let again = plan(&mut scheduler).unwrap();
            assert_eq!((again.rows[0].positions.clone(), again.rows[0].continues), (8..9, false));
            let void = vec![RowOutcome::NotSampled(NotSampled::Void)];
            assert!(scheduler.commit(second, void, Duration::ZERO)[0].ending.is_none());
            let next = plan(&mut scheduler).unwrap();
            assert_eq!((next.rows[0].positions.clone(), next.rows[0].epoch.0), (9..10, 2));
            let _ = commit(&mut scheduler, again);
            let _ = commit(&mut scheduler, next);
        } else {
            let _ = commit(&mut scheduler, first);
            let _ = commit(&mut scheduler, second);
        }
        assert_eq!(plan(&mut scheduler).unwrap().rows[0].positions, 10..11);
    }
}

#[test]
fn a_row_that_continues_a_late_one_can_be_aborted() {
    let mut scheduler = scheduler(SchedulerConfig { steps_in_flight: 2, ..config() });
    scheduler.add(masked(1, 8, 9)).unwrap();
    let prefill = plan(&mut scheduler).unwrap();
    let _ = commit(&mut scheduler, prefill);
    scheduler.run_ahead(key(1), true);
    let (first, second) = (plan(&mut scheduler).unwrap(), plan(&mut scheduler).unwrap());
    late(&mut scheduler, first, 1);
    scheduler.abort(second);
    let (again, next) = (plan(&mut scheduler).unwrap(), plan(&mut scheduler).unwrap());
    assert_eq!((again.rows[0].positions.clone(), again.rows[0].continues), (8..9, false));
    assert_eq!((next.rows[0].positions.clone(), next.rows[0].continues), (9..10, true));
    let _ = commit(&mut scheduler, again);
    let _ = commit(&mut scheduler, next);
    assert_eq!(plan(&mut scheduler).unwrap().rows[0].positions, 10..11);
}

#[test]
fn a_late_row_is_planned_again_as_if_it_had_not_been_there() {
    for steps_in_flight in [1, 2] {
        let mut scheduler = scheduler(SchedulerConfig { steps_in_flight, ..config() });
        scheduler.add(masked(1, 8, 3)).unwrap();
        let step = plan(&mut scheduler).unwrap();
        scheduler.plan_ahead();
        let _ = commit(&mut scheduler, step);
        for _ in 0..3 {
            let step = plan(&mut scheduler).unwrap();
            let row = &step.rows[0];
            assert_eq!((row.positions.clone(), row.epoch.0, row.is_terminal()), (8..9, 1, true));
            scheduler.plan_ahead();
            late(&mut scheduler, step, 1);
        }
        scheduler.await_mask(key(1));
        assert!(plan(&mut scheduler).is_none());
        scheduler.mask_ready(key(1));
        for _ in 0..2 {
            let step = plan(&mut scheduler).unwrap();
            let _ = commit(&mut scheduler, step);
        }
        assert!(scheduler.is_empty());
    }
}

#[test]
fn a_complete_output_ends_its_request_in_a_step_or_between_two() {
    let finished = |generated| Outcome::Finished { reason: Finish::Complete, generated };
    let mut scheduler = scheduler(config());
    scheduler.add(masked(1, 8, 9)).unwrap();
    scheduler.add(masked(2, 8, 9)).unwrap();
    scheduler.add(GraphLaunch { awaits_mask: true, generated: 3, ..masked(3, 8, 9) }).unwrap();
    let step = plan(&mut scheduler).unwrap();
    let _ = commit(&mut scheduler, step);
    let step = plan(&mut scheduler).unwrap();
    let complete = vec![
        RowOutcome::NotSampled(NotSampled::Complete),
        RowOutcome::NotSampled(NotSampled::ConstraintFailed(failure("no"))),
    ];
    let commits = scheduler.commit(step, complete, Duration::ZERO);
    let outcome = |index: usize| commits[index].ending.as_ref().unwrap().outcome.clone();
    assert_eq!((outcome(0), outcome(1)), (finished(1), Outcome::ConstraintFailed(failure("no"))));
    scheduler.complete_output(key(3));
    scheduler.complete_output(key(4));
    let endings = scheduler.plan(Duration::ZERO).endings;
    assert_eq!(endings.len(), 1);
    assert_eq!((endings[0].key, endings[0].outcome.clone()), (key(3), finished(3)));
    assert!(scheduler.is_empty());
}

#[test]
fn a_constraint_that_fails_between_steps_ends_its_request_with_rows_in_flight() {
    let mut scheduler = scheduler(config());
    scheduler.add(masked(1, 8, 9)).unwrap();
    let step = plan(&mut scheduler).unwrap();
    scheduler.fail_constraint(key(1), failure("too large"));
    let endings = scheduler.plan(Duration::ZERO).endings;
    assert_eq!(endings[0].outcome, Outcome::ConstraintFailed(failure("too large")));
    assert!(commit(&mut scheduler, step)[0].is_void);
    assert_eq!(scheduler.load().pages_used, 0);
}

/// Pages for a request that cannot use them yet would be taken from another one for nothing.
#[test]
fn a_request_that_awaits_its_mask_preempts_no_other() {
    let tight = set(SchedulerConfig { pages: 6, ..config() }, |settings| {
        settings.admission = Admission::Optimistic;
    });
    let mut scheduler = scheduler(tight);
    scheduler.add(masked(1, 7, 9)).unwrap();
    scheduler.add(text(2, 8, 4)).unwrap();
    for number in 0..4 {
        let turn = scheduler.plan(Duration::ZERO);
        assert!(turn.preempted.is_empty());
        let step = turn.step.unwrap();
        // Behind the second step, the pages of the first request are full, and none is free.
        assert_eq!(requests(&step), if number < 2 { vec![1, 2] } else { vec![2] });
        let commits = commit(&mut scheduler, step);
        assert_eq!(commits.iter().any(|row| row.ending.is_some()), number == 3);
        if number == 1 {
            scheduler.await_mask(key(1));
        }
    }
    scheduler.mask_ready(key(1));
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(requests(&step), [1]);
    scheduler.abort(step);
}

#[test]
fn min_tokens_can_be_waived() {
    let mut scheduler = scheduler(config());
    scheduler.add(GraphLaunch { stopping: Stopping::new(9, 5, &[EOS], &[]), ..masked(1, 8, 9) }).unwrap();
    let step = plan(&mut scheduler).unwrap();
    scheduler.waive_min_tokens(key(1));
    let commits = scheduler.commit(step, vec![RowOutcome::Sampled(EOS)], Duration::ZERO);
    let outcome = &commits[0].ending.as_ref().unwrap().outcome;
    assert_eq!(*outcome, Outcome::Finished { reason: Finish::EndOfSequence, generated: 1 });
}

#[test]
fn a_preempted_request_goes_on_awaiting_its_mask() {
    let tight = set(SchedulerConfig { pages: 6, ..config() }, |settings| {
        settings.admission = Admission::Optimistic;
    });
    let mut scheduler = scheduler(tight);
    scheduler.add(text(1, 8, 9)).unwrap();
    scheduler.add(masked(2, 4, 9)).unwrap();
    let mut preempted = false;
    scheduler.await_mask(key(2));
    for _ in 0..9 {
        let turn = scheduler.plan(Duration::ZERO);
        preempted |= !turn.preempted.is_empty();
        let Some(step) = turn.step else { break };
        assert_eq!(requests(&step), [1]);
        let _ = commit(&mut scheduler, step);
    }
    assert!(preempted);
    assert!(plan(&mut scheduler).is_none());
    scheduler.mask_ready(key(2));
    let step = plan(&mut scheduler).unwrap();
    assert_eq!(requests(&step), [2]);
    scheduler.abort(step);
}
