//! The state machine of a colocated request. Whatever messages arrive, tokens stay in order, ranks must agree, and the
//! request ends once.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use proptest::prelude::*;
use tokio_stream::StreamExt;
use tutti_proto::{Rank, declaration::WalkId};
use tutti_runtime::{ErrorKind, output_room::OutputRoom};

mod death_properties;
mod disaggregated;
mod disaggregated_properties;
mod replay;
mod states;

use super::*;

const LEADER: WorkerId = WorkerId(10);
const FOLLOWER: WorkerId = WorkerId(11);

const MAX_TOKENS: u32 = 1000;

fn spec() -> pb::RequestSpec {
    let stopping = Some(pb::Stopping { max_tokens: MAX_TOKENS, ..Default::default() });
    let sampling = Some(pb::SamplingParams::GREEDY);
    let cache_salt = vec![9; 16];
    pb::RequestSpec { prompt: vec![1, 2, 3], sampling, stopping, cache_salt, ..Default::default() }
}

fn checked(spec: pb::RequestSpec) -> CheckedRequest {
    let model = pb::ModelDescription {
        vocab_size: 100,
        max_context_tokens: 4096,
        max_request_tokens: 4096,
        ..Default::default()
    };
    spec.check(&[], &model.request_limits()).unwrap()
}

/// A request that waits for its placement, and the receiver of its output.
fn accepted() -> (Request, mailbox::Receiver) {
    due(None)
}

fn due(deadline: Option<Deadline>) -> (Request, mailbox::Receiver) {
    let (sender, receiver) = mailbox::channel(&OutputRoom::default());
    let walks = TextWalks { prefill: WalkId(4), decode: WalkId(5) };
    let new = NewRequest {
        id: RequestId(7),
        spec: checked(spec()),
        deadline,
        walks,
        encoders: vec![],
        reservation: pb::PlaneReservation::default(),
        pieces: PromptPieces::uncut(3, 1),
        generated: vec![],
        max_replays: 0,
        output: sender,
        origin: Origin::default(),
    };
    (Request::accept(new), receiver)
}

fn now() -> Instant {
    Instant::now()
}

fn alone() -> Members {
    Members::from([(Rank(0), LEADER)])
}

fn pair() -> Members {
    Members::from([(Rank(0), LEADER), (Rank(1), FOLLOWER)])
}

fn running(placement: Members) -> (Request, mailbox::Receiver) {
    let (mut request, receiver) = accepted();
    request.launch(GraphRole::Whole, placement, now()).unwrap();
    (request, receiver)
}

fn key(graph: u32, incarnation: u32) -> Option<pb::GraphKey> {
    Some(pb::GraphKey { request: 7, incarnation, graph })
}

/// The key of the first try's first graph, paired with a worker as in `Effects`.
fn at(worker: WorkerId) -> (WorkerId, GraphKey) {
    (worker, GraphKey::from(key(0, 0).unwrap()))
}

/// A row of this epoch with these tokens.
fn row(epoch: u32, indices: &[u32]) -> pb::RowReport {
    let tokens =
        indices.iter().map(|index| pb::SampledToken { token_id: 100 + index, index: *index, logprob: None });
    pb::RowReport { key: key(0, 0), epoch, walk: 1, tokens: tokens.collect(), ..Default::default() }
}

fn finished(reason: pb::FinishReason, generated: u32) -> pb::completion::Outcome {
    pb::completion::Outcome::Finished(pb::Finished { reason: reason.into(), generated, ..Default::default() })
}

fn completion(rank: u32, epoch: u32, outcome: pb::completion::Outcome) -> pb::Completion {
    pb::Completion { key: key(0, 0), epoch, rank, outcome: Some(outcome) }
}

