//! A request whose workers die at random times. Some dead workers still send messages. The client sees each token once
//! and in order, and no worker stays booked.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use futures_util::FutureExt;
use proptest::prelude::*;
use tokio_stream::StreamExt;
use tutti_proto::Rank;
use tutti_runtime::ErrorKind;

use super::{
    super::*,
    replay::{PROMPT, accepted, finish, read, row, scores},
};

/// One try of the request at one rank, which sends what a correct worker sends.
#[derive(Clone, Debug)]
struct FakeGraph {
    worker: WorkerId,
    rank: u32,
    key: Option<pb::GraphKey>,
    /// Prompt tokens per step, the same for all ranks of a group.
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

/// The request, its current group of ranks, the dead ranks, and all messages so far. Some dead ranks still send.
struct World {
    request: Request,
    total: u32,
    ranks: u32,
    alive: Vec<FakeGraph>,
    dead: Vec<FakeGraph>,
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
            // Workers confirm a cancel at once here. `disaggregated_properties` delays their messages.
            let graphs = self.alive.iter_mut().filter(|graph| graph.worker == worker && !graph.over);
            let cancelled = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
            let completions: Vec<_> = graphs
                .map(|graph| {
                    graph.over = true;
                    let outcome = Some(cancelled.clone());
                    pb::Completion { key: Some(key.into()), epoch: graph.epoch, rank: graph.rank, outcome }
                })
                .collect();
            for completion in completions {
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

    /// Launches the request on a group of new workers, as after a restart.
    fn launch(&mut self, chunk: u32) {
        if !self.request.is_waiting() {
            return;
        }
        let ranks: BTreeMap<_, _> =
            (0..self.ranks).map(|rank| (Rank(rank), WorkerId(self.next_worker + rank))).collect();
        self.next_worker += self.ranks;
        let launch = self.request.launch(GraphRole::Whole, ranks.clone(), Instant::now()).unwrap();
        self.launches += 1;
        let next = launch.generated.len() as u32;
        assert!(launch.generated.iter().zip(100..).all(|(token, expected)| *token == expected));
        for (rank, worker) in ranks {
            self.booked.insert((worker, launch.key.unwrap().into()));
            // A try that continues after output does not compute logprobs of the prompt.
            let scored = if next > 0 { PROMPT } else { 1 };
            self.alive.push(FakeGraph {
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

    /// The next messages of this graph, if any.
    fn says(&self, graph: &mut FakeGraph) -> Vec<Said> {
        if graph.over {
            return vec![];
        }
        let mut said = Vec::new();
        let epoch = graph.epoch;
        graph.epoch += 1;
        let mut tokens = pb::RowReport { key: graph.key, epoch, ..Default::default() };
        if graph.scored < PROMPT {
            let count = graph.chunk.min(PROMPT - graph.scored);
            tokens = scores(graph.key, epoch, graph.scored, count);
            graph.scored += count;
        }
        if graph.scored == PROMPT {
            tokens.tokens = row(graph.key, epoch, graph.next).tokens;
            graph.next += 1;
        }
        if graph.rank == 0 {
            said.push(Said::Row(graph.worker, tokens));
        }
        if graph.next == self.total {
            graph.over = true;
            let completion = finish(graph.key, graph.epoch, graph.rank, self.total);
            said.push(Said::Completion(graph.worker, completion));
        }
        said
    }

    fn step(&mut self, pick: usize) {
        let Some(index) = pick.checked_rem(self.alive.len()) else { return };
        let mut graph = self.alive[index].clone();
        let said = self.says(&mut graph);
        self.alive[index] = graph;
        said.into_iter().for_each(|said| self.hear(said));
    }

    /// Runs a step of a worker that was taken for dead but still runs.
    fn step_dead(&mut self, pick: usize) {
        let Some(index) = pick.checked_rem(self.dead.len()) else { return };
        let mut graph = self.dead[index].clone();
        let said = self.says(&mut graph);
        self.dead[index] = graph;
        said.into_iter().for_each(|said| self.hear(said));
    }

    fn lose(&mut self, pick: usize) {
        let Some(index) = pick.checked_rem(self.alive.len()) else { return };
        let graph = self.alive.remove(index);
        let effects = self.request.on_worker_lost(graph.worker, "killed");
        // As in the cluster, a lost worker's bookings are gone.
        self.dead.push(graph.clone());
        self.apply(effects);
        assert!(self.booked.iter().all(|(worker, _)| *worker != graph.worker), "a booking at a dead worker");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Workers die at any point, dead workers still send, and messages are repeated at any time.
    #[test]
    fn deaths_and_echoes_change_nothing(
        total in 1u32..8,
        ranks in 1u32..3,
        max_replays in 0u32..4,
        events in proptest::collection::vec((0u8..16, 0usize..64, 1u32..4), 0..60),
    ) {
        let (mut world, mut receiver) = World::new(max_replays, total, ranks);
        for (event, pick, chunk) in events {
            match event {
                0..=1 => world.launch(chunk),
                2..=9 => world.step(pick),
                10..=11 => world.step_dead(pick),
                12..=13 => if let Some(index) = pick.checked_rem(world.said.len()) {
                    let said = world.said[index].clone();
                    world.hear_again(said);
                },
                _ => world.lose(pick),
            }
            prop_assert!(world.endings <= 1);
            prop_assert_eq!(world.endings == 1, !world.request.is_live());
        }
        // From here on no event disturbs the request.
        for _ in 0..200 {
            world.launch(2);
            for pick in 0..world.alive.len() {
                world.step(pick);
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
