//! Random traffic, cancels, deadlines and engine failures, checked by an oracle with counts of its own.
//!
//! `PROPTEST_CASES` is the number of scripts; `tests/long-properties` plays enough for two million steps.

#[path = "../common/mod.rs"]
mod common;
mod disaggregated;
mod memory;
mod rows;
mod script;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use common::{AUDIO, DECODE, EOS, MIXED, SPEECH_DECODE, SPEECH_MIXED, STOP, WORD, key};
use disaggregated::Away;
use memory::{History, Memory, remember};
use proptest::prelude::*;
use script::{Arrival, Script, script};
use tutti_proto::{GraphKey, declaration::WalkId};
use tutti_scheduler::{
    Ending, Finish, Outcome, PATIENCE, PageId, Row, RowOutcome, Scheduler, StepPlan, Terminality,
};
use tutti_settings::{Admission, Chunking, PrefillSharing};

/// The oracle's knowledge of a request that was accepted and has not ended.
struct Live<'a> {
    arrival: &'a Arrival,
    history: History,
    computed: usize,
    /// Number of tokens to compute before the request samples: the prefill, and after a preemption also the output so
    /// far.
    target: usize,
    /// True if no step has computed the request since its admission. Its first row may then start behind a cached
    /// prefix.
    fresh: bool,
    /// Number of the request's cached tokens before its first step.
    cached: Option<usize>,
    preempted: bool,
    generated: u32,
    passes: u32,
    in_step: bool,
    cancelled: bool,
    /// The event at another worker that the request waits for.
    away: Away,
    /// True once the request's transfer has been reported as failed.
    failing: bool,
    /// Number of steps planned without the request since its last one. Counted once the request has computed a
    /// position.
    passed_over: usize,
}

impl Live<'_> {
    fn segment(&self) -> Option<(WalkId, usize)> {
        let mut end = 0;
        let found = self.arrival.prefill.iter().find_map(|&(walk, tokens)| {
            end += tokens;
            (end > self.computed).then_some((walk, end))
        });
        let last = self.arrival.prefill.last().map_or(AUDIO, |segment| segment.0);
        match found {
            // A preemption lengthens the last segment, or adds a text segment behind one that must not be cut.
            Some((walk, end)) if end == self.arrival.prefill_tokens() && last != AUDIO => {
                Some((walk, self.target))
            }
            Some(found) => Some(found),
            None if self.computed < self.target && last == AUDIO => Some((common::TEXT, self.target)),
            None => (self.computed < self.target).then_some((last, self.target)),
        }
    }

    fn is_due(&self, deadline: usize) -> bool {
        self.arrival.deadline.is_some_and(|turn| turn <= deadline)
    }

    fn decodes(&self) -> bool {
        self.segment().is_none()
    }
}

/// The frequency of calls to `plan_ahead` while steps run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    Never,
    /// In some turns, at some of the points where it can be called.
    Sometimes,
}

struct Simulation<'a> {
    script: &'a Script,
    ahead: Ahead,
    scheduler: Scheduler,
    live: BTreeMap<GraphKey, Live<'a>>,
    ended: BTreeMap<GraphKey, Outcome>,
    flying: VecDeque<StepPlan>,
    memory: Memory,
    turn: usize,
    fate: u64,
    /// A generator of its own, so that `fate` does not depend on the calls to `plan_ahead`.
    ahead_fate: u64,
    /// Every plan and ending as text, for comparison with a second run.
    log: Vec<String>,
    steps: usize,
}

impl<'a> Simulation<'a> {
    fn new(script: &'a Script, ahead: Ahead) -> Self {
        Self {
            script,
            ahead,
            scheduler: common::scheduler(script.config.clone()),
            live: BTreeMap::new(),
            ended: BTreeMap::new(),
            flying: VecDeque::new(),
            memory: Memory::new(script.config.pages, script.config.page_tokens),
            turn: 0,
            fate: script.fate_seed | 1,
            ahead_fate: script.fate_seed | 1,
            log: Vec::new(),
            steps: 0,
        }
    }

    /// A number below 100.
    fn roll(&mut self) -> u64 {
        xorshift(&mut self.fate)
    }

    /// Calls `plan_ahead` at a point where a step may be running.
    fn maybe_plan_ahead(&mut self) {
        if self.ahead == Ahead::Sometimes && xorshift(&mut self.ahead_fate) < 60 {
            self.scheduler.plan_ahead();
        }
    }

