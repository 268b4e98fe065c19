//! What a replay must get right: the client sees each token once and in order, and nothing stays booked, whichever worker
//! dies whenever and whatever it still says afterwards.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::FutureExt;
use proptest::prelude::*;
use tokio_stream::StreamExt;
use tutti_proto::{Rank, walks::WalkId};
use tutti_runtime::ErrorKind;

use super::*;

const PROMPT: u32 = 6;
const FIRST: WorkerId = WorkerId(1);
const SECOND: WorkerId = WorkerId(2);

fn accepted(max_replays: u32) -> (Request, mailbox::Receiver) {
    let (sender, receiver) = mailbox::channel();
    let spec = pb::RequestSpec { prompt: vec![0; PROMPT as usize], ..Default::default() };
    let graphs = vec![GraphPlan { walks: vec![WalkId(0), WalkId(1)] }];
    (Request::accept(RequestId(7), spec, None, graphs, max_replays, sender), receiver)
}

fn at(worker: WorkerId) -> Placement {
    Placement::from([(Rank(0), worker)])
}

fn row(key: Option<pb::GraphKey>, epoch: u32, index: u32) -> pb::RowReport {
    let tokens = vec![pb::SampledToken { token_id: 100 + index, index, logprob: None }];
    pb::RowReport { key, epoch, walk: 1, tokens, ..Default::default() }
}

fn scores(key: Option<pb::GraphKey>, epoch: u32, first: u32, count: u32) -> pb::RowReport {
    let score = |place| pb::TokenLogprob { rank: place, ..Default::default() };
    let tokens = (first..first + count).map(score).collect();
    let prompt_logprobs = Some(pb::PromptLogprobs { first, tokens });
    pb::RowReport { key, epoch, prompt_logprobs, ..Default::default() }
}

fn finish(key: Option<pb::GraphKey>, epoch: u32, rank: u32, generated: u32) -> pb::Completion {
    let reason = pb::FinishReason::EndOfSequence.into();
    let finished = pb::Finished { reason, generated, ..Default::default() };
    pb::Completion { key, epoch, rank, outcome: Some(pb::completion::Outcome::Finished(finished)) }
}

/// What the client has had: tokens' indices, prompt tokens whose logprobs came, and the ending.
#[derive(Debug, Default)]
struct Seen {
    tokens: Vec<u32>,
    scored: Vec<u32>,
    ending: Option<Result<pb::Finished, Error>>,
}

