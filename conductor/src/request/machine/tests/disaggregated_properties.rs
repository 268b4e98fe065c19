//! A request whose encoding, prefill and decode are disaggregated. Workers die, hand-overs fail, messages are repeated,
//! and messages of different workers arrive in any order. The client sees each token once and in order, and no worker
//! stays booked.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Instant,
};

use futures_util::FutureExt;
use proptest::prelude::*;
use tokio_stream::StreamExt;
use tutti_runtime::ErrorKind;

use super::{
    super::*,
    replay::{PROMPT, accepted_for, at, finish, read, row, scores},
};

/// One graph at one worker, which sends what a correct worker sends.
#[derive(Clone, Debug)]
struct FakeGraph {
    worker: WorkerId,
    role: GraphRole,
    key: pb::GraphKey,
    /// Prompt tokens per step.
    chunk: u32,
    epoch: u32,
    scored: u32,
    next: u32,
    /// True once the graph has its inputs: planes for a decode, embeddings for a prefill with media.
    begun: bool,
    over: bool,
}

#[derive(Clone, Debug)]
enum Said {
    Reserved(pb::GraphKey),
    /// A row, with the graph's completion if the graph ends with this row.
    Row(pb::RowReport, Option<pb::Completion>),
    Completion(pb::Completion),
}

struct World {
    request: Request,
    total: u32,
    chunk: u32,
    /// `prefills` is true if a worker that prefills is ready, and `encodes` if a worker that encodes is ready.
    prefills: bool,
    encodes: bool,
    alive: Vec<FakeGraph>,
    /// Messages that have not arrived yet. Messages of one worker arrive in order.
    outboxes: BTreeMap<WorkerId, VecDeque<Said>>,
    heard: Vec<(WorkerId, Said)>,
    booked: BTreeSet<(WorkerId, GraphKey)>,
    next_worker: u32,
    endings: u32,
    tries: u32,
}

impl World {
    fn new(max_replays: u32, total: u32, has_media: bool) -> (Self, mailbox::Receiver) {
        let (request, receiver) = accepted_for(max_replays, total);
        let encoders = if has_media { vec![WalkId(7)] } else { vec![] };
        let request = Request { encoders, ..request };
        let world = Self {
            request,
            total,
            chunk: 2,
            prefills: true,
            encodes: true,
            alive: vec![],
            outboxes: BTreeMap::new(),
            heard: vec![],
            booked: BTreeSet::new(),
            next_worker: 0,
            endings: 0,
            tries: 1,
        };
        (world, receiver)
    }

    fn start(&mut self, role: GraphRole, worker: WorkerId, launch: &pb::LaunchGraph) {
        let key = launch.key.unwrap();
        assert!(self.booked.insert((worker, key.into())));
        assert!(launch.generated.iter().zip(100..).all(|(token, expected)| *token == expected));
        let generated = launch.generated.len() as u32;
        // A try with output has no prompt to score, and a decode continues after the prefill's token.
        let scored = if generated > 0 || role == GraphRole::Decode { PROMPT } else { 1 };
        let next = generated + u32::from(role == GraphRole::Decode);
        let (for_decode, for_media) = (launch.receive.is_some(), launch.receive_media.is_some());
        assert_eq!(for_decode, role == GraphRole::Decode);
        assert_eq!(
            for_media,
            self.request.has_media() && matches!(role, GraphRole::Whole | GraphRole::Prefill)
        );
        let begun = !for_decode && !for_media;
        let chunk = self.chunk;
        self.alive.push(FakeGraph { worker, role, key, chunk, epoch: 0, scored, next, begun, over: false });
        if !begun {
            self.say(worker, Said::Reserved(key));
        }
    }

    fn new_worker(&mut self) -> WorkerId {
        self.next_worker += 1;
        WorkerId(self.next_worker)
    }

    fn launch(&mut self, whole: bool) {
        let no_encoder = self.request.has_media() && !self.encodes;
        if !self.request.is_waiting() || (!self.prefills && !whole) || no_encoder {
            return;
        }
        let role = match (whole, self.request.may_decode()) {
            (true, _) => GraphRole::Whole,
            (false, true) => GraphRole::Decode,
            (false, false) => GraphRole::Prefill,
        };
        let worker = self.new_worker();
        let launch = self.request.launch(role, at(worker), Instant::now()).unwrap();
        self.start(role, worker, &launch);
    }

