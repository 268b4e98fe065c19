//! Regression tests: faults of other schedulers that this one must not have. The expected numbers are worked out by
//! hand.

mod common;

use std::time::Duration;

use common::{
    AUDIO, DECODE, EOS, MIXED, STOP, TEXT, WORD, commit, config, key, scheduler, segments, set, text, word,
};
use tutti_scheduler::{
    Ending, Finish, GraphLaunch, Outcome, PATIENCE, Refusal, RowOutcome, Scheduler, SchedulerConfig,
    StepPlan, Stopping,
};
use tutti_settings::Chunking;

fn step(scheduler: &mut Scheduler) -> StepPlan {
    let turn = scheduler.plan(Duration::ZERO);
    assert_eq!(turn.endings, []);
    turn.step.expect("something can run")
}

fn run(scheduler: &mut Scheduler) -> Vec<Ending> {
    let step = step(scheduler);
    commit(scheduler, step).into_iter().filter_map(|commit| commit.ending).collect()
}

/// Returns the number of tokens that each step computes until the only request ends.
fn prefill_lengths(config: SchedulerConfig, prompt: usize) -> Vec<usize> {
    let mut scheduler = scheduler(config);
    assert_eq!(scheduler.add(text(1, prompt, 1)), Ok(()));
    let mut lengths = Vec::new();
    while !scheduler.is_empty() {
        let step = step(&mut scheduler);
        lengths.push(step.tokens());
        let _ = commit(&mut scheduler, step);
    }
    lengths
}

#[test]
fn a_prompt_around_the_budget_ends_in_as_many_steps_as_it_takes() {
    assert_eq!(prefill_lengths(config(), 15), [15]);
    assert_eq!(prefill_lengths(config(), 16), [16]);
    assert_eq!(prefill_lengths(config(), 17), [16, 1]);
    let chunk = |max| set(config(), |settings| settings.max_prefill_chunk_size = Some(max));
    assert_eq!(prefill_lengths(chunk(1), 3), [1, 1, 1]);
    assert_eq!(prefill_lengths(chunk(7), 17), [4, 4, 4, 5], "chunks end with pages of 4");
    assert_eq!(prefill_lengths(chunk(3), 8), [3, 3, 2], "unless they are smaller than one");
    assert_eq!(prefill_lengths(chunk(64), 17), [16, 1], "a chunk is never larger than the step");
    assert_eq!(prefill_lengths(set(config(), |settings| settings.max_step_tokens = 1), 3), [1, 1, 1]);
    let whole = set(config(), |settings| settings.chunking = Chunking::Off);
    assert_eq!([15, 16, 17].map(|prompt| prefill_lengths(whole.clone(), prompt)), [[15], [16], [17]]);
}

#[test]
fn what_can_never_run_is_refused_with_the_numbers() {
    let mut scheduler = scheduler(SchedulerConfig { pages: 4, max_context: 100, ..config() });
    assert_eq!(scheduler.add(text(1, 0, 4)), Err(Refusal::EmptyPrompt));
    assert_eq!(scheduler.add(segments(1, &[], 4)), Err(Refusal::EmptyPrompt));
    assert_eq!(scheduler.add(text(1, 9, 4)), Err(Refusal::PoolTooSmall { needed: 4, total: 3 }));
    let context = Refusal::ContextTooSmall { prompt_tokens: 90, max_tokens: 11, max_context: 100 };
    assert_eq!(scheduler.add(text(1, 90, 11)), Err(context));
    let wrong = Refusal::WrongWalk { walk: MIXED, wanted: "a prefill" };
    assert_eq!(scheduler.add(segments(1, &[(MIXED, 3)], 1)), Err(wrong));
    let mut without_decode = text(1, 3, 2);
    without_decode.decode = None;
    assert_eq!(scheduler.add(without_decode), Err(Refusal::NoDecodeWalk { max_tokens: 2 }));
    assert!(scheduler.is_empty());

    assert_eq!(scheduler.add(text(1, 8, 4)), Ok(()), "three pages are enough for twelve tokens");
    assert_eq!(scheduler.add(text(1, 8, 4)), Err(Refusal::Duplicate(key(1))));
}

