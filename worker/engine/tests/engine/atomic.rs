//! Tests of prompts that must be computed in one step. They run in one forward, or are refused at launch.

use tutti_engine::{Engine, EngineSettings};
use tutti_proto::{
    Rank,
    cluster::v1::{self as pb, completion::Outcome},
    declaration::{WalkId, WalkKind},
};
use tutti_settings::{Admission, ByteSize, Chunking};

use crate::common::{
    InFlight, MIXED, PAGE_BYTES, expected, launch, model_prefilled_by, run, run_to_end, settings,
};

fn output(results: &[(u32, Vec<(u32, u32)>)]) -> Vec<u32> {
    results.iter().map(|(token, _)| *token).collect()
}

/// Returns an engine whose prompts must not be cut, and a function that returns the token counts of the rows that the
/// engine has run, except rows of one token.
fn engine(settings: &EngineSettings, in_flight: InFlight) -> (Engine, impl Fn() -> Vec<usize>) {
    let (model, probe) = model_prefilled_by(WalkKind::Atomic { batched_by: WalkId(MIXED) }, in_flight);
    assert_eq!(model.limits().max_step_tokens, 64);
    let engine = Engine::new(model, Rank(0), settings, 64).expect("sound settings");
    (engine, move || std::mem::take(&mut probe.lock().unwrap().long_rows))
}

fn every_setting() -> impl Iterator<Item = (EngineSettings, InFlight)> {
    let chunkings = [Chunking::Scheduler, Chunking::Engine, Chunking::Off];
    let chunks = chunkings.into_iter().flat_map(|chunking| [None, Some(5)].map(|chunk| (chunking, chunk)));
    chunks.flat_map(|(chunking, max_prefill_chunk_size)| {
        let settings = EngineSettings { chunking, max_prefill_chunk_size, ..settings() };
        InFlight::ALL.map(|in_flight| (settings.clone(), in_flight))
    })
}

#[test]
fn a_prompt_over_the_budget_of_a_step_runs_in_one_forward() {
    for (settings, in_flight) in every_setting() {
        let (mut engine, long_rows) = engine(&settings, in_flight);
        // Three of the prompts are longer than a step's budget of 16 tokens. They run between steps of decodes and
        // short prompts.
        let launches: Vec<_> = [3, 40, 16, 17, 58, 9]
            .into_iter()
            .zip(1..)
            .map(|(prompt, request)| launch(request, prompt, 6))
            .collect();
        let ran = run_to_end(&mut engine, &launches);
        for launch in &launches {
            let request = launch.key.unwrap().request;
            assert_eq!(output(&ran.results[&request]), expected(launch).output, "{settings:?} {in_flight:?}");
        }
        let mut rows = long_rows();
        rows.sort_unstable();
        assert_eq!(rows, [3, 9, 16, 17, 40, 58], "{settings:?} {in_flight:?}");
    }
}

#[test]
fn a_prompt_over_the_buffers_of_a_step_is_refused_at_launch() {
    for (settings, in_flight) in every_setting() {
        let (mut engine, long_rows) = engine(&settings, in_flight);
        let fits = launch(2, 58, 6);
        // A replayed request computes its earlier output along with its prompt.
        let replay = pb::LaunchGraph { generated: vec![1, 2, 3], ..launch(5, 62, 5) };
        let ran =
            run(&mut engine, &[launch(1, 59, 6), fits.clone(), launch(3, 65, 0), launch(4, 1, 64), replay]);
        for (request, tokens) in [(1, 65), (3, 65), (4, 65), (5, 67)] {
            let Outcome::Refused(fault) = &ran.endings[&request] else {
                panic!("{:?}", ran.endings[&request])
            };
            let message = format!(
                "prompt and max_tokens are {tokens} tokens, which one step must compute, but a step has at most 64"
            );
            assert_eq!((fault.field.as_str(), &fault.message), ("prompt", &message));
        }
        assert_eq!(output(&ran.results[&2]), expected(&fits).output);
        assert_eq!(long_rows(), [58], "nothing of a refused prompt runs");
    }
}

#[test]
fn a_preempted_request_computes_prompt_and_output_in_one_forward() {
    for in_flight in InFlight::ALL {
        let settings = EngineSettings {
            kv_cache_memory: Some(ByteSize(17 * PAGE_BYTES as u64)),
            admission: Admission::Optimistic,
            no_prefix_cache: true,
            ..settings()
        };
        let (mut engine, long_rows) = engine(&settings, in_flight);
        let launches: Vec<_> = (1..=5).map(|request| launch(request, 20, 26)).collect();
        let ran = run_to_end(&mut engine, &launches);
        for launch in &launches {
            let request = launch.key.unwrap().request;
            assert_eq!(output(&ran.results[&request]), expected(launch).output, "{in_flight:?}");
        }
        assert!(ran.load.preemptions > 0, "the pool is large enough for all");
        let rows = long_rows();
        assert_eq!(rows.iter().filter(|tokens| **tokens == 20).count(), 5, "{rows:?}");
        assert!(rows.iter().all(|tokens| *tokens >= 20), "a row was cut: {rows:?}");
    }
}