/// The tokens that the client has received, and the ending, if any.
fn read(receiver: &mut mailbox::Receiver) -> (Vec<u32>, Option<Result<pb::Finished, ErrorKind>>) {
    let mut indices = Vec::new();
    loop {
        match receiver.next().now_or_never() {
            Some(Some(Ok(event))) => {
                indices.extend(event.tokens.iter().map(|token| token.index));
                if let Some(finished) = event.finished {
                    return (indices, Some(Ok(finished)));
                }
            }
            Some(Some(Err(error))) => return (indices, Some(Err(error.kind()))),
            Some(None) | None => return (indices, None),
        }
    }
}

#[test]
fn tokens_flow_and_the_completion_ends_it() {
    let (mut request, mut receiver) = running(alone());
    assert_eq!(request.on_row(LEADER, row(0, &[0])).taken, 1);
    assert_eq!(request.on_row(LEADER, row(1, &[1])).taken, 1);
    let effects = request.on_completion(LEADER, completion(0, 2, finished(pb::FinishReason::Length, 2)));
    assert_eq!(effects.ended, Some(EndingKind::Finished));
    assert_eq!(effects.released, [at(LEADER)]);
    assert!(request.is_over());
    let (indices, ending) = read(&mut receiver);
    assert_eq!((indices, ending.unwrap().unwrap().generated), (vec![0, 1], 2));
}

#[test]
fn a_launch_names_the_graph_and_happens_once() {
    let (mut request, _receiver) = accepted();
    let launch = request.launch(GraphRole::Whole, alone(), now()).unwrap();
    assert_eq!((launch.key, launch.walks, launch.spec), (key(0, 0), vec![4, 5], Some(spec())));
    assert_eq!(request.launch(GraphRole::Whole, alone(), now()), None);
}

#[test]
fn tokens_seen_before_are_dropped_and_the_rest_taken() {
    let (mut request, mut receiver) = running(alone());
    request.on_row(LEADER, row(0, &[0, 1]));
    let outcome = request.on_row(LEADER, row(1, &[1, 2]));
    assert_eq!((outcome.taken, outcome.dropped), (1, 1));
    assert_eq!(read(&mut receiver).0, [0, 1, 2]);
}

#[test]
fn a_gap_fails_the_request_and_frees_the_worker() {
    let (mut request, mut receiver) = running(alone());
    request.on_row(LEADER, row(0, &[0]));
    let outcome = request.on_row(LEADER, row(2, &[2]));
    assert_eq!(outcome.effects.cancel, [at(LEADER)]);
    assert_eq!(read(&mut receiver), (vec![0], Some(Err(ErrorKind::Internal))));
    assert!(!request.is_over(), "the worker still holds it");
    let cancelled = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
    assert_eq!(request.on_completion(LEADER, completion(0, 2, cancelled)).released, [at(LEADER)]);
    assert!(request.is_over());
}

/// The fuzzer `tests/fuzz cluster` found this failure.
#[test]
fn a_worker_that_sends_more_tokens_than_were_asked_for_fails_the_request() {
    let (mut request, mut receiver) = running(alone());
    let all: Vec<u32> = (0..=MAX_TOKENS).collect();
    let outcome = request.on_row(LEADER, row(0, &all));
    assert_eq!((outcome.taken, outcome.dropped), (0, all.len()));
    assert_eq!(read(&mut receiver), (vec![], Some(Err(ErrorKind::Internal))));
}

#[test]
fn rows_of_another_try_graph_or_worker_are_dropped() {
    let (mut request, mut receiver) = running(pair());
    for stray in [
        pb::RowReport { key: key(0, 1), ..row(0, &[0]) },
        pb::RowReport { key: key(1, 0), ..row(0, &[0]) },
        pb::RowReport { key: None, ..row(0, &[0]) },
    ] {
        assert_eq!(request.on_row(LEADER, stray).dropped, 1);
    }
    assert_eq!(request.on_row(FOLLOWER, row(0, &[0])).dropped, 1, "only the leader's rows carry tokens");
    assert_eq!(read(&mut receiver), (vec![], None));
}