#[test]
fn a_full_queue_refuses_and_has_room_again_once_a_request_ends() {
    let bounds = SchedulerConfig {
        max_waiting_requests: 1,
        ..set(config(), |settings| settings.max_running_requests = Some(1))
    };
    let mut scheduler = scheduler(bounds);
    scheduler.add(text(1, 3, 1)).unwrap();
    scheduler.add(text(2, 3, 1)).unwrap();
    assert_eq!(scheduler.add(text(3, 3, 1)), Err(Refusal::QueueFull { held: 2, limit: 2 }));
    assert_eq!(run(&mut scheduler).len(), 1);
    assert_eq!(scheduler.add(text(3, 3, 1)), Ok(()));
}

#[test]
fn later_segments_are_charged_in_full() {
    let mut scheduler = scheduler(config());
    scheduler.add(segments(1, &[(TEXT, 5), (AUDIO, 12), (TEXT, 20)], 2)).unwrap();
    let mut rows = Vec::new();
    while !scheduler.is_empty() {
        let step = step(&mut scheduler);
        assert!(step.tokens() <= 16);
        rows.extend(step.rows.iter().map(|row| (row.walk, row.positions.clone(), row.is_terminal())));
        let _ = commit(&mut scheduler, step);
    }
    let expected = [
        (TEXT, 0..5, false),
        (AUDIO, 5..17, false),
        (TEXT, 17..32, false),
        (TEXT, 32..37, true),
        (DECODE, 37..38, true),
    ];
    assert_eq!(rows, expected);
}

#[test]
fn an_atomic_behind_chunkables_that_fill_every_step_waits_a_bounded_time() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(0, 1000, 1)).unwrap();
    scheduler.add(segments(1, &[(AUDIO, 10)], 1)).unwrap();
    let mut waited = 0;
    while !step_has(&mut scheduler, 1) {
        waited += 1;
    }
    assert_eq!(waited, PATIENCE);
}

#[test]
fn an_atomic_larger_than_the_budget_runs_alone_and_then_decodes_go_on() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(0, 3, 100)).unwrap();
    let _ = run(&mut scheduler);
    scheduler.add(segments(1, &[(AUDIO, 30)], 1)).unwrap();
    scheduler.add(segments(2, &[(AUDIO, 30)], 1)).unwrap();
    let mut served = Vec::new();
    for _ in 0..2 * PATIENCE + 2 {
        let step = step(&mut scheduler);
        served.push(step.rows.iter().map(|row| row.key.request.0).collect::<Vec<_>>());
        let _ = commit(&mut scheduler, step);
    }
    let pause = vec![vec![0]; PATIENCE as usize];
    assert_eq!(served, [pause.clone(), vec![vec![1]], pause, vec![vec![2]]].concat());
}

#[test]
fn a_whole_prefill_larger_than_the_budget_runs_alone_and_starves_nobody() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(0, 3, 100)).unwrap();
    let _ = run(&mut scheduler);
    let whole = |request| GraphLaunch { prefill_is_whole: true, ..text(request, 30, 1) };
    scheduler.add(whole(1)).unwrap();
    scheduler.add(whole(2)).unwrap();
    // A prompt that may be cut takes what the decode leaves of each step meanwhile.
    scheduler.add(text(3, 200, 1)).unwrap();
    let (mut whole_in, mut without) = (Vec::new(), [0; 2]);
    for number in 0..2 * PATIENCE + 2 {
        let step = step(&mut scheduler);
        for row in step.rows.iter().filter(|row| [1, 2].contains(&row.key.request.0)) {
            assert_eq!((row.positions.clone(), step.rows.len()), (0..30, 1), "in one step, alone");
            whole_in.push((number, row.key.request.0));
        }
        for (request, without) in [0, 3].into_iter().zip(&mut without) {
            *without += usize::from(step.rows.iter().all(|row| row.key.request.0 != request));
        }
        let _ = commit(&mut scheduler, step);
    }
    assert_eq!(whole_in, [(PATIENCE, 1), (2 * PATIENCE + 1, 2)], "each waits as long as it has patience");
    assert_eq!(without, [2, 2], "the others are left out of these two steps alone");
}

