//! Random traffic, cancels and engine failures against an oracle that counts for itself.

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{AUDIO, DECODE, EOS, MIXED, STOP, TEXT, WORD, key};
use proptest::{collection::vec, prelude::*};
use tutti_proto::{GraphKey, walks::WalkId};
use tutti_scheduler::{
    ATOMIC_PATIENCE, Ending, Finish, GraphLaunch, Outcome, PageId, Row, RowOutcome, Scheduler,
    SchedulerConfig, Segment, StepPlan, Stopping, Terminality,
};

/// Everything that happens, chosen before anything does. A number of the script's own generator decides each fate.
#[derive(Clone, Debug)]
struct Script {
    config: SchedulerConfig,
    /// Steps planned ahead of the oldest one still running.
    depth: usize,
    requests: Vec<Arrival>,
    fate_seed: u64,
    /// Of 100 steps, how many the engine aborts.
    aborts: u64,
    /// Of 100 rows, how many the engine fails.
    failures: u64,
}

#[derive(Clone, Debug)]
struct Arrival {
    turn: usize,
    /// May lie before the arrival.
    cancel: Option<usize>,
    prefill: Vec<(WalkId, usize)>,
    generated: u32,
    max_tokens: u32,
    min_tokens: u32,
    stops: bool,
}

impl Arrival {
    fn launch(&self, request: u64) -> GraphLaunch {
        let ends: (&[u32], &[u32]) = if self.stops { (&[EOS], &[STOP]) } else { (&[], &[]) };
        GraphLaunch {
            key: key(request),
            prefill: self.prefill.iter().map(|&(walk, tokens)| Segment { walk, tokens }).collect(),
            decode: Some(DECODE),
            generated: self.generated,
            stopping: Stopping::new(self.max_tokens, self.min_tokens, ends.0, ends.1),
        }
    }

    fn prefill_tokens(&self) -> usize {
        self.prefill.iter().map(|segment| segment.1).sum()
    }

    fn max_total(&self) -> usize {
        self.prefill_tokens() - self.generated as usize + self.max_tokens.max(self.generated) as usize
    }
}

/// What the oracle knows of a request that was accepted and has not ended.
struct Live<'a> {
    arrival: &'a Arrival,
    computed: usize,
    generated: u32,
    passes: u32,
    in_step: bool,
    cancelled: bool,
    /// Steps planned without it since its last one; counted once it has pages.
    passed_over: usize,
}

impl Live<'_> {
    fn segment(&self) -> Option<(WalkId, usize)> {
        let mut end = 0;
        self.arrival.prefill.iter().find_map(|&(walk, tokens)| {
            end += tokens;
            (end > self.computed).then_some((walk, end))
        })
    }

    fn decodes(&self) -> bool {
        self.segment().is_none()
    }
}

struct Simulation<'a> {
    script: &'a Script,
    scheduler: Scheduler,
    live: BTreeMap<GraphKey, Live<'a>>,
    ended: BTreeMap<GraphKey, Outcome>,
    flying: VecDeque<StepPlan>,
    fate: u64,
    /// Every plan and ending as text: what must be the same in a second run.
    log: Vec<String>,
    steps: usize,
}

impl<'a> Simulation<'a> {
    fn new(script: &'a Script) -> Self {
        Self {
            script,
            scheduler: common::scheduler(script.config.clone()),
            live: BTreeMap::new(),
            ended: BTreeMap::new(),
            flying: VecDeque::new(),
            fate: script.fate_seed | 1,
            log: Vec::new(),
            steps: 0,
        }
    }

    /// A number below 100 (xorshift).
    fn roll(&mut self) -> u64 {
        self.fate ^= self.fate << 13;
        self.fate ^= self.fate >> 7;
        self.fate ^= self.fate << 17;
        (self.fate >> 11) % 100
    }

    fn run(mut self) -> (Vec<String>, usize) {
        let script = self.script;
        let last = script.requests.iter().map(|r| r.turn.max(r.cancel.unwrap_or(0))).max().unwrap_or(0);
        // Each turn that is not aborted moves somebody by a position or more.
        let work: usize = script.requests.iter().map(Arrival::max_total).sum();
        let bound = last + 10 + (work + script.requests.len()) * 8;
        let mut turn = 0;
        while turn <= last || !self.scheduler.is_empty() || !self.flying.is_empty() {
            assert!(turn < bound, "{} requests not ended after {turn} turns", self.live.len());
            for (request, arrival) in script.requests.iter().enumerate() {
                if arrival.turn == turn {
                    self.add(request as u64, arrival);
                }
                if arrival.cancel == Some(turn) {
                    self.scheduler.cancel(key(request as u64));
                    self.live.entry(key(request as u64)).and_modify(|live| live.cancelled = true);
                }
            }
            self.turn();
            turn += 1;
        }
        let load = self.scheduler.load();
        assert_eq!((load.running, load.waiting, load.pages_used), (0, 0, 0), "everything is given back");
        assert!(self.live.is_empty(), "accepted but never ended: {:?}", self.live.keys());
        (self.log, self.steps)
    }

