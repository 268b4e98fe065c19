//! A request whose encoding, prefill and decode run apart, under deaths, failed hand-overs, echoes, and messages of workers in
//! any order: the client sees each token once and in order, and nothing stays booked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use futures_util::FutureExt;
use proptest::prelude::*;
use tokio_stream::StreamExt;
use tutti_runtime::ErrorKind;

use super::{
    replay_tests::{PROMPT, accepted_for, at, finish, read, row, scores},
    *,
};

/// One worker's life with one graph: it says honestly what a worker says.
#[derive(Clone, Debug)]
struct Life {
    worker: WorkerId,
    part: Part,
    key: pb::GraphKey,
    /// Prompt tokens a pass.
    chunk: u32,
    epoch: u32,
    scored: u32,
    next: u32,
    /// It has what it needs to go on: a prefill at once, or when its media have been handed over, as a decode its planes.
    begun: bool,
    over: bool,
}

#[derive(Clone, Debug)]
enum Said {
    Reserved(pb::GraphKey),
    /// One report: what ends with a row is said with it.
    Row(pb::RowReport, Option<pb::Completion>),
    Completion(pb::Completion),
}

struct World {
    request: Request,
    total: u32,
    chunk: u32,
    /// Whether there is a worker that prefills, and one that encodes.
    prefills: bool,
    encodes: bool,
    alive: Vec<Life>,
    /// What has been said and not been heard: in order of each worker, in any order of two.
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
        let request = request.encoded_by(if has_media { vec![WalkId(7)] } else { vec![] });
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

    fn live(&mut self, part: Part, worker: WorkerId, launch: &pb::LaunchGraph) {
        let key = launch.key.unwrap();
        assert!(self.booked.insert((worker, key.into())));
        assert!(launch.generated.iter().zip(100..).all(|(token, expected)| *token == expected));
        let generated = launch.generated.len() as u32;
        // A try that has output has no prompt to score, and a decode goes on behind the prefill's token.
        let scored = if generated > 0 || part == Part::Decode { PROMPT } else { 1 };
        let next = generated + u32::from(part == Part::Decode);
        let (for_decode, for_media) = (launch.receive.is_some(), launch.receive_media.is_some());
        assert_eq!(for_decode, part == Part::Decode);
        assert_eq!(for_media, self.request.has_media() && matches!(part, Part::Whole | Part::Prefill));
        let begun = !for_decode && !for_media;
        let chunk = self.chunk;
        self.alive.push(Life { worker, part, key, chunk, epoch: 0, scored, next, begun, over: false });
        if !begun {
            self.say(worker, Said::Reserved(key));
        }
    }

    fn new_worker(&mut self) -> WorkerId {
        self.next_worker += 1;
        WorkerId(self.next_worker)
    }

    fn place(&mut self, whole: bool) {
        let nobody_encodes = self.request.has_media() && !self.encodes;
        if !self.request.is_waiting() || (!self.prefills && !whole) || nobody_encodes {
            return;
        }
        let part = match (whole, self.request.may_decode()) {
            (true, _) => Part::Whole,
            (false, true) => Part::Decode,
            (false, false) => Part::Prefill,
        };
        let worker = self.new_worker();
        let launch = self.request.launch(part, at(worker), Instant::now()).unwrap();
        self.live(part, worker, &launch);
    }

    fn say(&mut self, worker: WorkerId, said: Said) {
        self.outboxes.entry(worker).or_default().push_back(said);
    }

    fn complete(&mut self, life: &Life, outcome: pb::completion::Outcome) {
        let completion =
            pb::Completion { key: Some(life.key), epoch: life.epoch, rank: 0, outcome: Some(outcome) };
        self.say(life.worker, Said::Completion(completion));
    }