    fn say(&mut self, worker: WorkerId, said: Said) {
        self.outboxes.entry(worker).or_default().push_back(said);
    }

    fn complete(&mut self, graph: &FakeGraph, outcome: pb::completion::Outcome) {
        let completion =
            pb::Completion { key: Some(graph.key), epoch: graph.epoch, rank: 0, outcome: Some(outcome) };
        self.say(graph.worker, Said::Completion(completion));
    }

    fn deliver(&mut self, pick: usize) {
        let full: Vec<WorkerId> =
            self.outboxes.iter().filter(|(_, said)| !said.is_empty()).map(|(worker, _)| *worker).collect();
        let Some(index) = pick.checked_rem(full.len()) else { return };
        let said = self.outboxes.get_mut(&full[index]).unwrap().pop_front().unwrap();
        self.heard.push((full[index], said.clone()));
        self.hear(full[index], said);
    }

    fn hear(&mut self, from: WorkerId, said: Said) {
        let effects = match said {
            Said::Row(row, end) => {
                let effects = self.request.on_row(from, row).effects;
                self.apply(effects);
                match end {
                    Some(completion) => self.request.on_completion(from, completion),
                    None => return,
                }
            }
            Said::Completion(completion) => self.request.on_completion(from, completion),
            Said::Reserved(key) => {
                let Ok(wanted) = self.request.check_reserved(from, key.into()) else { return };
                let room = ReservedRoom {
                    address: String::new(),
                    layout_hash: 0,
                    shared_memory: String::new(),
                    known_pages: 0,
                    ranks: Vec::new(),
                };
                let worker = self.new_worker();
                match wanted {
                    RoomFor::Planes if self.prefills => {
                        let launch = self.request.launch_prefill(at(worker), room, Instant::now()).unwrap();
                        return self.start(GraphRole::Prefill, worker, &launch);
                    }
                    RoomFor::Embeddings if self.encodes => {
                        let launch = self.request.launch_encode(at(worker), room, Instant::now()).unwrap();
                        return self.start(GraphRole::Encode, worker, &launch);
                    }
                    _ => self.request.give_room_back(),
                }
            }
        };
        self.apply(effects);
    }

    fn apply(&mut self, effects: Effects) {
        for booking in &effects.released {
            assert!(self.booked.remove(booking), "{booking:?} released twice");
        }
        for (worker, key) in effects.cancel {
            let held = self.alive.iter_mut().find(|graph| graph.worker == worker && !graph.over);
            if let Some(graph) = held.filter(|graph| GraphKey::from(graph.key) == key) {
                graph.over = true;
                let graph = graph.clone();
                self.complete(&graph, pb::completion::Outcome::Cancelled(pb::CancelledOutcome {}));
            }
        }
        self.endings += u32::from(effects.ended.is_some());
        self.tries += u32::from(effects.replayed);
    }

    fn step(&mut self, pick: usize) {
        let Some(index) = pick.checked_rem(self.alive.len()) else { return };
        let mut graph = self.alive[index].clone();
        if graph.over || !graph.begun {
            return;
        }
        let (key, epoch) = (Some(graph.key), graph.epoch);
        graph.epoch += 1;
        if graph.role == GraphRole::Encode {
            (graph.over, graph.next) = (true, 0);
            self.export(&graph);
            self.alive[index] = graph;
            return;
        }
        let mut said = pb::RowReport { key, epoch, ..Default::default() };
        if graph.scored < PROMPT {
            let count = graph.chunk.min(PROMPT - graph.scored);
            said = scores(key, epoch, graph.scored, count);
            graph.scored += count;
        }
        let sampled = graph.scored == PROMPT;
        if sampled {
            said.tokens = row(key, epoch, graph.next).tokens;
            graph.next += 1;
        }
        let ends = sampled && graph.next == self.total;
        let finished = ends.then(|| finish(key, graph.epoch, 0, self.total));
        self.say(graph.worker, Said::Row(said, finished));
        if ends {
            graph.over = true;
        } else if sampled && graph.role == GraphRole::Prefill {
            graph.over = true;
            self.export(&graph);
        }
        self.alive[index] = graph;
    }