/// Runs one step. True if the request was in it.
fn step_has(scheduler: &mut Scheduler, request: u64) -> bool {
    let step = step(scheduler);
    let has = step.rows.iter().any(|row| row.key == key(request));
    let _ = commit(scheduler, step);
    has
}

#[test]
fn a_step_of_decodes_alone_takes_the_decode_walk() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(1, 3, 9)).unwrap();
    scheduler.add(text(2, 20, 9)).unwrap();
    let first = step(&mut scheduler);
    assert_eq!(first.batch_walk, MIXED);
    let _ = commit(&mut scheduler, first);
    let mixed = step(&mut scheduler);
    assert_eq!(mixed.batch_walk, MIXED);
    assert_eq!([mixed.rows[0].walk, mixed.rows[1].walk], [DECODE, TEXT], "rows keep their own walks");
    let _ = commit(&mut scheduler, mixed);
    let decodes = step(&mut scheduler);
    assert_eq!((decodes.batch_walk, decodes.rows.len()), (DECODE, 2));
    scheduler.abort(decodes);
}

#[test]
fn replayed_output_is_prefill_and_only_its_end_is_terminal() {
    let mut scheduler = scheduler(set(config(), |settings| settings.max_prefill_chunk_size = Some(6)));
    // The launch is that of a replayed request: a prompt of 4 tokens and 10 tokens of output. A chunk that ends inside
    // the output must not sample.
    let mut launch = text(1, 14, 11);
    launch.generated = 10;
    scheduler.add(launch).unwrap();
    let mut terminal = Vec::new();
    let mut last = Vec::new();
    while !scheduler.is_empty() {
        let step = step(&mut scheduler);
        terminal.extend(step.rows.iter().map(|row| (row.positions.clone(), row.is_terminal())));
        last = commit(&mut scheduler, step);
    }
    assert_eq!(terminal, [(0..4, false), (4..8, false), (8..14, true)]);
    assert_eq!(last[0].sampled.map(|token| token.index), Some(10), "indices go on where they were");
}

#[test]
fn no_output_wanted_means_nothing_is_sampled() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(1, 20, 0)).unwrap();
    assert_eq!(run(&mut scheduler), []);
    let step = step(&mut scheduler);
    assert!(!step.rows[0].is_terminal());
    let commits = scheduler.commit(step, vec![RowOutcome::Computed], Duration::ZERO);
    let ending = commits[0].ending.as_ref().unwrap();
    assert_eq!(ending.outcome, Outcome::Finished { reason: Finish::Length, generated: 0 });
    assert_eq!(ending.passes.0, 2);
}

#[test]
fn an_end_of_sequence_ends_after_min_tokens_only() {
    let mut scheduler = scheduler(config());
    let mut launch = text(1, 3, 9);
    launch.stopping = Stopping::new(9, 1, &[EOS], &[STOP]);
    scheduler.add(launch).unwrap();
    let first = step(&mut scheduler);
    let rows = format!("{:?}", first.rows[0].terminality);
    assert_eq!(rows, "Terminal { forbidden: [1, 2] }");
    let _ = scheduler.commit(first, vec![RowOutcome::Sampled(WORD)], Duration::ZERO);
    let second = step(&mut scheduler);
    let commits = scheduler.commit(second, vec![RowOutcome::Sampled(EOS)], Duration::ZERO);
    let ending = commits[0].ending.as_ref().unwrap();
    assert_eq!(ending.outcome, Outcome::Finished { reason: Finish::EndOfSequence, generated: 2 });
}

#[test]
fn an_aborted_step_leaves_every_row_where_it_was() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(1, 3, 9)).unwrap();
    scheduler.add(text(2, 40, 9)).unwrap();
    let _ = run(&mut scheduler);
    let aborted = step(&mut scheduler);
    let rows = |step: &StepPlan| format!("{:?}", step.rows);
    let (number, before) = (aborted.number, rows(&aborted));
    scheduler.abort(aborted);
    let again = step(&mut scheduler);
    assert_eq!(rows(&again), before);
    assert!(again.number > number);
    scheduler.abort(again);
}