#[test]
fn prompt_logprobs_of_a_row_said_twice_come_once() {
    let (mut request, mut receiver) = running(alone());
    let chunk = || {
        let prompt_logprobs = pb::PromptLogprobs { first: 1, tokens: vec![pb::TokenLogprob::default()] };
        pb::RowReport { prompt_logprobs: Some(prompt_logprobs), ..row(0, &[]) }
    };
    request.on_row(LEADER, chunk());
    request.on_row(LEADER, chunk());
    let event = receiver.next().now_or_never().unwrap().unwrap().unwrap();
    assert_eq!(event.prompt_logprobs.len(), 1);
}

#[test]
fn completions_that_match_nothing_pending_are_dropped() {
    let (mut request, mut receiver) = running(pair());
    let done = |graph, incarnation, rank| {
        let outcome = finished(pb::FinishReason::Length, 0);
        pb::Completion { key: key(graph, incarnation), ..completion(rank, 1, outcome) }
    };
    let mut dropped = |from, completion| request.on_completion(from, completion).dropped;
    assert_eq!(dropped(LEADER, done(1, 0, 0)), Some(Dropped::Unknown), "not launched yet");
    assert_eq!(dropped(LEADER, done(0, 1, 0)), Some(Dropped::Unknown), "not tried yet");
    assert_eq!(dropped(LEADER, done(0, 0, 1)), Some(Dropped::Unknown), "another worker's rank");
    assert_eq!(dropped(LEADER, done(0, 0, 5)), Some(Dropped::Unknown), "no such rank");
    assert_eq!(dropped(LEADER, done(0, 0, 0)), None);
    assert_eq!(dropped(LEADER, done(0, 0, 0)), Some(Dropped::Duplicate));
    let effects = request.on_completion(FOLLOWER, done(0, 0, 1));
    assert_eq!(effects.ended, Some(EndingKind::Finished), "all ranks are done");
    assert_eq!(request.on_completion(LEADER, done(0, 0, 0)).dropped, Some(Dropped::Stale));
    assert_eq!(read(&mut receiver).0, [0u32; 0]);
}

#[test]
fn a_finish_of_an_earlier_pass_is_stale() {
    let (mut request, _receiver) = running(alone());
    request.on_row(LEADER, row(0, &[0]));
    request.on_row(LEADER, row(1, &[1]));
    let stale = completion(0, 1, finished(pb::FinishReason::Length, 1));
    assert_eq!(request.on_completion(LEADER, stale).dropped, Some(Dropped::Stale));
    assert!(request.is_live());
}

#[test]
fn disagreement_about_the_last_token_is_a_failure() {
    for generated in [0, 2] {
        let (mut request, mut receiver) = running(alone());
        request.on_row(LEADER, row(0, &[0]));
        request.on_completion(LEADER, completion(0, 1, finished(pb::FinishReason::Length, generated)));
        assert!(request.is_over());
        assert_eq!(read(&mut receiver).1, Some(Err(ErrorKind::Internal)));
    }
}

#[test]
fn disagreement_between_ranks_is_a_failure() {
    let (mut request, mut receiver) = running(pair());
    request.on_completion(FOLLOWER, completion(1, 1, finished(pb::FinishReason::Length, 1)));
    request.on_row(LEADER, row(0, &[0]));
    request.on_completion(LEADER, completion(0, 1, finished(pb::FinishReason::EndOfSequence, 1)));
    assert_eq!(read(&mut receiver).1, Some(Err(ErrorKind::Internal)));
    assert!(request.is_over());
}

#[test]
fn one_ranks_failure_ends_it_and_the_others_are_cancelled() {
    let (mut request, mut receiver) = running(pair());
    let fault = pb::completion::Outcome::Failed(Error::invalid("prompt", "is too long").into());
    let effects = request.on_completion(FOLLOWER, completion(1, 0, fault));
    assert_eq!((effects.cancel, effects.released), (vec![at(LEADER)], vec![at(FOLLOWER)]));
    assert_eq!(read(&mut receiver).1, Some(Err(ErrorKind::InvalidArgument)));
    request.on_completion(LEADER, completion(0, 0, finished(pb::FinishReason::Length, 0)));
    assert!(request.is_over(), "a finish that crossed the cancel completes the graph, too");
}

