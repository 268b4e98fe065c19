//! Tests that a request ends early if its deadline cannot be met, and that no request ends early that could meet its
//! deadline.

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{AUDIO, DECODE, TEXT, config, key, scheduler, segments, set, text, tokens, words};
use proptest::{collection::vec, prelude::*};
use tutti_proto::{CacheSalt, declaration::WalkId};
use tutti_scheduler::{Content, Ending, GraphLaunch, Outcome, Row, Scheduler, SchedulerConfig, StepPlan};
use tutti_settings::{Chunking, PrefillSharing};

const fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

/// The costs of a device's steps, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Device {
    fixed: u64,
    prefill: u64,
    /// Cost per token of a segment that must not be cut.
    audio: u64,
    decode: u64,
    /// Cost per token and per thousand tokens that the token attends to.
    attended: u64,
    /// Maximum extra time of a step, in percent of its costs. `MARGIN` allows for up to 100.
    jitter: u64,
}

impl Device {
    const STEADY: Self = Self { fixed: 1000, prefill: 100, audio: 100, decode: 20, attended: 0, jitter: 0 };

    fn row(&self, walk: WalkId, positions: std::ops::Range<usize>) -> u64 {
        let (tokens, before) = (positions.len() as u64, positions.start as u64);
        let token = match walk {
            DECODE => self.decode,
            AUDIO => self.audio,
            _ => self.prefill,
        };
        token * tokens + self.attended * tokens * (before + tokens / 2) / 1000
    }

    fn step(&self, rows: &[Row], luck: u64) -> Duration {
        let rows: u64 = rows.iter().map(|row| self.row(row.walk, row.positions.clone())).sum();
        let steady = self.fixed + rows;
        us(steady + steady * (luck % (self.jitter + 1)) / 100)
    }

    /// Returns the time that a prefill takes from position `from` on if it runs alone and without jitter.
    fn alone(&self, prefill: &[(WalkId, usize)], from: usize, config: &SchedulerConfig) -> Duration {
        let chunk =
            config.settings.max_prefill_chunk_size.unwrap_or(usize::MAX).min(config.settings.max_step_tokens);
        let (mut time, mut at, mut end) = (0, from, 0);
        for &(walk, tokens) in prefill {
            end += tokens;
            while at < end {
                let whole = walk == AUDIO || config.settings.chunking == Chunking::Off;
                let to = if whole { end } else { end.min(at + chunk) };
                time += self.fixed + self.row(walk, at..to);
                at = to;
            }
        }
        us(time)
    }
}

/// A simulated worker. Its clock advances by the simulated duration of each step.
struct Worker {
    scheduler: Scheduler,
    device: Device,
    now: Duration,
    luck: u64,
    computed: BTreeMap<u64, usize>,
}

impl Worker {
    fn new(config: SchedulerConfig, device: Device) -> Self {
        let scheduler = scheduler(config);
        Self { scheduler, device, now: Duration::ZERO, luck: 1, computed: BTreeMap::new() }
    }

    /// Runs one turn. Returns the endings of the plan, and true if there was a step.
    fn turn(&mut self) -> (Vec<Ending>, bool) {
        let planned = self.scheduler.plan(self.now);
        for key in planned.preempted {
            self.computed.insert(key.request.0, 0);
        }
        let ran = planned.step.is_some();
        if let Some(step) = planned.step {
            self.run(step);
        }
        (planned.endings, ran)
    }

    fn run(&mut self, step: StepPlan) {
        self.luck = self.luck.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let took = self.device.step(&step.rows, self.luck >> 33);
        self.now += took;
        let outcomes = words(&step);
        for commit in self.scheduler.commit(step, outcomes, took) {
            self.computed.insert(commit.row.key.request.0, commit.row.positions.end);
        }
    }

    /// Runs turns until no request is left. Returns the endings of the plans.
    fn drain(&mut self) -> Vec<Ending> {
        let mut endings = Vec::new();
        while !self.scheduler.is_empty() {
            endings.extend(self.turn().0);
        }
        endings
    }

    /// Runs a few prompts of this length alone, so that the scheduler learns their minimum time.
    fn learn(&mut self, prompt: usize) {
        for request in 900..903 {
            self.scheduler.add(text(request, prompt, 1)).expect("there is room for it");
            assert!(self.drain().is_empty());
        }
    }

