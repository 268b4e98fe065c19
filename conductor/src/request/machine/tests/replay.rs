//! Replays of a request, case by case.

use std::time::Instant;

use futures_util::FutureExt;
use tokio_stream::StreamExt;
use tutti_proto::{Rank, declaration::WalkId};
use tutti_runtime::{ErrorKind, output_room::OutputRoom};

use super::{super::*, checked, spec};

pub(super) const PROMPT: u32 = 6;
const FIRST: WorkerId = WorkerId(1);
const SECOND: WorkerId = WorkerId(2);

pub(super) fn accepted(max_replays: u32) -> (Request, mailbox::Receiver) {
    accepted_for(max_replays, 100)
}

pub(super) fn accepted_for(max_replays: u32, max_tokens: u32) -> (Request, mailbox::Receiver) {
    let (sender, receiver) = mailbox::channel(&OutputRoom::default());
    let spec = pb::RequestSpec {
        prompt: vec![0; PROMPT as usize],
        stopping: Some(pb::Stopping { max_tokens, ..Default::default() }),
        ..spec()
    };
    let walks = TextWalks { prefill: WalkId(0), decode: WalkId(1) };
    let new = NewRequest {
        id: RequestId(7),
        spec: checked(spec),
        deadline: None,
        walks,
        encoders: vec![],
        reservation: pb::PlaneReservation { secret: vec![9; 16], lease_ms: 500 },
        pieces: PromptPieces::uncut(PROMPT as usize, 1),
        generated: vec![],
        max_replays,
        output: sender,
        origin: Origin::default(),
    };
    (Request::accept(new), receiver)
}

pub(super) fn at(worker: WorkerId) -> Members {
    Members::from([(Rank(0), worker)])
}

pub(super) fn row(key: Option<pb::GraphKey>, epoch: u32, index: u32) -> pb::RowReport {
    let tokens = vec![pb::SampledToken { token_id: 100 + index, index, logprob: None }];
    pb::RowReport { key, epoch, walk: 1, tokens, ..Default::default() }
}

pub(super) fn scores(key: Option<pb::GraphKey>, epoch: u32, first: u32, count: u32) -> pb::RowReport {
    let score = |index| pb::TokenLogprob { rank: index, ..Default::default() };
    let tokens = (first..first + count).map(score).collect();
    let prompt_logprobs = Some(pb::PromptLogprobs { first, tokens });
    pb::RowReport { key, epoch, prompt_logprobs, ..Default::default() }
}

pub(super) fn finish(key: Option<pb::GraphKey>, epoch: u32, rank: u32, generated: u32) -> pb::Completion {
    let reason = pb::FinishReason::EndOfSequence.into();
    let finished = pb::Finished { reason, generated, ..Default::default() };
    pb::Completion { key, epoch, rank, outcome: Some(pb::completion::Outcome::Finished(finished)) }
}

/// The client's view: indices of tokens, prompt tokens with logprobs, and the ending.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub tokens: Vec<u32>,
    pub scored: Vec<u32>,
    pub ending: Option<Result<pb::Finished, Error>>,
}

pub(super) fn read(receiver: &mut mailbox::Receiver) -> Seen {
    let mut seen = Seen::default();
    while let Some(Some(event)) = receiver.next().now_or_never() {
        match event {
            Ok(event) => {
                seen.tokens.extend(event.tokens.iter().map(|token| token.index));
                for piece in event.prompt_logprobs {
                    assert!(piece.tokens.iter().zip(piece.first..).all(|(score, index)| score.rank == index));
                    seen.scored.extend(piece.tokens.iter().map(|score| score.rank));
                }
                seen.ending = event.finished.map(Ok).or(seen.ending);
            }
            Err(error) => seen.ending = Some(Err(error)),
        }
    }
    seen
}

#[test]
fn a_lost_worker_is_a_pause() {
    let (mut request, mut receiver) = accepted(2);
    let key = request.launch(GraphRole::Whole, at(FIRST), Instant::now()).unwrap().key;
    request.on_row(FIRST, row(key, 0, 0));
    let effects = request.on_worker_lost(FIRST, "killed");
    assert!(effects.needs_placement && effects.replayed && effects.ended.is_none() && request.is_waiting());
    assert_eq!(effects.released, [(FIRST, key.unwrap().into())]);
    let again = request.launch(GraphRole::Whole, at(SECOND), Instant::now()).unwrap();
    assert_eq!((again.key.unwrap().incarnation, &again.generated), (1, &vec![100]));
    assert_eq!(request.on_row(FIRST, row(key, 1, 1)).dropped, 1, "a dead worker's late row");
    request.on_row(SECOND, row(again.key, 0, 1));
    assert_eq!(request.on_completion(FIRST, finish(key, 2, 0, 2)).dropped, Some(Dropped::Stale));
    request.on_completion(SECOND, finish(again.key, 1, 0, 2));
    let seen = read(&mut receiver);
    assert_eq!((seen.tokens, seen.ending.unwrap().unwrap().generated), (vec![0, 1], 2));
}

