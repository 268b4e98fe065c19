//! Random traffic over random planes, with steps in flight, masks, cancels, deadlines and failures. An oracle with its
//! own counts and its own device checks every plan and commit.
//!
//! `PROPTEST_CASES` is the number of scripts; `tests/long-properties` runs enough scripts for four million steps.

mod commits;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod device;
mod disaggregated;
mod live;
mod masks;
mod memory;
mod model;
mod rows;
mod script;
mod slots;
mod traces;

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    time::Duration,
};

use common::{AUDIO, DECODE, EOS, MIXED, SPEECH_DECODE, SPEECH_MIXED, STOP, WORD, key};
use device::{Device, Flight};
use live::Live;
use memory::{Pages, remember};
use proptest::prelude::*;
use script::{Arrival, Script, script};
use slots::Slots;
use traces::{Seen, Traces};
use tutti_proto::GraphKey;
use tutti_scheduler::{
    HEAD_START, MEASURED_EVERY, NotSampled, Outcome, PATIENCE, Row, RowOutcome, Scheduler, StepPlan,
    Terminality, Turn,
};
use tutti_settings::{Admission, Chunking, PrefillSharing};

/// The frequency of calls to `plan_ahead` while steps run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    Never,
    /// `plan_ahead` is called in some turns, at some of the points where a call is allowed.
    Sometimes,
}

struct Simulation<'a> {
    script: &'a Script,
    ahead: Ahead,
    scheduler: Scheduler,
    live: BTreeMap<GraphKey, Live<'a>>,
    /// Ended requests that still have rows in flight.
    draining: BTreeMap<GraphKey, Live<'a>>,
    ended: BTreeMap<GraphKey, Outcome>,
    /// The steps in flight, the oldest first.
    flying: VecDeque<Flight>,
    device: Device,
    traces: Traces,
    turn: usize,
    /// Number of requests accepted so far.
    accepted: usize,
    fate: u64,
    /// A second generator, so that `fate` does not depend on the calls to `plan_ahead`.
    ahead_fate: u64,
    /// Every plan and ending as text, for comparison with a second run.
    log: Vec<String>,
    seen: Seen,
}

impl<'a> Simulation<'a> {
    fn new(script: &'a Script, ahead: Ahead) -> Self {
        let config = &script.config;
        let pages = Pages::new(config.pages, config.page_tokens, &script.model.ratios);
        let slots = Slots::new(config.slots, script.model.has_slots());
        let declaration = script.model.declaration(config.page_tokens);
        Self {
            script,
            ahead,
            scheduler: Scheduler::new(config.clone(), &declaration).expect("something can run"),
            live: BTreeMap::new(),
            draining: BTreeMap::new(),
            ended: BTreeMap::new(),
            flying: VecDeque::new(),
            device: Device { pages, slots },
            traces: Traces::default(),
            turn: 0,
            accepted: 0,
            fate: script.fate_seed | 1,
            ahead_fate: script.fate_seed | 1,
            log: Vec::new(),
            seen: Seen::default(),
        }
    }

    /// Returns a random number below 100.
    fn roll(&mut self) -> u64 {
        xorshift(&mut self.fate)
    }

    /// Sometimes calls `plan_ahead`, at a point where a step may be running.
    fn maybe_plan_ahead(&mut self) {
        if self.ahead == Ahead::Sometimes && xorshift(&mut self.ahead_fate) < 60 {
            self.scheduler.plan_ahead();
        }
    }