    fn due(&self, launch: GraphLaunch, left: Duration) -> GraphLaunch {
        GraphLaunch { deadline: Some(self.now + left), ..launch }
    }
}

fn roomy() -> SchedulerConfig {
    SchedulerConfig {
        pages: 1025,
        ..set(config(), |settings| {
            settings.max_step_tokens = 64;
            settings.prefill_sharing = PrefillSharing::Fair;
        })
    }
}

#[test]
fn a_prompt_that_is_too_long_for_its_time_ends_at_once_and_frees_what_it_holds() {
    let mut worker = Worker::new(roomy(), Device::STEADY);
    worker.learn(64);
    // 640 tokens are ten steps of 7.4 ms.
    let hopeless = worker.due(text(1, 640, 1), us(30_000));
    let possible = worker.due(text(2, 640, 1), us(75_000));
    worker.scheduler.add(hopeless).unwrap();
    let (endings, _) = worker.turn();
    assert_eq!(endings.len(), 1);
    let unreachable = Outcome::DeadlineUnreachable { needed: us(37_000), left: us(30_000) };
    assert_eq!((endings[0].key, &endings[0].outcome), (key(1), &unreachable));
    assert_eq!(worker.scheduler.load().pages_used, 0);
    worker.scheduler.add(possible).unwrap();
    assert_eq!(worker.drain(), []);
}

#[test]
fn a_prefill_that_falls_behind_is_ended_before_its_time_is_up() {
    let mut worker = Worker::new(roomy(), Device::STEADY);
    worker.learn(64);
    // Half of each step goes to request 1, so request 2 takes twice as long as alone. Halfway through its prompt,
    // request 2 is certain to miss its deadline.
    worker.scheduler.add(text(1, 1280, 1)).unwrap();
    let late = worker.due(text(2, 1280, 1), us(160_000));
    let deadline = late.deadline.unwrap();
    worker.scheduler.add(late).unwrap();
    let mut endings = Vec::new();
    while endings.is_empty() {
        endings = worker.turn().0;
    }
    assert!(matches!(endings[0].outcome, Outcome::DeadlineUnreachable { .. }), "{endings:?}");
    assert!(worker.now < deadline);
}

#[test]
fn no_request_is_ended_before_any_step_has_run() {
    let mut worker = Worker::new(roomy(), Device::STEADY);
    let launch = worker.due(text(1, 1024, 1), us(1));
    worker.scheduler.add(launch).unwrap();
    let (endings, ran) = worker.turn();
    assert!(endings.is_empty() && ran);
    assert_eq!(worker.drain()[0].outcome, Outcome::DeadlineExceeded);
}

#[test]
fn scored_prompts_give_no_bound_for_others() {
    let mut worker = Worker::new(roomy(), Device::STEADY);
    for request in 1..6 {
        // These requests need the logits of every position. A step with such a request does more work than others, so
        // the bound ignores it.
        let content = Content {
            tokens: vec![7; 64].into(),
            media: vec![],
            salt: CacheSalt::default(),
            may_reuse: false,
        };
        worker.scheduler.add(GraphLaunch { content: Some(content), ..text(request, 64, 1) }).unwrap();
        worker.drain();
    }
    let hopeless = worker.due(text(6, 640, 1), us(10_000));
    worker.scheduler.add(hopeless).unwrap();
    assert_eq!(worker.turn(), (vec![], true));
}

#[test]
fn a_cached_prefix_takes_no_time() {
    let prompt: Vec<u32> = (0..640).collect();
    let mut worker = Worker::new(roomy(), Device::STEADY);
    worker.learn(64);
    worker.scheduler.add(tokens(1, &prompt, 1)).unwrap();
    worker.drain();
    let warm = worker.due(tokens(2, &prompt, 1), us(10_000));
    let cold = worker.due(tokens(3, &prompt[1..], 1), us(10_000));
    worker.scheduler.add(warm).unwrap();
    worker.scheduler.add(cold).unwrap();
    let (endings, _) = worker.turn();
    assert_eq!(endings.iter().map(|ending| ending.key).collect::<Vec<_>>(), [key(3)]);
    assert_eq!(worker.drain(), []);
}