    /// Transfers a graph's planes or embeddings. The receiver, if it is present, acknowledges the transfer and
    /// continues.
    fn export(&mut self, graph: &FakeGraph) {
        let of_media = graph.role == GraphRole::Encode;
        let goes_on = |role| match role {
            GraphRole::Decode => !of_media,
            GraphRole::Whole | GraphRole::Prefill => of_media,
            GraphRole::Encode => false,
        };
        let receiver = self.alive.iter_mut().find(|other| {
            goes_on(other.role) && other.key.incarnation == graph.key.incarnation && !other.over
        });
        let outcome = match receiver {
            Some(receiver) => {
                receiver.begun = true;
                pb::completion::Outcome::HandedOver(pb::HandedOver { generated: graph.next })
            }
            None => pb::completion::Outcome::HandoverFailed(pb::Fault::default()),
        };
        self.complete(graph, outcome);
    }

    /// Fails a transfer, as an expired lease or a broken connection does.
    fn fail_handover(&mut self, pick: usize) {
        let Some(index) = pick.checked_rem(self.alive.len()) else { return };
        let graph = &mut self.alive[index];
        if graph.over || (graph.begun && matches!(graph.role, GraphRole::Whole | GraphRole::Decode)) {
            return;
        }
        graph.over = true;
        let graph = graph.clone();
        self.complete(&graph, pb::completion::Outcome::HandoverFailed(pb::Fault::default()));
    }

    /// Kills a worker. Messages that it has sent still arrive.
    fn lose(&mut self, pick: usize) {
        let Some(index) = pick.checked_rem(self.alive.len()) else { return };
        let graph = self.alive.remove(index);
        let effects = self.request.on_worker_lost(graph.worker, "killed");
        self.apply(effects);
        assert!(self.booked.iter().all(|(worker, _)| *worker != graph.worker), "a booking at a dead worker");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn all_graphs_are_one_request(
        total in 1u32..7,
        has_media in any::<bool>(),
        max_replays in 0u32..4,
        events in proptest::collection::vec((0u8..25, 0usize..64, 1u32..4), 0..80),
    ) {
        let (mut world, mut receiver) = World::new(max_replays, total, has_media);
        for (event, pick, chunk) in events {
            world.chunk = chunk;
            match event {
                0..=2 => world.launch(pick % 8 == 0),
                3..=9 => world.step(pick),
                10..=17 => world.deliver(pick),
                18..=19 => if let Some(index) = pick.checked_rem(world.heard.len()) {
                    let (from, said) = world.heard[index].clone();
                    world.hear(from, said);
                },
                20 => world.fail_handover(pick),
                21 => world.prefills = pick % 4 > 0,
                22 => world.encodes = pick % 4 > 0,
                _ => world.lose(pick),
            }
            prop_assert!(world.endings <= 1);
            prop_assert_eq!(world.endings == 1, !world.request.is_live());
        }
        // From here on no event disturbs the request.
        (world.prefills, world.encodes) = (true, true);
        for _ in 0..300 {
            world.launch(false);
            (0..world.alive.len()).for_each(|pick| world.step(pick));
            world.deliver(0);
            world.deliver(1);
            world.deliver(2);
        }
        prop_assert!(world.request.is_over(), "{:?}", world.request);
        prop_assert!(world.booked.is_empty(), "{:?}", world.booked);
        prop_assert_eq!(world.endings, 1);
        prop_assert!(world.tries <= 2 * max_replays + 1);
        let seen = read(&mut receiver);
        prop_assert_eq!(&seen.tokens, &(0..seen.tokens.len() as u32).collect::<Vec<_>>());
        prop_assert_eq!(&seen.scored, &(1..=seen.scored.len() as u32).collect::<Vec<_>>());
        match seen.ending.unwrap() {
            Ok(finished) => {
                prop_assert_eq!((seen.tokens.len() as u32, finished.generated), (total, total));
                prop_assert_eq!(seen.scored.len() as u32, PROMPT - 1);
            }
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::Unavailable);
                prop_assert!(world.tries > max_replays);
            }
        }
        prop_assert!(receiver.next().now_or_never().unwrap().is_none());
    }
}
