//! Measures the cost of a turn: plan and commit of a step with 256 requests that decode and 64 that prefill. Turns with
//! prepared decodes alternate with turns without, and the preparation is measured, too. A second benchmark measures the
//! plan while a prompt of 128k tokens waits for pages. Most of that prompt's content is cached.
//!
//! `cargo bench -p tutti-scheduler --bench turn`. Every turn is timed by itself, and requests that end are replaced
//! between turns. The figures and a description of the machine go to standard output as JSON.

#[path = "../tests/common/mod.rs"]
mod common;

use std::{
    io::Write,
    time::{Duration, Instant},
};

use common::{scheduler, words};
use serde_json::{Map, Value, json};
use tutti_measure::machine::Machine;
use tutti_proto::CacheSalt;
use tutti_scheduler::{Content, GraphLaunch, Scheduler, SchedulerConfig};
use tutti_settings::{EngineSettings, PrefillSharing};

const DECODING: usize = 256;
const PREFILLING: usize = 64;
const TURNS: usize = 20_000;
/// Number of tokens of the prompt that waits for pages.
const WAITING: usize = 1 << 17;
/// Number of requests that decode while the prompt of `WAITING` tokens waits for pages.
const DECODING_MEANWHILE: usize = 16;

/// The timed phases of a turn: the plan without prepared decodes, their preparation, the plan with them, and the
/// commit.
const PHASES: [&str; 4] = ["plan afresh", "make ready", "settle", "commit"];

fn main() -> std::io::Result<()> {
    let machine = Machine::this();
    let mut policies = Vec::new();
    for prefill_sharing in [PrefillSharing::ShortestFirst, PrefillSharing::Fair, PrefillSharing::FirstCome] {
        for prefix_cache in [true, false] {
            let settings = EngineSettings {
                max_step_tokens: 2048,
                max_running_requests: Some(DECODING + PREFILLING),
                target_itl_ms: Some(20),
                prefill_sharing,
                no_prefix_cache: !prefix_cache,
                ..EngineSettings::default()
            };
            let times = measure(SchedulerConfig {
                settings,
                max_waiting_requests: 1024,
                max_context: 40_960,
                page_tokens: 16,
                pages: 1 << 18,
                slots: 1 + DECODING + PREFILLING,
                steps_in_flight: 1,
            });
            let phases =
                PHASES.into_iter().zip(times).map(|(phase, times)| (phase.to_owned(), summary(times)));
            policies.push(json!({
                "prefill_sharing": prefill_sharing,
                "prefix_cache": prefix_cache,
                "us": Map::from_iter(phases),
            }));
        }
    }
    let figures = json!({
        "command": "cargo bench -p tutti-scheduler --bench turn",
        "optimised": !cfg!(debug_assertions),
        "machine": machine,
        "decoding": DECODING,
        "prefilling": PREFILLING,
        "policies": policies,
        "waiting_prompt": {
            "tokens": WAITING,
            "decoding": DECODING_MEANWHILE,
            "plan_us": { "with": summary(plans(true)), "without": summary(plans(false)) },
        },
    });
    writeln!(std::io::stdout(), "{figures:#}")
}

/// Quantiles of times, in microseconds.
fn summary(mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    let of = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_nanos() as f64 / 1000.0;
    json!({ "samples": times.len(), "p50": of(0.5), "p99": of(0.99), "max": of(1.0) })
}

/// Measures the durations of each phase, in the order of [`PHASES`].
fn measure(config: SchedulerConfig) -> [Vec<Duration>; 4] {
    let mut scheduler = scheduler(config);
    let mut next = 0;
    (0..DECODING).for_each(|_| add(&mut scheduler, &mut next, 64, 30_000));
    while scheduler.load().steps < 40 {
        turn(&mut scheduler, false, &mut PHASES.map(|_| Vec::new()));
    }
    let mut times = PHASES.map(|_| Vec::with_capacity(TURNS));
    for number in 0..TURNS {
        // Each long prompt ends after one token. New prompts keep the number of prefills constant.
        while scheduler.load().running + scheduler.load().waiting < DECODING + PREFILLING {
            add(&mut scheduler, &mut next, 8192, 1);
        }
        turn(&mut scheduler, number % 2 == 0, &mut times);
    }
    times
}

fn turn(scheduler: &mut Scheduler, prepare: bool, times: &mut [Vec<Duration>; 4]) {
    let [afresh, prepared, settled, committed] = times;
    let began = Instant::now();
    let step = scheduler.plan(Duration::ZERO).step;
    let took = began.elapsed();
    // Turns alternate. Every second turn plans without prepared rows and then prepares rows for the plan of the next
    // turn.
    if prepare {
        afresh.push(took)
    } else {
        settled.push(took)
    }
    let Some(step) = step else { return };
    if prepare {
        let began = Instant::now();
        scheduler.plan_ahead();
        prepared.push(began.elapsed());
    }
    let outcomes = words(&step);
    let began = Instant::now();
    let commits = scheduler.commit(step, outcomes, Duration::from_millis(10));
    committed.push(began.elapsed());
    drop(commits);
}

/// Measures the durations of plans. If `waiting` is true, a long prompt waits for pages meanwhile.
fn plans(waiting: bool) -> Vec<Duration> {
    const PAGE_TOKENS: usize = 16;
    let settings = EngineSettings {
        max_step_tokens: 2048,
        max_running_requests: Some(DECODING_MEANWHILE + 1),
        ..EngineSettings::default()
    };
    let mut scheduler = scheduler(SchedulerConfig {
        settings,
        max_waiting_requests: 1024,
        max_context: 4 * WAITING,
        page_tokens: PAGE_TOKENS,
        // The two long prompts share most pages. The pool lacks the pages for the long output of the second prompt.
        pages: 2 * WAITING / PAGE_TOKENS + DECODING_MEANWHILE * TURNS / PAGE_TOKENS,
        slots: 2 + DECODING_MEANWHILE,
        steps_in_flight: 1,
    });
    let mut next = 0;
    add(&mut scheduler, &mut next, WAITING, 1);
    while !scheduler.is_empty() {
        turn(&mut scheduler, false, &mut PHASES.map(|_| Vec::new()));
    }
    (0..DECODING_MEANWHILE).for_each(|_| add(&mut scheduler, &mut next, 64, TURNS as u32));
    turn(&mut scheduler, false, &mut PHASES.map(|_| Vec::new()));
    if waiting {
        add(&mut scheduler, &mut 0, WAITING, 3 * WAITING as u32 / 2);
    }
    let mut times = PHASES.map(|_| Vec::with_capacity(TURNS));
    (0..TURNS / 2).for_each(|_| turn(&mut scheduler, false, &mut times));
    assert_eq!(scheduler.load().waiting, usize::from(waiting), "the prompt waits throughout");
    let [_, _, planned, _] = times;
    planned
}

fn add(scheduler: &mut Scheduler, next: &mut u64, prompt: usize, max_tokens: u32) {
    *next += 1;
    let tokens: Vec<u32> = (0..prompt as u32).map(|index| index ^ (*next as u32) << 12).collect();
    let content =
        Some(Content { tokens: tokens.into(), media: vec![], salt: CacheSalt::default(), may_reuse: true });
    let launch = GraphLaunch { content, ..common::text(*next, prompt, max_tokens) };
    if let Err(refusal) = scheduler.add(launch) {
        panic!("{refusal}");
    }
}