#[test]
fn a_workers_refusal_is_distinguished_from_a_failure() {
    let (mut request, mut receiver) = running(alone());
    let fault = Error::new(ErrorKind::Overloaded, "72 requests are held, the limit is 72");
    let refused = pb::completion::Outcome::Refused(fault.into());
    let effects = request.on_completion(LEADER, completion(0, 0, refused));
    assert_eq!(effects.ended, Some(EndingKind::Refused(ErrorKind::Overloaded)));
    assert_eq!(read(&mut receiver).1, Some(Err(ErrorKind::Overloaded)));
    assert!(request.is_over());
}

#[test]
fn a_launch_says_how_much_time_is_left() {
    let came = now();
    let (mut request, _receiver) = due(Some(Deadline::new(came, 50).unwrap()));
    let launch = request.launch(GraphRole::Whole, alone(), came + Duration::from_millis(20)).unwrap();
    assert_eq!(launch.timeout_ms, Some(30));
    let (mut request, _receiver) = accepted();
    assert_eq!(request.launch(GraphRole::Whole, alone(), came).unwrap().timeout_ms, None);
}

/// The worker's timer and the conductor's race. The client must not see which one was first.
#[test]
fn a_deadline_has_the_same_words_whichever_process_sees_it_first() {
    let late = || completion(0, 0, pb::completion::Outcome::DeadlineExceeded(pb::DeadlineOutcome {}));
    let deadline = Deadline::new(now(), 50).unwrap();
    let (mut request, mut receiver) = due(Some(deadline));
    request.launch(GraphRole::Whole, alone(), now()).unwrap();
    request.on_completion(LEADER, late());
    let error = receiver.next().now_or_never().unwrap().unwrap().unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string()),
        (ErrorKind::DeadlineExceeded, deadline.error().to_string())
    );
    assert!(request.is_over());

    // A worker that gives up a request without a deadline is wrong.
    let (mut request, mut receiver) = running(alone());
    request.on_completion(LEADER, late());
    assert_eq!(read(&mut receiver), (vec![], Some(Err(ErrorKind::Internal))));
}

#[test]
fn a_cancel_is_told_once_and_waits_for_the_worker() {
    let (mut request, mut receiver) = running(alone());
    let effects = request.end_early(Ending::Cancelled);
    assert_eq!((effects.cancel, effects.ended), (vec![at(LEADER)], Some(EndingKind::Cancelled)));
    assert_eq!(request.end_early(Ending::Cancelled), Effects::default());
    assert_eq!(request.on_row(LEADER, row(0, &[0])).dropped, 1);
    assert_eq!(read(&mut receiver), (vec![], Some(Err(ErrorKind::Cancelled))));
    let effects = request.on_worker_lost(LEADER, "gone");
    assert_eq!((effects.released, effects.ended), (vec![at(LEADER)], None));
    assert!(request.is_over());
}

#[test]
fn a_lost_worker_fails_what_it_held_where_nothing_is_tried_again() {
    let (mut request, mut receiver) = running(pair());
    assert_eq!(request.on_worker_lost(WorkerId(99), "gone"), Effects::default());
    let effects = request.on_worker_lost(FOLLOWER, "worker 1 was lost");
    assert_eq!((effects.cancel, effects.released), (vec![at(LEADER)], vec![at(FOLLOWER)]));
    assert_eq!(read(&mut receiver).1, Some(Err(ErrorKind::Unavailable)));
    request.on_worker_lost(LEADER, "gone");
    assert!(request.is_over());
}

#[test]
fn nowhere_to_run_ends_a_waiting_request() {
    let (mut request, mut receiver) = accepted();
    assert!(request.end_early(Ending::Failed(Error::unavailable("no worker"))).cancel.is_empty());
    assert!(request.is_over());
    assert_eq!(read(&mut receiver).1, Some(Err(ErrorKind::Unavailable)));
}

