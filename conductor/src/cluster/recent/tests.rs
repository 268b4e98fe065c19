use tutti_runtime::ErrorKind;

use super::*;

const WORKER: Rank = Rank(3);

fn work() -> pb::StepWork {
    pb::StepWork { plan_us: 1, run_us: 20, commit_us: 3, tokens: 7, decode_rows: 2, ..Default::default() }
}

fn kinds(recent: &Recent, id: u64) -> Vec<&'static str> {
    let request = recent.find(RequestId(id)).unwrap();
    let name = |it: &pb::RequestTransition| match it.transition.as_ref().unwrap() {
        Transition::Accepted(_) => "accepted",
        Transition::Launched(_) => "launched",
        Transition::PrefillChunk(_) => "chunk",
        Transition::FirstToken(_) => "first",
        Transition::HandedOver(_) => "handed over",
        Transition::Replayed(_) => "replayed",
        Transition::Ended(_) => "ended",
    };
    request.transitions.iter().map(name).collect()
}

#[test]
fn steps_are_kept_only_while_somebody_asks() {
    let mut recent = Recent::default();
    let start = Instant::now();
    recent.step(WORKER, 1, &work(), Vec::new(), start);
    assert!(recent.steps_after(0).is_empty());
    recent.watch(start);
    recent.step(WORKER, 2, &work(), Vec::new(), start + WATCHED);
    assert_eq!(recent.steps_after(0).len(), 1);
    recent.step(WORKER, 3, &work(), Vec::new(), start + WATCHED + Duration::from_millis(1));
    assert!(recent.steps_after(0).is_empty());
}

#[test]
fn each_step_is_answered_once_and_the_oldest_go() {
    let mut recent = Recent::default();
    let now = Instant::now();
    recent.watch(now);
    let prefill = pb::PrefillRow { request: 9, tokens: 5 };
    for step in 0..STEPS as u64 + 1 {
        recent.step(WORKER, step, &work(), vec![prefill], now);
        recent.step(Rank(0), step, &work(), Vec::new(), now);
    }
    let all = recent.steps_after(0);
    assert_eq!(all.len(), 2 * STEPS);
    assert!(all.is_sorted_by(|a, b| a.sequence < b.sequence));
    let first = &all[0];
    assert_eq!((first.worker, first.step, first.took_us, first.tokens), (3, 1, 24, 7));
    assert_eq!(first.prefills, [prefill]);
    let known = all[2 * STEPS - 3].sequence;
    assert_eq!(recent.steps_after(known).len(), 2);
    recent.gone(WORKER);
    assert_eq!(recent.steps_after(0).len(), STEPS);
}

#[test]
fn a_request_has_its_transitions_in_order() {
    let mut recent = Recent::default();
    recent.watch(Instant::now());
    let (one, two) = (RequestId(1), RequestId(2));
    recent.accepted(one, 12, "client-1");
    recent.accepted(two, 3, "");
    recent.launched(one, GraphRole::Whole, Some(WORKER));
    recent.step(WORKER, 1, &work(), vec![pb::PrefillRow { request: 1, tokens: 5 }], Instant::now());
    recent.generated(one, 1);
    recent.generated(one, 2);
    recent.replayed(one);
    recent.launched(one, GraphRole::Whole, Some(Rank(0)));
    recent.generated(one, 1);
    recent.ended(one, EndingKind::Finished, "");
    let expected = ["accepted", "launched", "chunk", "first", "replayed", "launched", "first", "ended"];
    assert_eq!(kinds(&recent, 1), expected);
    assert_eq!(kinds(&recent, 2), ["accepted"]);
    let request = recent.find(one).unwrap();
    assert_eq!((request.prompt_tokens, request.generated), (12, 4));
    assert!(request.transitions.is_sorted_by_key(|it| it.at_us));
}

#[test]
fn ended_requests_and_the_transitions_of_all_are_bounded() {
    let mut recent = Recent::default();
    for id in 1..=ENDED as u64 + 5 {
        recent.accepted(RequestId(id), 1, "");
        recent.ended(RequestId(id), EndingKind::Finished, "");
    }
    assert_eq!(recent.ended.len(), ENDED);
    assert!(recent.find(RequestId(5)).is_none() && recent.find(RequestId(6)).is_some());
    // Reports of requests that are not recorded do nothing.
    recent.generated(RequestId(5), 1);
    recent.ended(RequestId(0), EndingKind::Cancelled, "");
    let last = RequestId(ENDED as u64 + 6);
    recent.accepted(last, 1, "");
    recent.watch(Instant::now());
    for step in 0..2 * CHUNKS as u64 {
        recent.step(
            WORKER,
            step,
            &work(),
            vec![pb::PrefillRow { request: last.0, tokens: 5 }],
            Instant::now(),
        );
    }
    recent.generated(last, 1);
    let after_chunks = kinds(&recent, last.0);
    assert_eq!((after_chunks.len(), after_chunks.last()), (CHUNKS + 1, Some(&"first")));
    for _ in 0..2 * TRANSITIONS {
        recent.replayed(last);
    }
    recent.ended(last, EndingKind::Cancelled, "");
    let kinds = kinds(&recent, last.0);
    assert_eq!((kinds.len(), kinds.last()), (TRANSITIONS + 1, Some(&"ended")));
}

#[test]
fn a_request_in_progress_is_in_every_answer_however_many_came_after_it() {
    let mut recent = Recent::default();
    let count = 3 * ENDED as u64;
    for id in 1..=count {
        recent.accepted(RequestId(id), 1, "");
        if ![1, 7, 500].contains(&id) {
            recent.ended(RequestId(id), EndingKind::Finished, "");
        }
    }
    let ids = |recent: &Recent| -> Vec<u64> {
        recent.running_and_last().iter().map(|request| request.request).collect()
    };
    let newest = || (count + 1 - ANSWERED as u64..=count).rev();
    assert_eq!(ids(&recent), newest().chain([500, 7, 1]).collect::<Vec<_>>());
    assert!(recent.accepted_us(RequestId(1)).is_some(), "it can be cancelled");
    // A late report does not bring an ended request back.
    recent.happened(RequestId(2), Transition::PrefillChunk(pb::PrefillChunk::default()));
    assert_eq!(ids(&recent), newest().chain([500, 7, 1]).collect::<Vec<_>>());
    // The end of an old request is seen, too.
    recent.ended(RequestId(7), EndingKind::Cancelled, "");
    assert_eq!(ids(&recent)[ANSWERED - 1..], [500, 7, 1]);
    assert_eq!(kinds(&recent, 7), ["accepted", "ended"]);
    // The oldest ones in progress are those that somebody looks for.
    let mut running = Recent::default();
    (1..=count).for_each(|id| running.accepted(RequestId(id), 1, ""));
    assert_eq!(ids(&running), (1..=ANSWERED_RUNNING as u64).rev().collect::<Vec<_>>());
    assert!(running.accepted_us(RequestId(count)).is_some(), "it can be cancelled");
}

#[test]
fn the_cause_of_a_failure_is_kept_up_to_a_bound() {
    let mut recent = Recent::default();
    recent.accepted(RequestId(1), 1, "");
    recent.ended(RequestId(1), EndingKind::Failed(ErrorKind::Internal), &"é".repeat(CAUSE_BYTES));
    let request = recent.find(RequestId(1)).unwrap();
    let Some(Transition::Ended(ended)) = &request.transitions.last().unwrap().transition else { panic!() };
    assert_eq!((ended.outcome.as_str(), ended.cause.as_str()), ("internal", &*"é".repeat(CAUSE_BYTES / 2)));
}