#[test]
fn a_failed_row_ends_its_own_request_alone() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(1, 3, 9)).unwrap();
    scheduler.add(text(2, 3, 9)).unwrap();
    let both = step(&mut scheduler);
    let commits = scheduler.commit(
        both,
        vec![RowOutcome::Failed("NaN".into()), RowOutcome::Sampled(WORD)],
        Duration::ZERO,
    );
    let outcome = commits[0].ending.as_ref().map(|ending| &ending.outcome);
    assert_eq!(outcome, Some(&Outcome::Failed("NaN".into())));
    assert!(commits[1].ending.is_none());
    let next = step(&mut scheduler);
    assert_eq!(next.rows.iter().map(|row| row.key).collect::<Vec<_>>(), [key(2)]);
    scheduler.abort(next);
}

#[test]
fn a_cancel_frees_in_every_state() {
    let mut scheduler = scheduler(set(config(), |settings| settings.max_running_requests = Some(2)));
    scheduler.add(text(1, 3, 9)).unwrap(); // will decode
    scheduler.add(text(2, 100, 9)).unwrap(); // will prefill
    scheduler.add(text(3, 3, 9)).unwrap(); // will wait
    let _ = run(&mut scheduler);
    assert!(scheduler.load().pages_used > 0);
    for request in [1, 2, 3, 3] {
        scheduler.cancel(key(request));
    }
    let turn = scheduler.plan(Duration::ZERO);
    let ended: Vec<_> = turn.endings.iter().map(|ending| (ending.key, ending.outcome.clone())).collect();
    assert_eq!(ended, [1, 2, 3].map(|request| (key(request), Outcome::Cancelled)));
    assert!(turn.step.is_none());
    assert_eq!(scheduler.load().pages_used, 0);
}

#[test]
fn a_cancel_before_the_launch_sticks() {
    let mut scheduler = scheduler(config());
    scheduler.cancel(key(1));
    scheduler.add(text(1, 3, 9)).unwrap();
    let turn = scheduler.plan(Duration::ZERO);
    assert_eq!(turn.endings.len(), 1);
    assert!(turn.step.is_none() && scheduler.is_empty());
    scheduler.add(text(1, 3, 1)).unwrap();
    assert_eq!(run(&mut scheduler).len(), 1, "the cancel is used up by the first launch");
}

#[test]
fn a_request_cancelled_inside_a_step_ends_at_once_and_keeps_its_planes_until_the_step_is_back() {
    let mut scheduler = scheduler(config());
    scheduler.add(text(1, 3, 9)).unwrap();
    let flying = step(&mut scheduler);
    scheduler.cancel(key(1));
    let turn = scheduler.plan(Duration::ZERO);
    let ended: Vec<_> = turn.endings.iter().map(|ending| (ending.key, ending.passes.0)).collect();
    assert!(ended == [(key(1), 0)] && turn.step.is_none() && scheduler.is_empty());
    assert_eq!((scheduler.load().pages_used, scheduler.load().slots_used), (3, 1));
    let outcome = word(&flying.rows[0]);
    let commits = scheduler.commit(flying, vec![outcome], Duration::ZERO);
    assert!(commits[0].is_void && commits[0].sampled.is_none() && commits[0].ending.is_none());
    assert!(scheduler.plan(Duration::ZERO).endings.is_empty());
    let load = scheduler.load();
    assert_eq!((load.pages_used, load.slots_used, load.tally.void_rows), (0, 0, 1));
}

#[test]
fn small_requests_do_not_overtake_one_that_waits_for_pages() {
    let mut scheduler = scheduler(SchedulerConfig { pages: 9, ..config() });
    scheduler.add(text(1, 16, 4)).unwrap(); // needs 5 of 8 pages
    scheduler.add(text(2, 16, 4)).unwrap(); // needs 5 pages, must wait
    scheduler.add(text(3, 2, 2)).unwrap(); // needs 1 page, which is free
    let first = step(&mut scheduler);
    assert_eq!(first.rows.iter().map(|row| row.key).collect::<Vec<_>>(), [key(1)]);
    scheduler.abort(first);
    assert_eq!((scheduler.load().running, scheduler.load().waiting), (1, 2));
}