    /// Runs the script. Returns the log, the number of steps, and the number of rows that had been prepared.
    fn run(mut self) -> (Vec<String>, usize, u64) {
        let script = self.script;
        let last = script.requests.iter().map(|r| r.turn.max(r.cancel.unwrap_or(0))).max().unwrap_or(0);
        // Each turn that is not aborted advances a request by at least one position. A preempted request computes its
        // positions again, once for each request before it.
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
            self.take_turn();
            self.turn += 1;
        }
        let load = self.scheduler.load();
        assert_eq!((load.running, load.waiting, load.pages_used), (0, 0, 0), "everything is given back");
        assert!(self.live.is_empty(), "accepted but never ended: {:?}", self.live.keys());
        (self.log, self.steps, load.tally.rows_ahead)
    }

    fn add(&mut self, request: u64, arrival: &'a Arrival) {
        let config = &self.script.config;
        let total = arrival.max_total();
        let possible = total <= config.max_context
            && arrival.max_held().div_ceil(config.page_tokens) < config.pages
            && self.live.len() < config.settings.max_running_requests + config.max_waiting_requests;
        let added = self.scheduler.add(arrival.launch(request));
        assert_eq!(added.is_ok(), possible, "{added:?}");
        if possible {
            let generated = arrival.generated;
            let cancelled = arrival.cancel.is_some_and(|turn| turn < arrival.turn);
            let mut history = History::new();
            arrival.tokens(request).into_iter().for_each(|token| remember(&mut history, token));
            let live = Live {
                arrival,
                history,
                computed: 0,
                target: arrival.prefill_tokens(),
                fresh: true,
                cached: None,
                preempted: false,
                generated,
                passes: 0,
                in_step: false,
                cancelled,
                away: arrival.media.map_or(Away::No, |turns| Away::Parked { until: self.turn + turns }),
                failing: false,
                passed_over: 0,
            };
            self.live.insert(key(request), live);
        }
    }

    fn take_turn(&mut self) {
        let planned = self.scheduler.plan(Duration::from_millis(self.turn as u64));
        let ended = !planned.endings.is_empty() || !planned.preempted.is_empty();
        for ending in planned.endings {
            let live = &self.live[&ending.key];
            match ending.outcome {
                Outcome::Cancelled => assert!(live.cancelled),
                Outcome::DeadlineExceeded => assert!(live.is_due(self.turn)),
                // A turn is a millisecond, whatever its step took.
                Outcome::DeadlineUnreachable { needed, left } => {
                    let deadline = live.arrival.deadline.expect("only a deadline can be unreachable");
                    assert_eq!(left, Duration::from_millis((deadline - self.turn) as u64));
                    assert!(needed > left && live.computed < live.target);
                }
                Outcome::TransferFailed(_) => assert!(live.failing),
                ref other => panic!("{} ended between steps: {other:?}", ending.key),
            }
            self.end(ending);
        }
        let over = |live: &Live<'_>| live.cancelled || live.failing || live.is_due(self.turn);
        let late = self.live.iter().find(|(_, live)| over(live) && !live.in_step);
        assert!(late.is_none(), "{:?} outlived its cancel or deadline", late.map(|(key, _)| key));
        for key in planned.preempted {
            assert_eq!(self.script.config.settings.admission, Admission::Optimistic);
            let live = self.live.get_mut(&key).unwrap_or_else(|| panic!("{key} is not there"));
            assert!(!live.in_step, "{key} lost its pages inside a step");
            (live.computed, live.fresh, live.passed_over, live.preempted) = (0, true, 0, true);
            live.target = live.arrival.prompt_tokens() + live.generated as usize;
            self.log.push(format!("{key} preempted"));
        }
        let progress = ended || !planned.reserved.is_empty();
        planned.reserved.into_iter().for_each(|reserved| self.reserved(reserved));
        let stalled = planned.step.is_none() && self.flying.is_empty() && !progress;
        assert!(!stalled || self.live.is_empty() || self.is_any_away(), "requests wait, but nothing runs");
        let idle = planned.step.is_none();
        if let Some(step) = planned.step {
            self.check_plan(&step);
            self.flying.push_back(step);
            self.maybe_plan_ahead();
        }
        if (idle || self.flying.len() > self.script.depth)
            && let Some(step) = self.flying.pop_front()
        {
            self.finish(step);
        }
        self.check_pages();
    }

    fn check_plan(&mut self, step: &StepPlan) {
        self.log.push(format!("{step:?}"));
        self.steps += 1;
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
        assert!(step.rows.len() <= config.settings.max_running_requests);
        let decodes = step.rows.iter().filter(|row| decode(row.walk)).count();
        assert!(step.rows[..decodes].iter().all(|row| decode(row.walk)), "decodes come first");
        let of_talker = self.live[&step.rows[0].key].arrival.decode() == SPEECH_DECODE;
        let (mixed, decode_walk) = if of_talker { (SPEECH_MIXED, SPEECH_DECODE) } else { (MIXED, DECODE) };
        assert_eq!(step.batch_walk, if decodes == step.rows.len() { decode_walk } else { mixed });
        let partition = self.live.values().filter(|live| live.arrival.decode() == decode_walk);
        let could_decode =
            partition.filter(|live| live.decodes() && !live.in_step && !live.is_away()).count();
        // A decode is left out while it waits for a page of a request that is inside a step or that another worker
        // uses.
        let optimistic = config.settings.admission == Admission::Optimistic;
        let pinned = optimistic && self.live.values().any(Live::gives_up_no_page);
        let waits = optimistic && !self.flying.is_empty() || pinned;
        let all_decode = if waits { decodes <= could_decode } else { decodes == could_decode };
        assert!(all_decode || alone, "{could_decode} could decode, {decodes} do");
        self.check_grid(&step.rows[decodes..], step.rows.len());
        for row in &step.rows {
            self.check_row(row);
        }
        let in_step: Vec<GraphKey> = step.rows.iter().map(|row| row.key).collect();
        // The bound: the request's own `PATIENCE`, and for each other request a step alone with `PATIENCE` steps in
        // between. The factor is 2 because each of the two partitions has every other step.
        let most = 2 * (PATIENCE as usize + 1) * config.settings.max_running_requests;
        for (key, live) in self.live.iter_mut().filter(|(_, live)| !live.in_step) {
            let admitted = live.computed > 0 && !live.is_away() && !pinned;
            live.passed_over += usize::from(admitted && !in_step.contains(key));
            let atomic = live.segment().is_some_and(|(walk, _)| walk == AUDIO || whole);
            let bounded = atomic || live.decodes() || config.settings.prefill_sharing == PrefillSharing::Fair;
            assert!(!bounded || live.passed_over <= most, "{key} was passed over {} times", live.passed_over);
        }
        for key in in_step {
            if let Some(live) = self.live.get_mut(&key) {
                (live.in_step, live.fresh, live.passed_over) = (true, false, 0);
            }
        }
    }

    /// Runs or aborts a step, and checks the scheduler's commits.
    fn finish(&mut self, step: StepPlan) {
        for row in &step.rows {
            if let Some(live) = self.live.get_mut(&row.key) {
                live.in_step = false;
            }
        }
        for row in &step.rows {
            self.memory.check(row, &self.live[&row.key].history);
        }
        if self.roll() < self.script.aborts {
            step.rows.iter().for_each(|row| self.memory.write(row, &self.live[&row.key].history, false));
            self.scheduler.abort(step);
            return;
        }
        let outcomes: Vec<RowOutcome> = step.rows.iter().map(|row| self.outcome(row)).collect();
        for (row, outcome) in step.rows.iter().zip(&outcomes) {
            let sound = !matches!(outcome, RowOutcome::Failed(_));
            self.memory.write(row, &self.live[&row.key].history, sound);
        }
        let took = Duration::from_micros(200 + 50 * step.tokens() as u64);
        for (commit, outcome) in self.scheduler.commit(step, outcomes.clone(), took).into_iter().zip(outcomes)
        {
            let key = commit.row.key;
            let live = self.live.get_mut(&key).unwrap_or_else(|| panic!("{key} committed after its end"));
            let mut expected = None;
            if let RowOutcome::Failed(why) = outcome {
                expected = Some(Outcome::Failed(why));
            } else {
                live.computed = commit.row.positions.end;
                live.passes += 1;
                if let RowOutcome::Sampled(token) = outcome {
                    let sampled = commit.sampled.expect("a terminal row that was committed has its token");
                    assert_eq!((sampled.token, sampled.index), (token, live.generated));
                    live.generated += 1;
                    remember(&mut live.history, token);
                } else {
                    assert_eq!(commit.sampled, None);
                }
                expected = expected.or_else(|| ending_of(live, &outcome));
            }
            assert_eq!(commit.ending.as_ref().map(|e| e.outcome.clone()), expected);
            match commit.ending {
                Some(ending) => self.end(ending),
                None => self.computed_for_others(&commit.row, commit.sampled.is_some()),
            }
        }
    }

    fn outcome(&mut self, row: &Row) -> RowOutcome {
        let (failure, token) = (self.roll(), self.roll());
        if failure < self.script.failures {
            return RowOutcome::Failed("injected".into());
        }
        let Terminality::Terminal { forbidden } = &row.terminality else { return RowOutcome::Computed };
        let token = if token < 5 { [EOS, STOP][(token % 2) as usize] } else { WORD };
        RowOutcome::Sampled(if forbidden.contains(&token) { WORD } else { token })
    }

    fn end(&mut self, ending: Ending) {
        self.log.push(format!("{ending:?}"));
        let live =
            self.live.remove(&ending.key).expect("only a request that was accepted and has not ended ends");
        assert_eq!(ending.passes.0, live.passes);
        if let Some(cached) = live.cached {
            assert_eq!(ending.cached_tokens as usize, cached);
        }
        if let Outcome::Finished { generated, .. } = ending.outcome {
            assert_eq!(generated, live.generated);
        }
        assert!(self.ended.insert(ending.key, ending.outcome).is_none(), "{} ended twice", ending.key);
    }

    /// Asserts that no page is written by one request and held by another, and that no page is held without an owner.
    fn check_pages(&self) {
        let page_tokens = self.script.config.page_tokens;
        let mut owner = BTreeMap::<PageId, (GraphKey, bool)>::new();
        for row in self.flying.iter().flat_map(|step| &step.rows) {
            for (index, page) in row.block_table.iter().enumerate() {
                let writes = row.positions.start < (index + 1) * page_tokens;
                let (other, written) = *owner.entry(*page).or_insert((row.key, writes));
                assert!(other == row.key || !(writes || written), "page {page:?} has two owners");
            }
        }
        self.check_rooms(&owner);
        let load = self.scheduler.load();
        let config = &self.script.config;
        assert!(load.running <= config.settings.max_running_requests.min(config.settings.max_step_tokens));
        assert!(owner.len() <= load.pages_used, "a page is free while a step uses it");
        let most: usize = self.live.values().map(|live| self.pages(live)).sum();
        assert!(load.pages_used <= most, "{} pages held, {most} can be", load.pages_used);
    }

    fn pages(&self, live: &Live<'_>) -> usize {
        live.arrival.max_held().div_ceil(self.script.config.page_tokens)
    }
}