#[derive(Clone, Debug)]
struct Asked {
    after_turns: usize,
    prefill: Vec<(WalkId, usize)>,
    max_tokens: u32,
    /// Time until the deadline, in percent of the time that the prefill takes if it runs alone.
    time: u64,
    priority: i32,
}

fn asked() -> impl Strategy<Value = Asked> {
    let prefill = vec((prop_oneof![4 => Just(TEXT), 1 => Just(AUDIO)], 1_usize..400), 1..3);
    // Half of the requests arrive on an idle worker, because only such requests show the scheduler the minimum time.
    let after = prop_oneof![Just(1000), 0_usize..4];
    (after, prefill, 1_u32..20, 1_u64..400, -2..3_i32).prop_map(
        |(after_turns, prefill, max_tokens, time, priority)| Asked {
            after_turns,
            prefill,
            max_tokens,
            time,
            priority,
        },
    )
}

fn device() -> impl Strategy<Value = Device> {
    let costs = (0_u64..5000, 1_u64..200, 1_u64..400, 0_u64..200);
    (costs, 0_u64..2000, prop_oneof![Just(0_u64), 0_u64..=100]).prop_map(
        |((fixed, prefill, audio, decode), attended, jitter)| Device {
            fixed,
            prefill,
            audio,
            decode,
            attended,
            jitter,
        },
    )
}

/// The settings that affect the minimum time of a prefill.
fn policies() -> impl Strategy<Value = SchedulerConfig> {
    let chunk = proptest::option::of(4_usize..100);
    let sharing = prop_oneof![
        Just(PrefillSharing::ShortestFirst),
        Just(PrefillSharing::Fair),
        Just(PrefillSharing::FirstCome)
    ];
    (8_usize..200, chunk, proptest::bool::weighted(0.2), sharing).prop_map(
        |(max_step_tokens, max_prefill_chunk_size, whole, prefill_sharing)| {
            set(roomy(), |settings| {
                settings.max_step_tokens = max_step_tokens;
                settings.max_prefill_chunk_size = max_prefill_chunk_size;
                settings.chunking = if whole { Chunking::Off } else { Chunking::Scheduler };
                settings.prefill_sharing = prefill_sharing;
            })
        },
    )
}

/// Runs the requests to their ends. Returns the number of requests that were ended early. Asserts that each of these
/// requests would have missed its deadline even if it had run alone from then on.
fn play(device: Device, requests: &[Asked], config: &SchedulerConfig) -> usize {
    let mut worker = Worker::new(config.clone(), device);
    let mut early = 0;
    let mut turn = |worker: &mut Worker| {
        let (endings, ran) = worker.turn();
        for Ending { key, outcome, .. } in endings {
            if let Outcome::DeadlineUnreachable { needed, left } = outcome {
                let request = key.request.0;
                let from = worker.computed.get(&request).copied().unwrap_or(0);
                let alone = device.alone(&requests[request as usize].prefill, from, config);
                assert!(needed > left && alone >= needed, "{key} takes {alone:?}, not {needed:?} or more");
                early += 1;
            }
        }
        ran
    };
    for (request, asked) in requests.iter().enumerate() {
        let _ = (0..asked.after_turns).take_while(|_| turn(&mut worker)).count();
        let time = device.alone(&asked.prefill, 0, config) * asked.time as u32 / 100;
        let mut launch = worker.due(segments(request as u64, &asked.prefill, asked.max_tokens), time);
        launch.priority = asked.priority;
        worker.scheduler.add(launch).expect("there is room for it");
    }
    while !worker.scheduler.is_empty() {
        turn(&mut worker);
    }
    early
}

#[test]
fn no_request_is_ended_that_could_meet_its_deadline() {
    let early = std::cell::Cell::new(0);
    let config = ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let result = runner.run(&(device(), vec(asked(), 8..60), policies()), |(device, requests, config)| {
        early.set(early.get() + play(device, &requests, &config));
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    eprintln!("{} requests were ended early", early.get());
    assert!(early.get() > 100, "only {} requests were ended early: this tests too little", early.get());
}