/// Disturbances of a request's messages.
#[derive(Clone, Debug)]
enum Mischief {
    Deliver,
    Twice,
    Stale,
    OtherIncarnation,
}

fn mischief() -> impl Strategy<Value = Mischief> {
    prop_oneof![
        4 => Just(Mischief::Deliver),
        1 => Just(Mischief::Twice),
        1 => Just(Mischief::Stale),
        1 => Just(Mischief::OtherIncarnation),
    ]
}

proptest! {
    /// Repeated messages, old messages, messages of other tries, and the follower's completion arrive at any time. The
    /// client sees each token once, in order, and the right ending.
    #[test]
    fn mischief_changes_nothing(
        tokens in 1u32..12,
        plan in proptest::collection::vec(mischief(), 16),
        follower_at in 0usize..14,
        old in any::<prop::sample::Index>(),
    ) {
        let (mut request, mut receiver) = running(pair());
        let end = |rank| completion(rank, tokens, finished(pb::FinishReason::Length, tokens));
        let mut sent: Vec<pb::RowReport> = Vec::new();
        for index in 0..tokens {
            if follower_at == index as usize {
                request.on_completion(FOLLOWER, end(1));
                request.on_completion(FOLLOWER, end(1));
            }
            let honest = row(index, &[index]);
            match plan[index as usize] {
                Mischief::Deliver => {}
                Mischief::Twice => { request.on_row(LEADER, honest.clone()); }
                Mischief::Stale if !sent.is_empty() => {
                    request.on_row(LEADER, sent[old.index(sent.len())].clone());
                    let early = completion(0, index, finished(pb::FinishReason::Length, index));
                    if index > 0 {
                        request.on_completion(LEADER, pb::Completion { epoch: index - 1, ..early });
                    }
                }
                Mischief::Stale => {}
                Mischief::OtherIncarnation => {
                    request.on_row(LEADER, pb::RowReport { key: key(0, 1), ..honest.clone() });
                    request.on_completion(LEADER, pb::Completion { key: key(0, 1), ..end(0) });
                }
            }
            request.on_row(LEADER, honest.clone());
            sent.push(honest);
        }
        request.on_completion(LEADER, end(0));
        if follower_at >= tokens as usize {
            prop_assert!(request.is_live());
            request.on_completion(FOLLOWER, end(1));
        }
        prop_assert!(request.is_over());
        let (indices, ending) = read(&mut receiver);
        prop_assert_eq!(indices, (0..tokens).collect::<Vec<_>>());
        prop_assert_eq!(ending.unwrap().unwrap().generated, tokens);
    }

    /// For any sequence of events, there is one ending and no panic, and the request is over once all workers are gone.
    #[test]
    fn there_is_one_ending_whatever_happens(events in proptest::collection::vec((0u8..6, 0u32..4, 0u32..2), 0..40)) {
        let (mut request, mut receiver) = running(pair());
        let mut endings = 0;
        for (event, number, rank) in events {
            let from = if rank == 0 { LEADER } else { FOLLOWER };
            let effects = match event {
                0 => request.on_row(from, row(number, &[number])).effects,
                1 => request.on_completion(from, completion(rank, number, finished(pb::FinishReason::Length, number))),
                2 => request.on_completion(from, pb::Completion { outcome: None, ..completion(rank, number, finished(pb::FinishReason::Length, 0)) }),
                3 => request.end_early(Ending::Cancelled),
                4 => request.on_worker_lost(from, "gone"),
                _ => request.on_completion(from, completion(rank, number, finished(pb::FinishReason::Unspecified, number))),
            };
            endings += usize::from(effects.ended.is_some());
        }
        for worker in [LEADER, FOLLOWER] {
            endings += usize::from(request.on_worker_lost(worker, "gone").ended.is_some());
        }
        prop_assert!(request.is_over());
        prop_assert_eq!(endings, 1);
        prop_assert!(read(&mut receiver).1.is_some());
        prop_assert!(receiver.next().now_or_never().unwrap().is_none());
    }
}