fn xorshift(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % 100
}

fn ending_of(live: &Live<'_>, outcome: &RowOutcome) -> Option<Outcome> {
    let finished = |reason| Some(Outcome::Finished { reason, generated: live.generated });
    if live.computed < live.target {
        return None;
    }
    if let RowOutcome::Sampled(token) = *outcome
        && live.arrival.stops
        && live.generated > live.arrival.min_tokens
    {
        match token {
            EOS => return finished(Finish::EndOfSequence),
            STOP => return finished(Finish::StopToken(STOP)),
            _ => {}
        }
    }
    if live.generated >= live.arrival.max_tokens { finished(Finish::Length) } else { None }
}

#[test]
fn every_script_plays_out() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(3000);
    let (steps, prepared) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let result = runner.run(&script(), |script| {
        let (log, taken, none_prepared) = Simulation::new(&script, Ahead::Never).run();
        let (again, _, rows_prepared) = Simulation::new(&script, Ahead::Sometimes).run();
        steps.set(steps.get() + taken);
        prepared.set(prepared.get() + rows_prepared);
        prop_assert_eq!(none_prepared, 0);
        prop_assert_eq!(
            log,
            again,
            "a plan is a function of the calls to the scheduler, with or without prepared rows"
        );
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let (steps, prepared) = (steps.get(), prepared.get());
    eprintln!("{steps} steps in {cases} scripts, played twice; {prepared} rows prepared");
    let enough = steps > 100_000 && prepared > 30_000;
    assert!(cases < 3000 || enough, "{steps} steps, {prepared} rows: the scripts test too little");
}