    fn deliver(&mut self, place: usize) {
        let full: Vec<WorkerId> =
            self.outboxes.iter().filter(|(_, said)| !said.is_empty()).map(|(worker, _)| *worker).collect();
        let Some(index) = place.checked_rem(full.len()) else { return };
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
                let room = Room {
                    address: String::new(),
                    layout_hash: 0,
                    shared_memory: String::new(),
                    known_pages: 0,
                };
                let worker = self.new_worker();
                match wanted {
                    RoomFor::Planes if self.prefills => {
                        let launch = self.request.launch_prefill(at(worker), room, Instant::now()).unwrap();
                        return self.live(Part::Prefill, worker, &launch);
                    }
                    RoomFor::Embeddings if self.encodes => {
                        let launch = self.request.launch_encode(at(worker), room, Instant::now()).unwrap();
                        return self.live(Part::Encode, worker, &launch);
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
            let told = self.alive.iter_mut().find(|life| life.worker == worker && !life.over);
            if let Some(life) = told.filter(|life| GraphKey::from(life.key) == key) {
                life.over = true;
                let life = life.clone();
                self.complete(&life, pb::completion::Outcome::Cancelled(pb::CancelledOutcome {}));
            }
        }
        self.endings += u32::from(effects.ended.is_some());
        self.tries += u32::from(effects.replayed);
    }

    fn step(&mut self, place: usize) {
        let Some(index) = place.checked_rem(self.alive.len()) else { return };
        let mut life = self.alive[index].clone();
        if life.over || !life.begun {
            return;
        }
        let (key, epoch) = (Some(life.key), life.epoch);
        life.epoch += 1;
        if life.part == Part::Encode {
            (life.over, life.next) = (true, 0);
            self.hand_over(&life);
            self.alive[index] = life;
            return;
        }
        let mut said = pb::RowReport { key, epoch, ..Default::default() };
        if life.scored < PROMPT {
            let count = life.chunk.min(PROMPT - life.scored);
            said = scores(key, epoch, life.scored, count);
            life.scored += count;
        }
        let sampled = life.scored == PROMPT;
        if sampled {
            said.tokens = row(key, epoch, life.next).tokens;
            life.next += 1;
        }
        let ends = sampled && life.next == self.total;
        let finished = ends.then(|| finish(key, life.epoch, 0, self.total));
        self.say(life.worker, Said::Row(said, finished));
        if ends {
            life.over = true;
        } else if sampled && life.part == Part::Prefill {
            life.over = true;
            self.hand_over(&life);
        }
        self.alive[index] = life;
    }

    /// The receiver acknowledges while it is there, and goes on.
    fn hand_over(&mut self, life: &Life) {
        let of_media = life.part == Part::Encode;
        let goes_on = |part| match part {
            Part::Decode => !of_media,
            Part::Whole | Part::Prefill => of_media,
            Part::Encode => false,
        };
        let receiver = self.alive.iter_mut().find(|other| {
            goes_on(other.part) && other.key.incarnation == life.key.incarnation && !other.over
        });
        let outcome = match receiver {
            Some(receiver) => {
                receiver.begun = true;
                pb::completion::Outcome::HandedOver(pb::HandedOver { generated: life.next })
            }
            None => pb::completion::Outcome::HandoverFailed(pb::Fault::default()),
        };
        self.complete(life, outcome);
    }

    /// A lease that is over, or a push that breaks.
    fn fail_handover(&mut self, place: usize) {
        let Some(index) = place.checked_rem(self.alive.len()) else { return };
        let life = &mut self.alive[index];
        if life.over || (life.begun && matches!(life.part, Part::Whole | Part::Decode)) {
            return;
        }
        life.over = true;
        let life = life.clone();
        self.complete(&life, pb::completion::Outcome::HandoverFailed(pb::Fault::default()));
    }

    /// What it has said may still be heard.
    fn lose(&mut self, place: usize) {
        let Some(index) = place.checked_rem(self.alive.len()) else { return };
        let life = self.alive.remove(index);
        let effects = self.request.on_worker_lost(life.worker, "killed");
        self.apply(effects);
        assert!(self.booked.iter().all(|(worker, _)| *worker != life.worker), "a booking at a dead worker");
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
        for (event, place, chunk) in events {
            world.chunk = chunk;
            match event {
                0..=2 => world.place(place % 8 == 0),
                3..=9 => world.step(place),
                10..=17 => world.deliver(place),
                18..=19 => if let Some(index) = place.checked_rem(world.heard.len()) {
                    let (from, said) = world.heard[index].clone();
                    world.hear(from, said);
                },
                20 => world.fail_handover(place),
                21 => world.prefills = place % 4 > 0,
                22 => world.encodes = place % 4 > 0,
                _ => world.lose(place),
            }
            prop_assert!(world.endings <= 1);
            prop_assert_eq!(world.endings == 1, !world.request.is_live());
        }
        // From here on all goes well.
        (world.prefills, world.encodes) = (true, true);
        for _ in 0..300 {
            world.place(false);
            (0..world.alive.len()).for_each(|place| world.step(place));
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