    /// Runs the script. Returns the log and the counts of the run.
    fn run(mut self) -> (Vec<String>, Seen) {
        let script = self.script;
        let last = script.requests.iter().map(|r| r.turn.max(r.cancel.unwrap_or(0))).max().unwrap_or(0);
        // Each turn whose step is not aborted advances a request by at least one position. A preempted request computes
        // its positions again, at most once for each request before it.
        let work: usize = script.requests.iter().map(Arrival::max_total).sum();
        let again =
            if script.config.settings.admission == Admission::Optimistic { script.requests.len() } else { 1 };
        let away: usize =
            script.requests.iter().map(|request| request.away + disaggregated::LONGEST_HOLD).sum();
        let bound = last + 10 + (work + away + script.requests.len()) * 8 * again;
        while self.turn <= last || !self.scheduler.is_empty() || !self.flying.is_empty() {
            let turn = self.turn;
            assert!(turn < bound, "{} requests not ended after {turn} turns", self.live.len());
            self.maybe_plan_ahead();
            for (request, arrival) in script.requests.iter().enumerate() {
                if arrival.turn == turn {
                    self.add(request as u64, arrival);
                }
                if arrival.cancel == Some(turn) {
                    self.scheduler.cancel(key(request as u64));
                    self.live.entry(key(request as u64)).and_modify(|live| live.cancelled = true);
                }
            }
            self.play_other_workers();
            self.play_masks();
            self.take_turn();
            self.turn += 1;
        }
        let load = self.scheduler.load();
        assert_eq!((load.running, load.waiting, load.pages_used), (0, 0, 0), "everything is given back");
        assert_eq!(load.slots_used, 0, "every slot is given back");
        assert!(load.slots_cached <= load.pages_cached, "a snapshot without its page");
        assert!(self.live.is_empty(), "accepted but never ended: {:?}", self.live.keys());
        assert!(self.draining.is_empty(), "never drained: {:?}", self.draining.keys());
        assert_eq!(load.tally.void_rows as usize, self.seen.void_rows);
        self.seen.rows_ahead = load.tally.rows_ahead as usize;
        (self.log, self.seen)
    }

    fn add(&mut self, request: u64, arrival: &'a Arrival) {
        let config = &self.script.config;
        let total = arrival.max_total();
        let possible = total <= config.max_context
            && arrival.max_held().div_ceil(config.page_tokens) < config.pages
            && self.live.len() < config.settings.running_limit() + config.max_waiting_requests;
        let added = self.scheduler.add(arrival.launch(request));
        assert_eq!(added.is_ok(), possible, "{added:?}");
        if possible {
            let came = self.seen.steps as i64 + i64::from(arrival.priority) * HEAD_START;
            self.accepted += 1;
            let live = Live::new(request, arrival, self.turn, (came, self.accepted));
            self.live.insert(key(request), live);
            let runs_ahead = arrival.masked.is_some_and(|masked| masked.runs_ahead);
            self.scheduler.run_ahead(key(request), runs_ahead);
        }
    }

    fn take_turn(&mut self) {
        self.maybe_run();
        self.maybe_abort();
        // The device refuses a step when the engine enqueues it. The next step is therefore planned only after the
        // abort.
        let refused = self.flying.back().is_some_and(|flight| flight.refused);
        let idle = refused || !self.plan();
        self.maybe_run();
        if idle && self.flying.len() == 1 && refused {
            self.abort_last();
        } else if idle || self.flying.len() > self.script.depth {
            self.finish_oldest();
        }
        self.check_pages();
    }

    /// Sometimes aborts the step planned last, if the device refuses it, and also earlier steps that have not run.
    fn maybe_abort(&mut self) {
        if self.flying.back().is_some_and(|flight| flight.refused) && self.roll() < 60 {
            self.abort_last();
            while self.flying.back().is_some_and(|flight| !flight.has_run) && self.roll() < 20 {
                self.abort_last();
            }
        }
    }