    fn add(&mut self, request: u64, arrival: &'a Arrival) {
        let config = &self.script.config;
        let total = arrival.max_total();
        let possible = total <= config.max_context
            && total.div_ceil(config.page_tokens) < config.pages
            && self.live.len() < config.max_running_requests + config.max_waiting_requests;
        let added = self.scheduler.add(arrival.launch(request));
        assert_eq!(added.is_ok(), possible, "{added:?}");
        if possible {
            let generated = arrival.generated;
            let cancelled = arrival.cancel.is_some_and(|turn| turn < arrival.turn);
            let live = Live {
                arrival,
                computed: 0,
                generated,
                passes: 0,
                in_step: false,
                cancelled,
                passed_over: 0,
            };
            self.live.insert(key(request), live);
        }
    }

    fn turn(&mut self) {
        let planned = self.scheduler.plan();
        let told = !planned.endings.is_empty();
        for ending in planned.endings {
            assert_eq!(ending.outcome, Outcome::Cancelled);
            self.end(ending);
        }
        let late = self.live.iter().find(|(_, live)| live.cancelled && !live.in_step);
        assert!(late.is_none(), "{:?} outlived its cancel", late.map(|(key, _)| key));
        let stalled = planned.step.is_none() && self.flying.is_empty() && !told;
        assert!(!stalled || self.live.is_empty(), "requests wait, but nothing runs");
        let idle = planned.step.is_none();
        if let Some(step) = planned.step {
            self.check_plan(&step);
            self.flying.push_back(step);
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
        let alone = step.rows.len() == 1 && step.rows[0].walk == AUDIO;
        assert!(step.tokens() <= config.max_step_tokens || alone, "over budget: {step:?}");
        assert!(step.rows.len() <= config.max_running_requests);
        let decodes = step.rows.iter().filter(|row| row.walk == DECODE).count();
        assert!(step.rows[..decodes].iter().all(|row| row.walk == DECODE), "decodes come first");
        assert_eq!(step.batch_walk, if decodes == step.rows.len() { DECODE } else { MIXED });
        let could_decode = self.live.values().filter(|live| live.decodes() && !live.in_step).count();
        assert!(decodes == could_decode || alone, "{could_decode} could decode, {decodes} do");
        for row in &step.rows {
            self.check_row(row);
        }
        let here: Vec<GraphKey> = step.rows.iter().map(|row| row.key).collect();
        // Its own patience, and a step alone for each of the others, with as many steps between them.
        let most = (ATOMIC_PATIENCE as usize + 1) * config.max_running_requests;
        for (key, live) in self.live.iter_mut().filter(|(_, live)| !live.in_step) {
            let admitted = live.computed > 0;
            live.passed_over += usize::from(admitted && !here.contains(key));
            let atomic = live.segment().is_some_and(|(walk, _)| walk == AUDIO);
            assert!(!atomic || live.passed_over <= most, "{key} was passed over {} times", live.passed_over);
        }
        for key in here {
            if let Some(live) = self.live.get_mut(&key) {
                (live.in_step, live.passed_over) = (true, 0);
            }
        }
    }

    fn check_row(&self, row: &Row) {
        let config = &self.script.config;
        let live = self.live.get(&row.key).unwrap_or_else(|| panic!("{} is not there", row.key));
        let arrival = live.arrival;
        assert!(!live.in_step, "{} is in two steps", row.key);
        assert_eq!(row.positions.start, live.computed, "a position is skipped or computed again");
        assert_eq!(row.epoch.0, live.passes);
        match live.segment() {
            None => assert_eq!((row.walk, row.positions.len()), (DECODE, 1)),
            Some((AUDIO, end)) => assert_eq!((row.walk, row.positions.end), (AUDIO, end), "atomic was cut"),
            Some((walk, end)) => {
                assert_eq!(row.walk, walk);
                assert!(!row.positions.is_empty() && row.positions.end <= end);
                assert!(row.positions.len() <= config.max_prefill_chunk.unwrap_or(usize::MAX));
            }
        }
        let last = row.positions.end >= arrival.prefill_tokens();
        assert_eq!(row.terminality.is_terminal(), last && live.generated < arrival.max_tokens);
        if let Terminality::Terminal { forbidden } = &row.terminality {
            let early = arrival.stops && live.generated < arrival.min_tokens;
            assert_eq!(**forbidden, if early { vec![EOS, STOP] } else { vec![] });
        }
        assert!(row.block_table.len() * config.page_tokens >= row.positions.end, "pages do not cover");
        assert!(!row.block_table.contains(&PageId::NULL));
    }

    /// Runs or aborts a step, and follows what the scheduler makes of it.
    fn finish(&mut self, step: StepPlan) {
        for row in &step.rows {
            if let Some(live) = self.live.get_mut(&row.key) {
                live.in_step = false;
            }
        }
        if self.roll() < self.script.aborts {
            self.scheduler.abort(step);
            return;
        }
        let outcomes: Vec<RowOutcome> = step.rows.iter().map(|row| self.outcome(row)).collect();
        for (commit, outcome) in self.scheduler.commit(step, outcomes.clone()).into_iter().zip(outcomes) {
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
                } else {
                    assert_eq!(commit.sampled, None);
                }
                expected = expected.or_else(|| ending_of(live, &outcome));
            }
            assert_eq!(commit.ending.as_ref().map(|e| e.outcome.clone()), expected);
            if let Some(ending) = commit.ending {
                self.end(ending);
            }
        }
    }

    fn outcome(&mut self, row: &Row) -> RowOutcome {
        let (failure, token) = (self.roll(), self.roll());
        if failure < self.script.failures {
            return RowOutcome::Failed("planted".into());
        }
        let Terminality::Terminal { forbidden } = &row.terminality else { return RowOutcome::Computed };
        let token = if token < 5 { [EOS, STOP][(token % 2) as usize] } else { WORD };
        RowOutcome::Sampled(if forbidden.contains(&token) { WORD } else { token })
    }

    fn end(&mut self, ending: Ending) {
        self.log.push(format!("{ending:?}"));
        let live = self.live.remove(&ending.key).expect("only what was accepted and has not ended ends");
        assert_eq!(ending.passes.0, live.passes);
        if let Outcome::Finished { generated, .. } = ending.outcome {
            assert_eq!(generated, live.generated);
        }
        assert!(self.ended.insert(ending.key, ending.outcome).is_none(), "{} ended twice", ending.key);
    }

    /// No page is in two block tables, and none is held that nobody answers for.
    fn check_pages(&self) {
        let mut owner = BTreeMap::new();
        for row in self.flying.iter().flat_map(|step| &step.rows) {
            for page in row.block_table.iter() {
                let before = owner.insert(*page, row.key);
                assert!(before.is_none_or(|key| key == row.key), "page {page:?} has two owners");
            }
        }
        let load = self.scheduler.load();
        let config = &self.script.config;
        assert!(load.running <= config.max_running_requests.min(config.max_step_tokens));
        assert!(owner.len() <= load.pages_used, "a page is free while a step uses it");
        let most: usize = self.live.values().map(|live| self.pages(live)).sum();
        assert!(load.pages_used <= most, "{} pages held, {most} can be", load.pages_used);
    }

    fn pages(&self, live: &Live<'_>) -> usize {
        live.arrival.max_total().div_ceil(self.script.config.page_tokens)
    }
}