fn read(receiver: &mut mailbox::Receiver) -> Seen {
    let mut seen = Seen::default();
    while let Some(Some(event)) = receiver.next().now_or_never() {
        match event {
            Ok(event) => {
                seen.tokens.extend(event.tokens.iter().map(|token| token.index));
                for piece in event.prompt_logprobs {
                    assert!(piece.tokens.iter().zip(piece.first..).all(|(score, place)| score.rank == place));
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
    let key = request.launch(at(FIRST), Instant::now()).unwrap().key;
    request.on_row(FIRST, row(key, 0, 0));
    let effects = request.on_worker_lost(FIRST, "killed");
    assert!(effects.place && effects.replayed && effects.ended.is_none() && request.is_waiting());
    assert_eq!(effects.released, [(FIRST, key.unwrap().into())]);
    let again = request.launch(at(SECOND), Instant::now()).unwrap();
    assert_eq!((again.key.unwrap().incarnation, &again.generated), (1, &vec![100]));
    assert_eq!(request.on_row(FIRST, row(key, 1, 1)).dropped, 1, "what the dead still say");
    request.on_row(SECOND, row(again.key, 0, 1));
    assert_eq!(request.on_completion(FIRST, finish(key, 2, 0, 2)).dropped, Some(Dropped::Stale));
    request.on_completion(SECOND, finish(again.key, 1, 0, 2));
    let seen = read(&mut receiver);
    assert_eq!((seen.tokens, seen.ending.unwrap().unwrap().generated), (vec![0, 1], 2));
}

#[test]
fn what_the_first_try_found_cached_is_what_counts() {
    let (mut request, mut receiver) = accepted(2);
    let key = request.launch(at(FIRST), Instant::now()).unwrap().key;
    request.on_row(FIRST, pb::RowReport { cached_tokens: Some(3), ..row(key, 0, 0) });
    request.on_worker_lost(FIRST, "killed");
    let key = request.launch(at(SECOND), Instant::now()).unwrap().key;
    request.on_row(SECOND, row(key, 0, 1));
    request.on_completion(SECOND, finish(key, 1, 0, 2));
    assert_eq!(read(&mut receiver).ending.unwrap().unwrap().cached_tokens, 3);
}

#[test]
fn prompt_logprobs_come_once_though_the_prompt_is_computed_again() {
    let (mut request, mut receiver) = accepted(2);
    let key = request.launch(at(FIRST), Instant::now()).unwrap().key;
    request.on_row(FIRST, scores(key, 0, 1, 3));
    request.on_worker_lost(FIRST, "killed");
    let key = request.launch(at(SECOND), Instant::now()).unwrap().key;
    // Other chunks than before.
    request.on_row(SECOND, scores(key, 0, 1, 2));
    request.on_row(SECOND, scores(key, 1, 3, 3));
    assert_eq!(read(&mut receiver).scored, [1, 2, 3, 4, 5]);
}

#[test]
fn it_fails_after_so_many_tries_and_says_so() {
    for max_replays in 0..3 {
        let (mut request, mut receiver) = accepted(max_replays);
        for life in 0..max_replays {
            request.launch(at(WorkerId(life)), Instant::now()).unwrap();
            assert!(request.on_worker_lost(WorkerId(life), "killed").place);
        }
        request.launch(at(WorkerId(9)), Instant::now()).unwrap();
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
    let lives = |brings: [bool; 2]| {
        let (mut request, _receiver) = accepted(2);
        for (life, brings) in brings.into_iter().enumerate() {
            let worker = WorkerId(life as u32);
            let launch = request.launch(at(worker), Instant::now()).unwrap();
            if brings {
                request.on_row(worker, row(launch.key, 0, launch.generated.len() as u32));
            }
            request.on_worker_lost(worker, "killed");
            assert!(life == 1 || !request.is_suspect(), "another try is left");
        }
        request.is_suspect()
    };
    assert!(lives([false, false]) && lives([true, false]));
    assert!(!lives([false, true]) && !lives([true, true]));
}

#[test]
fn an_end_that_one_rank_told_needs_no_other_try_once_all_tokens_are_here() {
    let both = Placement::from([(Rank(0), FIRST), (Rank(1), SECOND)]);
    let (mut request, mut receiver) = accepted(2);
    let key = request.launch(both, Instant::now()).unwrap().key;
    request.on_row(FIRST, row(key, 0, 0));
    request.on_completion(FIRST, finish(key, 1, 0, 1));
    let effects = request.on_worker_lost(SECOND, "killed");
    assert_eq!(effects.ended, Some(EndingKind::Finished));
    assert!(request.is_over() && read(&mut receiver).ending.unwrap().is_ok());
}

#[test]
fn the_other_ranks_of_a_lost_group_let_go_of_the_try_that_is_over() {
    let both = Placement::from([(Rank(0), FIRST), (Rank(1), SECOND)]);
    let (mut request, _receiver) = accepted(2);
    let key = request.launch(both.clone(), Instant::now()).unwrap().key;
    let effects = request.on_worker_lost(SECOND, "killed");
    let first_try = (FIRST, GraphKey::from(key.unwrap()));
    assert_eq!(effects.cancel, [first_try]);
    // Again on the same one, before it has let go of the first try.
    let again = request.launch(at(FIRST), Instant::now()).unwrap().key;
    let cancelled = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
    let let_go = pb::Completion { key, epoch: 0, rank: 0, outcome: Some(cancelled) };
    assert_eq!(request.on_completion(FIRST, let_go.clone()).released, [first_try]);
    assert_eq!(request.on_completion(FIRST, let_go).dropped, Some(Dropped::Stale));
    request.on_row(FIRST, row(again, 0, 0));
    request.on_completion(FIRST, finish(again, 1, 0, 1));
    assert!(request.is_over());
}

/// One rank's life with one try of the request: it says honestly what a worker says.
#[derive(Clone, Debug)]
struct Life {
    worker: WorkerId,
    rank: u32,
    key: Option<pb::GraphKey>,
    /// Prompt tokens a pass: the same for all ranks of a group.
    chunk: u32,
    epoch: u32,
    scored: u32,
    next: u32,
    over: bool,
}

#[derive(Clone, Debug)]
enum Said {
    Row(WorkerId, pb::RowReport),
    Completion(WorkerId, pb::Completion),
}

/// A group of ranks, its dead predecessors (some of which still talk), and all that was ever said.
struct World {
    request: Request,
    total: u32,
    ranks: u32,
    alive: Vec<Life>,
    dead: Vec<Life>,
    said: Vec<Said>,
    booked: BTreeSet<(WorkerId, GraphKey)>,
    next_worker: u32,
    launches: u32,
    endings: u32,
}

impl World {
    fn new(max_replays: u32, total: u32, ranks: u32) -> (Self, mailbox::Receiver) {
        let (request, receiver) = accepted(max_replays);
        let world = Self {
            request,
            total,
            ranks,
            alive: vec![],
            dead: vec![],
            said: vec![],
            booked: BTreeSet::new(),
            next_worker: 0,
            launches: 0,
            endings: 0,
        };
        (world, receiver)
    }

    fn apply(&mut self, effects: Effects) {
        for booking in &effects.released {
            assert!(self.booked.remove(booking), "{booking:?} released twice");
        }
        for (worker, key) in effects.cancel {
            // A worker that is told to let go does so at once here; a property of its own is that it may take its time.
            let lives = self.alive.iter_mut().filter(|life| life.worker == worker && !life.over);
            let cancelled = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
            let told: Vec<_> = lives
                .map(|life| {
                    life.over = true;
                    let outcome = Some(cancelled.clone());
                    pb::Completion { key: Some(key.into()), epoch: life.epoch, rank: life.rank, outcome }
                })
                .collect();
            for completion in told {
                self.hear(Said::Completion(worker, completion));
            }
        }
        self.endings += u32::from(effects.ended.is_some());
    }

    fn hear(&mut self, said: Said) {
        self.said.push(said.clone());
        self.hear_again(said);
    }

    fn hear_again(&mut self, said: Said) {
        let effects = match said {
            Said::Row(from, row) => self.request.on_row(from, row).effects,
            Said::Completion(from, completion) => self.request.on_completion(from, completion),
        };
        self.apply(effects);
    }

    /// Where every rank of the group is new, as after its restart.
    fn place(&mut self, chunk: u32) {
        if !self.request.is_waiting() {
            return;
        }
        let ranks: BTreeMap<_, _> =
            (0..self.ranks).map(|rank| (Rank(rank), WorkerId(self.next_worker + rank))).collect();
        self.next_worker += self.ranks;
        let launch = self.request.launch(ranks.clone(), Instant::now()).unwrap();
        self.launches += 1;
        let next = launch.generated.len() as u32;
        assert!(launch.generated.iter().zip(100..).all(|(token, expected)| *token == expected));
        for (rank, worker) in ranks {
            self.booked.insert((worker, launch.key.unwrap().into()));
            // A try that has output has no prompt to score.
            let scored = if next > 0 { PROMPT } else { 1 };
            self.alive.push(Life {
                worker,
                rank: rank.0,
                key: launch.key,
                chunk,
                epoch: 0,
                scored,
                next,
                over: false,
            });
        }
    }

    /// What this life says next, if there is anything left to say.
    fn says(&self, life: &mut Life) -> Vec<Said> {
        if life.over {
            return vec![];
        }
        let mut said = Vec::new();
        let epoch = life.epoch;
        life.epoch += 1;
        let mut tokens = pb::RowReport { key: life.key, epoch, ..Default::default() };
        if life.scored < PROMPT {
            let count = life.chunk.min(PROMPT - life.scored);
            tokens = scores(life.key, epoch, life.scored, count);
            life.scored += count;
        }
        if life.scored == PROMPT {
            tokens.tokens = row(life.key, epoch, life.next).tokens;
            life.next += 1;
        }
        if life.rank == 0 {
            said.push(Said::Row(life.worker, tokens));
        }
        if life.next == self.total {
            life.over = true;
            let completion = finish(life.key, life.epoch, life.rank, self.total);
            said.push(Said::Completion(life.worker, completion));
        }
        said
    }

    fn step(&mut self, place: usize) {
        let Some(index) = place.checked_rem(self.alive.len()) else { return };
        let mut life = self.alive[index].clone();
        let said = self.says(&mut life);
        self.alive[index] = life;
        said.into_iter().for_each(|said| self.hear(said));
    }

    /// A worker that was taken for dead, and is not.
    fn step_dead(&mut self, place: usize) {
        let Some(index) = place.checked_rem(self.dead.len()) else { return };
        let mut life = self.dead[index].clone();
        let said = self.says(&mut life);
        self.dead[index] = life;
        said.into_iter().for_each(|said| self.hear(said));
    }

    fn lose(&mut self, place: usize) {
        let Some(index) = place.checked_rem(self.alive.len()) else { return };
        let life = self.alive.remove(index);
        let effects = self.request.on_worker_lost(life.worker, "killed");
        // As the cluster does: with a worker, all its bookings are gone.
        self.dead.push(life.clone());
        self.apply(effects);
        assert!(self.booked.iter().all(|(worker, _)| *worker != life.worker), "a booking at a dead worker");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Deaths at any point, the dead that go on talking, and anything said before said again at any time.
    #[test]
    fn deaths_and_echoes_change_nothing(
        total in 1u32..8,
        ranks in 1u32..3,
        max_replays in 0u32..4,
        events in proptest::collection::vec((0u8..16, 0usize..64, 1u32..4), 0..60),
    ) {
        let (mut world, mut receiver) = World::new(max_replays, total, ranks);
        for (event, place, chunk) in events {
            match event {
                0..=1 => world.place(chunk),
                2..=9 => world.step(place),
                10..=11 => world.step_dead(place),
                12..=13 => if let Some(index) = place.checked_rem(world.said.len()) {
                    let said = world.said[index].clone();
                    world.hear_again(said);
                },
                _ => world.lose(place),
            }
            prop_assert!(world.endings <= 1);
            prop_assert_eq!(world.endings == 1, !world.request.is_live());
        }
        // From here on all goes well.
        for _ in 0..200 {
            world.place(2);
            for place in 0..world.alive.len() {
                world.step(place);
            }
        }
        prop_assert!(world.request.is_over(), "{:?}", world.request);
        prop_assert!(world.booked.is_empty(), "{:?}", world.booked);
        prop_assert_eq!(world.endings, 1);
        prop_assert!(world.launches <= max_replays + 1);
        let seen = read(&mut receiver);
        prop_assert_eq!(&seen.tokens, &(0..seen.tokens.len() as u32).collect::<Vec<_>>());
        prop_assert_eq!(&seen.scored, &(1..=seen.scored.len() as u32).collect::<Vec<_>>());
        match seen.ending.unwrap() {
            Ok(finished) => {
                prop_assert_eq!(seen.tokens.len() as u32, total);
                prop_assert_eq!(finished.generated, total);
                prop_assert_eq!(seen.scored.len() as u32, PROMPT - 1);
            }
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::Unavailable);
                prop_assert_eq!(world.launches, max_replays + 1);
            }
        }
        prop_assert!(receiver.next().now_or_never().unwrap().is_none());
    }
}