    /// Plans a turn. Returns false if the turn has no step.
    fn plan(&mut self) -> bool {
        let Turn { endings, preempted, reserved, step } =
            self.scheduler.plan(Duration::from_millis(self.turn as u64));
        let ended = !endings.is_empty() || !preempted.is_empty();
        for ending in endings {
            let live = &self.live[&ending.key];
            match ending.outcome {
                Outcome::Cancelled => assert!(live.cancelled),
                Outcome::DeadlineExceeded => assert!(live.is_due(self.turn)),
                // A turn advances the clock by one millisecond, whatever the duration of its step.
                Outcome::DeadlineUnreachable { needed, left } => {
                    let deadline = live.arrival.deadline.expect("only a deadline can be unreachable");
                    assert_eq!(left, Duration::from_millis((deadline - self.turn) as u64));
                    assert!(needed > left && live.committed.computed < live.target);
                }
                Outcome::TransferFailed(_) => assert!(live.failing),
                ref outcome
                    if live.constraint_end.as_ref().and_then(|why| live.ending_by(why)).as_ref()
                        == Some(outcome) => {}
                ref other => panic!("{} ended between steps: {other:?}", ending.key),
            }
            self.seen.ended_inside += usize::from(live.in_flight > 0);
            self.end(ending);
        }
        // A request ends at once, even with rows in flight. Only its planes are kept until these rows are back.
        let over = |live: &Live<'_>| {
            live.cancelled || live.failing || live.is_due(self.turn) || live.constraint_end.is_some()
        };
        let late = self.live.iter().find(|(_, live)| over(live));
        assert!(late.is_none(), "{:?} outlived its cancel or deadline", late.map(|(key, _)| key));
        for key in preempted {
            let optimistic = self.script.config.settings.admission == Admission::Optimistic;
            assert!(optimistic || self.yields(key), "{key} lost its pages to nobody");
            let live = self.live.get_mut(&key).unwrap_or_else(|| panic!("{key} is not there"));
            assert_eq!(live.in_flight, 0, "{key} lost its pages inside a step");
            live.preempt();
            self.seen.preempted += 1;
            self.log.push(format!("{key} preempted"));
        }
        let progress = ended || !reserved.is_empty();
        reserved.into_iter().for_each(|reserved| self.reserved(reserved, step.as_ref()));
        let stalled = step.is_none() && self.flying.is_empty() && !progress;
        let waits = self.is_any_away() || self.is_any_mask_due();
        assert!(!stalled || self.live.is_empty() || waits, "requests wait, but nothing runs");
        let full = self.flying.len() >= self.script.config.steps_in_flight;
        assert!(!full || step.is_none(), "more steps than may be in flight");
        let Some(step) = step else { return false };
        self.check_plan(&step);
        self.enqueue(step);
        self.maybe_plan_ahead();
        true
    }

    /// True if a request may be preempted for another share: for the first time, and while another share waits and has
    /// no request with planes.
    fn yields(&self, key: GraphKey) -> bool {
        let own = &self.live[&key];
        let has_planes =
            |share: u64| self.live.values().any(|live| live.arrival.share == share && live.slot.is_some());
        !own.preempted
            && self
                .live
                .values()
                .any(|live| live.arrival.share != own.arrival.share && !has_planes(live.arrival.share))
    }

    fn check_plan(&mut self, step: &StepPlan) {
        self.log.push(format!("{step:?}"));
        self.seen.steps += 1;
        let config = &self.script.config;
        assert!(!step.rows.is_empty());
        for row in &step.rows {
            self.check_start(row);
        }
        let whole = config.settings.chunking == Chunking::Off;
        let decode = |walk| walk == DECODE || walk == SPEECH_DECODE;
        let first = step.rows[0].walk;
        let alone = step.rows.len() == 1 && (first == AUDIO || whole && !decode(first));
        assert!(step.tokens() <= config.settings.max_step_tokens || alone, "over budget: {step:?}");
        assert!(step.rows.len() <= config.settings.running_limit());
        let decodes = step.rows.iter().filter(|row| decode(row.walk)).count();
        assert!(step.rows[..decodes].iter().all(|row| decode(row.walk)), "decodes come first");
        let of_talker = self.live[&step.rows[0].key].arrival.decode() == SPEECH_DECODE;
        let (mixed, decode_walk) = if of_talker { (SPEECH_MIXED, SPEECH_DECODE) } else { (MIXED, DECODE) };
        assert_eq!(step.batch_walk, if decodes == step.rows.len() { decode_walk } else { mixed });
        let partition = self.live.values().filter(|live| live.arrival.decode() == decode_walk);
        let most = config.steps_in_flight;
        let is_free = |live: &Live<'_>| {
            live.in_flight < most && !live.is_away() && !live.is_planned_out() && !live.awaits_mask()
        };
        let could_decode = partition.filter(|live| live.decodes() && is_free(live)).count();
        // A decode may be left out while it waits for a page. Only a preemption could free a page, and requests cannot
        // be preempted while they are in a step or while another worker uses their pages.
        let optimistic = config.settings.admission == Admission::Optimistic;
        let pinned = optimistic && self.live.values().any(Live::gives_up_no_page);
        // A decode is also left out while it is about to yield its place to another share.
        let shares: HashSet<u64> = self.live.values().map(|live| live.arrival.share).collect();
        let waits = (optimistic || shares.len() > 1) && !self.flying.is_empty() || pinned;
        let all_decode = if waits { decodes <= could_decode } else { decodes == could_decode };
        assert!(all_decode || alone, "{could_decode} could decode, {decodes} do");
        self.check_grid(&step.rows[decodes..], step.rows.len());
        for row in &step.rows {
            self.check_row(step, row);
        }
        let in_step: Vec<GraphKey> = step.rows.iter().map(|row| row.key).collect();
        // The bound counts the request's own `PATIENCE` and, for each other request, a step of its own and `PATIENCE`
        // steps in between. The factor is 2 because the two partitions take turns.
        let most = 2 * (PATIENCE as usize + 1) * config.settings.running_limit();
        // Beside decodes of another share, one step in `MEASURED_EVERY` has no prefill, so a prefill waits for longer.
        let most = most + most.div_ceil(MEASURED_EVERY as usize - 1);
        // The first request in order waits for a page only until the last one in order has no row in flight and is
        // preempted. So the bound does not depend on the lengths of the outputs.
        let most_led = 2 * (config.steps_in_flight + PATIENCE as usize);
        let first = self.live.iter().filter(|(_, live)| live.slot.is_some());
        let first = first.min_by_key(|(_, live)| live.order).map(|(key, _)| *key);
        for (key, live) in self.live.iter_mut().filter(|(_, live)| is_free(live)) {
            let leads = first == Some(*key) && live.decodes() && !pinned && !in_step.contains(key);
            live.led_in_vain = if leads { live.led_in_vain + 1 } else { 0 };
            assert!(live.led_in_vain <= most_led, "{key} was first and left out {most_led} times");
            let admitted = live.planned.computed > 0 && !pinned;
            live.passed_over += usize::from(admitted && !in_step.contains(key));
            let atomic = live.segment().is_some_and(|(walk, _)| walk == AUDIO || whole);
            let bounded = atomic || live.decodes() || config.settings.prefill_sharing == PrefillSharing::Fair;
            assert!(!bounded || live.passed_over <= most, "{key} was passed over {} times", live.passed_over);
        }
    }

    /// Enqueues a checked step on the device, which decides the outcome of each row.
    fn enqueue(&mut self, step: StepPlan) {
        let saves = self.check_copies(&step);
        let refused = self.roll() < self.script.aborts;
        let outcomes: Vec<RowOutcome> = step.rows.iter().map(|row| self.outcome(row)).collect();
        for (row, outcome) in step.rows.iter().zip(&outcomes) {
            let live = self.live.get_mut(&row.key).expect("it was checked");
            (live.fresh, live.initialised, live.slot) = (false, true, Some(row.slot));
            live.passed_over = 0;
            live.in_flight += 1;
            live.planned.computed = row.positions.end;
            live.planned.passes += 1;
            if row.is_terminal() {
                let token = if let RowOutcome::Sampled(token) = outcome { *token } else { WORD };
                remember(&mut live.history, token);
                live.planned.generated += 1;
            }
            self.seen.continued += usize::from(row.continues);
        }
        self.flying.push_back(Flight { step, outcomes, saves, has_run: false, refused });
    }

    fn outcome(&mut self, row: &Row) -> RowOutcome {
        if self.is_void(row) {
            return RowOutcome::NotSampled(NotSampled::Void);
        }
        let (failure, token) = (self.roll(), self.roll());
        if failure < self.script.failures {
            return RowOutcome::Failed("injected".into());
        }
        let Terminality::Terminal { forbidden } = &row.terminality else { return RowOutcome::Computed };
        if let Some(why) = self.not_sampled(row) {
            return RowOutcome::NotSampled(why);
        }
        let token = if token < 5 { [EOS, STOP][(token % 2) as usize] } else { WORD };
        RowOutcome::Sampled(if forbidden.contains(&token) { WORD } else { token })
    }
}

fn xorshift(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % 100
}

#[test]
fn every_script_plays_out() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(3000);
    let seen = std::cell::RefCell::new(Seen::default());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let result = runner.run(&script(), |script| {
        let (log, first) = Simulation::new(&script, Ahead::Never).run();
        let (again, second) = Simulation::new(&script, Ahead::Sometimes).run();
        prop_assert_eq!(first.rows_ahead, 0);
        prop_assert_eq!(
            log,
            again,
            "a plan is a function of the calls to the scheduler, with or without prepared rows"
        );
        seen.borrow_mut().add(&second);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let seen = seen.into_inner();
    eprintln!("{cases} scripts, played twice: {seen:?}");
    if let Some(missing) = seen.too_few().filter(|_| cases >= 3000) {
        panic!("the scripts test too little: {missing} in {seen:?}");
    }
}