fn ending_of(live: &Live<'_>, outcome: &RowOutcome) -> Option<Outcome> {
    let finished = |reason| Some(Outcome::Finished { reason, generated: live.generated });
    if live.computed < live.arrival.prefill_tokens() {
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

fn arrival() -> impl Strategy<Value = Arrival> {
    let prefill = vec((prop_oneof![3 => Just(TEXT), 1 => Just(AUDIO)], 1_usize..40), 1..4);
    let max_tokens = prop_oneof![5 => 0_u32..12, 1 => 12_u32..150];
    let output = (max_tokens, 0_u32..4, 0_u32..4, any::<bool>());
    (0_usize..60, proptest::option::weighted(0.2, 0_usize..90), prefill, output).prop_map(
        |(turn, cancel, prefill, (max_tokens, min_tokens, generated, stops))| {
            let tokens: usize = prefill.iter().map(|segment| segment.1).sum();
            let generated = generated.min(tokens as u32 - 1).min(max_tokens);
            Arrival { turn, cancel, prefill, generated, max_tokens, min_tokens, stops }
        },
    )
}

fn script() -> impl Strategy<Value = Script> {
    // Budgets below the running set's size are as likely as comfortable ones.
    let budget = prop_oneof![1_usize..8, 1_usize..48];
    let config = (budget, proptest::option::of(1_usize..24), 1_usize..10, 0_usize..24)
        .prop_flat_map(|bounds| (Just(bounds), 1_usize..9, 2_usize..120, 8_usize..300))
        .prop_map(|((step, chunk, running, waiting), page_tokens, pages, max_context)| SchedulerConfig {
            max_step_tokens: step,
            max_prefill_chunk: chunk,
            max_running_requests: running,
            max_waiting_requests: waiting,
            max_context,
            page_tokens,
            pages,
        });
    let faults = (prop_oneof![Just(0_u64), 1_u64..30], prop_oneof![Just(0_u64), 1_u64..10]);
    (config, 0_usize..3, vec(arrival(), 1..24), any::<u64>(), faults).prop_map(
        |(config, depth, requests, fate_seed, (aborts, failures))| Script {
            config,
            depth,
            requests,
            fate_seed,
            aborts,
            failures,
        },
    )
}

#[test]
fn every_script_plays_out() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2500);
    let steps = std::cell::Cell::new(0);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let result = runner.run(&script(), |script| {
        let (log, taken) = Simulation::new(&script).run();
        steps.set(steps.get() + taken);
        let (again, _) = Simulation::new(&script).run();
        prop_assert_eq!(log, again, "a plan is a function of what the scheduler was told");
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    eprintln!("{} steps in {cases} scripts", steps.get());
    assert!(cases < 2500 || steps.get() > 100_000, "only {} steps: the scripts test too little", steps.get());
}