#[test]
fn cached_tokens_are_those_of_the_first_try() {
    let (mut request, mut receiver) = accepted(2);
    let key = request.launch(GraphRole::Whole, at(FIRST), Instant::now()).unwrap().key;
    request.on_row(FIRST, pb::RowReport { cached_tokens: Some(3), ..row(key, 0, 0) });
    request.on_worker_lost(FIRST, "killed");
    let key = request.launch(GraphRole::Whole, at(SECOND), Instant::now()).unwrap().key;
    request.on_row(SECOND, row(key, 0, 1));
    request.on_completion(SECOND, finish(key, 1, 0, 2));
    assert_eq!(read(&mut receiver).ending.unwrap().unwrap().cached_tokens, 3);
}

#[test]
fn prompt_logprobs_come_once_though_the_prompt_is_computed_again() {
    let (mut request, mut receiver) = accepted(2);
    let key = request.launch(GraphRole::Whole, at(FIRST), Instant::now()).unwrap().key;
    request.on_row(FIRST, scores(key, 0, 1, 3));
    request.on_worker_lost(FIRST, "killed");
    let key = request.launch(GraphRole::Whole, at(SECOND), Instant::now()).unwrap().key;
    // The prompt's chunks differ from those of the first try.
    request.on_row(SECOND, scores(key, 0, 1, 2));
    request.on_row(SECOND, scores(key, 1, 3, 3));
    assert_eq!(read(&mut receiver).scored, [1, 2, 3, 4, 5]);
}

#[test]
fn it_fails_after_so_many_tries_and_says_so() {
    for max_replays in 0..3 {
        let (mut request, mut receiver) = accepted(max_replays);
        for life in 0..max_replays {
            request.launch(GraphRole::Whole, at(WorkerId(life)), Instant::now()).unwrap();
            assert!(request.on_worker_lost(WorkerId(life), "killed").needs_placement);
        }
        request.launch(GraphRole::Whole, at(WorkerId(9)), Instant::now()).unwrap();
        let effects = request.on_worker_lost(WorkerId(9), "worker 0: killed");
        assert_eq!(effects.ended, Some(EndingKind::Failed(ErrorKind::Unavailable)));
        assert!(request.is_over());
        let error = read(&mut receiver).ending.unwrap().unwrap_err();
        let tries = ["once", "2 times", "3 times"][max_replays as usize];
        assert!(error.message().contains(tries) && error.message().contains("worker 0: killed"), "{error}");
    }
}

#[test]
fn only_a_last_try_after_one_in_vain_is_suspect() {
    let suspect_after = |brings: [bool; 2]| {
        let (mut request, _receiver) = accepted(2);
        for (life, brings) in brings.into_iter().enumerate() {
            let worker = WorkerId(life as u32);
            let launch = request.launch(GraphRole::Whole, at(worker), Instant::now()).unwrap();
            if brings {
                request.on_row(worker, row(launch.key, 0, launch.generated.len() as u32));
            }
            request.on_worker_lost(worker, "killed");
            assert!(life == 1 || !request.is_suspect(), "another try is left");
        }
        request.is_suspect()
    };
    assert!(suspect_after([false, false]) && suspect_after([true, false]));
    assert!(!suspect_after([false, true]) && !suspect_after([true, true]));
}

#[test]
fn an_end_that_one_rank_told_needs_no_other_try_once_all_tokens_are_here() {
    let both = Members::from([(Rank(0), FIRST), (Rank(1), SECOND)]);
    let (mut request, mut receiver) = accepted(2);
    let key = request.launch(GraphRole::Whole, both, Instant::now()).unwrap().key;
    request.on_row(FIRST, row(key, 0, 0));
    request.on_completion(FIRST, finish(key, 1, 0, 1));
    let effects = request.on_worker_lost(SECOND, "killed");
    assert_eq!(effects.ended, Some(EndingKind::Finished));
    assert!(request.is_over() && read(&mut receiver).ending.unwrap().is_ok());
}

#[test]
fn the_other_ranks_of_a_lost_group_complete_the_try_that_is_over() {
    let both = Members::from([(Rank(0), FIRST), (Rank(1), SECOND)]);
    let (mut request, _receiver) = accepted(2);
    let key = request.launch(GraphRole::Whole, both.clone(), Instant::now()).unwrap().key;
    let effects = request.on_worker_lost(SECOND, "killed");
    let first_try = (FIRST, GraphKey::from(key.unwrap()));
    assert_eq!(effects.cancel, [first_try]);
    // The next try is on the same worker, before that worker has completed the first try.
    let again = request.launch(GraphRole::Whole, at(FIRST), Instant::now()).unwrap().key;
    let cancelled = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
    let released = pb::Completion { key, epoch: 0, rank: 0, outcome: Some(cancelled) };
    assert_eq!(request.on_completion(FIRST, released.clone()).released, [first_try]);
    assert_eq!(request.on_completion(FIRST, released).dropped, Some(Dropped::Stale));
    request.on_row(FIRST, row(again, 0, 0));
    request.on_completion(FIRST, finish(again, 1, 0, 1));
    assert!(request.is_over());
}
