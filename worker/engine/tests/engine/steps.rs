//! Tests of the engine on one thread, with a model whose answers reveal every misplaced token.

use std::collections::BTreeMap;

use tutti_engine::{Engine, EngineSettings};
use tutti_kernels::DeviceError;
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_settings::{Admission, ByteSize, Chunking, PrefillSharing};

use crate::common::{
    self, CONTEXT, DECODE, InFlight, MIXED, VOCAB, engine, engine_in_flight, engine_with_queue, expected,
    launch, model, settings,
};

/// All reported results of one request.
#[derive(Debug, Default)]
struct RequestResults {
    tokens: Vec<pb::SampledToken>,
    prompt_logprobs: Vec<pb::TokenLogprob>,
    outcome: Option<pb::completion::Outcome>,
    passes: u32,
    last_epoch: Option<u32>,
}

impl RequestResults {
    fn output(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.token_id).collect()
    }

    fn refusal(&self) -> &pb::Fault {
        match &self.outcome {
            Some(pb::completion::Outcome::Refused(fault)) => fault,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    fn fault(&self) -> &pb::Fault {
        match &self.outcome {
            Some(pb::completion::Outcome::Failed(fault)) => fault,
            other => panic!("expected a failure, got {other:?}"),
        }
    }

    fn finished(&self) -> &pb::Finished {
        match &self.outcome {
            Some(pb::completion::Outcome::Finished(finished)) => finished,
            other => panic!("expected the end, got {other:?}"),
        }
    }
}

/// Runs steps until no request is left. Returns the results by request.
fn run_to_end(engine: &mut Engine) -> BTreeMap<u64, RequestResults> {
    let mut results = BTreeMap::<u64, RequestResults>::new();
    while let Some(report) = engine.step().expect("the device is there") {
        collect(report, &mut results);
    }
    assert!(engine.is_idle());
    assert_eq!(engine.load().kv_pages_used, 0);
    results
}

fn collect(report: pb::StepReport, results: &mut BTreeMap<u64, RequestResults>) {
    for row in report.rows {
        let result = results.entry(row.key.expect("rows are keyed").request).or_default();
        assert!(result.outcome.is_none(), "a row after the end");
        for token in row.tokens {
            assert_eq!(token.index as usize, result.tokens.len(), "indices follow each other");
            result.tokens.push(token);
        }
        if let Some(run) = row.prompt_logprobs {
            assert_eq!(run.first as usize, result.prompt_logprobs.len() + 1, "runs follow each other");
            result.prompt_logprobs.extend(run.tokens);
        }
        assert!(result.last_epoch < Some(row.epoch), "epochs rise");
        result.last_epoch = Some(row.epoch);
    }
    for completion in report.completions {
        let result = results.entry(completion.key.expect("completions are keyed").request).or_default();
        assert!(result.outcome.is_none(), "two endings");
        result.outcome = completion.outcome;
        result.passes = completion.epoch;
    }
}

fn with_logprobs(mut launch: pb::LaunchGraph) -> pb::LaunchGraph {
    let spec = launch.spec.as_mut().expect("the launch has a spec");
    (spec.logprobs, spec.prompt_logprobs) = (Some(2), Some(3));
    launch
}

fn check(result: &RequestResults, launch: &pb::LaunchGraph) {
    let expected = expected(launch);
    assert_eq!(result.output(), expected.output);
    let logprobs: Vec<_> = result.tokens.iter().filter_map(|t| t.logprob.clone()).collect();
    assert_eq!(logprobs, if logprobs.is_empty() { vec![] } else { expected.logprobs });
    let prompt_logprobs = &result.prompt_logprobs;
    assert_eq!(*prompt_logprobs, if prompt_logprobs.is_empty() { vec![] } else { expected.prompt_logprobs });
    assert_eq!(Some(result.passes), result.last_epoch.map(|epoch| epoch + 1));
}

fn check_ten_requests(settings: &EngineSettings, in_flight: InFlight) {
    let (mut engine, probe) = engine_in_flight(settings, in_flight);
    let launches: Vec<_> =
        (0..10).map(|request| with_logprobs(launch(request, 1 + request as usize * 5, 9))).collect();
    launches.iter().for_each(|launch| engine.launch(launch.clone()));
    let results = run_to_end(&mut engine);
    for (request, launch) in launches.iter().enumerate() {
        let result = &results[&(request as u64)];
        check(result, launch);
        assert_eq!((result.tokens.len(), result.prompt_logprobs.len()), (9, request * 5));
        assert_eq!((result.finished().generated, result.finished().cached_tokens), (9, 0));
    }
    let probe = probe.lock().unwrap();
    assert_eq!(probe.most_in_flight, in_flight.steps);
    assert_eq!(probe.continued > 0, in_flight.steps > 1);
}

#[test]
fn every_chunking_gives_the_tokens_of_a_request_alone() {
    for chunking in [Chunking::Scheduler, Chunking::Engine, Chunking::Off] {
        for prefill_sharing in
            [PrefillSharing::ShortestFirst, PrefillSharing::Fair, PrefillSharing::FirstCome]
        {
            for max_step_tokens in [1, 2, 7, 16, 64] {
                for max_prefill_chunk_size in [None, Some(1), Some(3), Some(5)] {
                    let settings = EngineSettings {
                        max_step_tokens,
                        max_prefill_chunk_size,
                        chunking,
                        prefill_sharing,
                        long_prefill_token_threshold: max_prefill_chunk_size.map(|chunk| chunk * 2),
                        ..settings()
                    };
                    for in_flight in InFlight::ALL {
                        check_ten_requests(&settings, in_flight);
                    }
                }
            }
        }
    }
}

#[test]
fn a_warm_prefix_gives_the_tokens_of_a_cold_one() {
    let chunkings = [Chunking::Scheduler, Chunking::Engine, Chunking::Off];
    for (chunking, in_flight) in
        chunkings.into_iter().flat_map(|chunking| InFlight::ALL.map(|in_flight| (chunking, in_flight)))
    {
        let (mut engine, probe) = engine_in_flight(&EngineSettings { chunking, ..settings() }, in_flight);
        let first = launch(1, 30, 9);
        engine.launch(first.clone());
        check(&run_to_end(&mut engine)[&1], &first);
        let mut again = launch(1, 30, 9);
        again.key.as_mut().unwrap().request = 2;
        let cold = std::mem::take(&mut probe.lock().unwrap().tokens);
        engine.launch(again.clone());
        let result = run_to_end(&mut engine).remove(&2).unwrap();
        check(&result, &again);
        assert_eq!(result.finished().cached_tokens, 28, "seven pages of four");
        assert_eq!(probe.lock().unwrap().tokens, cold - 28);

        again.key.as_mut().unwrap().request = 3;
        again = with_logprobs(again);
        engine.launch(again.clone());
        let result = run_to_end(&mut engine).remove(&3).unwrap();
        check(&result, &again);
        assert_eq!((result.prompt_logprobs.len(), result.finished().cached_tokens), (29, 0));
    }
}

#[test]
fn a_preempted_request_gives_the_same_tokens_and_reports_nothing_twice() {
    // The pool has sixteen pages of four tokens, and each request grows to nine or more pages.
    let bounds = EngineSettings {
        kv_cache_memory: Some(ByteSize(17 * 64)),
        admission: Admission::Optimistic,
        ..settings()
    };
    for (no_prefix_cache, in_flight) in
        [false, true].into_iter().flat_map(|none| InFlight::ALL.map(|in_flight| (none, in_flight)))
    {
        let (mut engine, _) =
            engine_in_flight(&EngineSettings { no_prefix_cache, ..bounds.clone() }, in_flight);
        let launches: Vec<_> = (0..5).map(|request| with_logprobs(launch(request, 10, 26))).collect();
        launches.iter().for_each(|launch| engine.launch(launch.clone()));
        let mut results = BTreeMap::new();
        let mut preempted = false;
        let mut running = 0;
        while let Some(report) = engine.step().unwrap() {
            let load = report.load.unwrap();
            preempted |= load.running < running && report.completions.is_empty();
            running = load.running;
            collect(report, &mut results);
        }
        assert!(preempted, "the pool is large enough for all");
        for (request, launch) in launches.iter().enumerate() {
            check(&results[&(request as u64)], launch);
            assert_eq!(results[&(request as u64)].prompt_logprobs.len(), 9);
        }
    }
}

#[test]
fn only_requested_logits_are_computed() {
    let (mut engine, probe) = engine(&EngineSettings { max_prefill_chunk_size: Some(3), ..settings() });
    engine.launch(launch(1, 20, 5));
    let _ = run_to_end(&mut engine);
    assert_eq!(probe.lock().unwrap().logit_rows, 5, "chunks inside the prompt have none");
    assert_eq!(probe.lock().unwrap().tokens, 24, "each position is computed once, the last token never");
    engine.launch(with_logprobs(launch(2, 20, 5)));
    let _ = run_to_end(&mut engine);
    assert_eq!(probe.lock().unwrap().logit_rows, 5 + 19 + 5);
}

#[test]
fn max_tokens_0_scores_the_prompt_and_samples_nothing() {
    let (mut engine, probe) = engine(&settings());
    let launch = with_logprobs(launch(1, 40, 0));
    engine.launch(launch.clone());
    let result = &run_to_end(&mut engine)[&1];
    assert_eq!(result.prompt_logprobs, expected(&launch).prompt_logprobs);
    assert_eq!((result.tokens.len(), result.finished().generated), (0, 0));
    assert_eq!(probe.lock().unwrap().logit_rows, 39);
}

#[test]
fn a_replay_continues_after_its_output() {
    let whole = with_logprobs(launch(1, 10, 12));
    let expected = expected(&whole);
    for (sent, in_flight) in
        [1, 5, 11].into_iter().flat_map(|sent| InFlight::ALL.map(|in_flight| (sent, in_flight)))
    {
        let settings = EngineSettings { max_prefill_chunk_size: Some(4), ..settings() };
        let (mut engine, _) = engine_in_flight(&settings, in_flight);
        engine.launch(pb::LaunchGraph { generated: expected.output[..sent].to_vec(), ..whole.clone() });
        let mut rows = Vec::new();
        while let Some(report) = engine.step().unwrap() {
            rows.extend(report.rows);
        }
        let tokens: Vec<_> = rows.iter().flat_map(|row| &row.tokens).collect();
        assert_eq!(tokens.iter().map(|token| token.token_id).collect::<Vec<_>>(), expected.output[sent..]);
        assert_eq!(tokens[0].index as usize, sent);
        assert!(rows.iter().all(|row| row.prompt_logprobs.is_none()), "they were sent before");
    }
}

#[test]
fn rows_are_labelled_by_their_own_walk() {
    let (mut engine, _) = engine(&settings());
    engine.launch(launch(1, 4, 3));
    let first = engine.step().unwrap().unwrap();
    engine.launch(launch(2, 4, 2));
    let mixed = engine.step().unwrap().unwrap();
    let last = engine.step().unwrap().unwrap();
    assert_eq!([first.batch_walk, mixed.batch_walk, last.batch_walk], [MIXED, MIXED, DECODE]);
    assert_eq!(mixed.rows.iter().map(|row| row.walk).collect::<Vec<_>>(), [DECODE, common::PREFILL]);
}

#[test]
fn stop_tokens_end_a_request_but_not_before_min_tokens() {
    let plain = launch(1, 8, 12);
    let stop = expected(&plain).output[2];
    let with_stop = |min_tokens, in_flight| {
        let mut launch = plain.clone();
        let stopping = launch.spec.as_mut().and_then(|s| s.stopping.as_mut()).unwrap();
        (stopping.stop_token_ids, stopping.min_tokens) = (vec![stop], min_tokens);
        let (mut engine, _) = engine_in_flight(&settings(), in_flight);
        engine.launch(launch);
        run_to_end(&mut engine).remove(&1).unwrap()
    };
    let forced = with_stop(5, InFlight::ONE);
    for in_flight in InFlight::ALL {
        let result = with_stop(0, in_flight);
        assert_eq!(result.output().len(), 3);
        assert_eq!(result.finished().reason(), pb::FinishReason::StopToken);
        assert_eq!(result.finished().stop_token_id, Some(stop));
        let result = with_stop(5, in_flight);
        assert!(result.output().len() > 3);
        assert!(!result.output()[..5].contains(&stop), "forbidden, so another token was sampled");
        assert_eq!(result.output(), forced.output());
    }
}

#[test]
fn a_bad_launch_fails_alone_and_names_its_field() {
    let (mut engine, _) = engine(&settings());
    engine.launch(launch(1, 8, 4));
    let mut bad = launch(2, 8, 4);
    bad.spec.as_mut().and_then(|s| s.sampling.as_mut()).unwrap().temperature = f32::NAN;
    engine.launch(bad);
    engine.launch(launch(3, CONTEXT - 3, 4));
    let mut out_of_range = launch(4, 3, 4);
    out_of_range.spec.as_mut().unwrap().prompt[1] = VOCAB;
    engine.launch(out_of_range);
    engine.launch(pb::LaunchGraph { key: None, ..launch(5, 3, 3) });
    engine.launch(launch(1, 8, 4)); // A second launch of the same key has no effect.
    let results = run_to_end(&mut engine);
    let fields: Vec<_> = [2, 3, 4].iter().map(|request| results[request].refusal().field.as_str()).collect();
    assert_eq!(fields, ["temperature", "max_tokens", "prompt"]);
    assert_eq!(
        results[&3].refusal().message,
        "is 4 and the prompt has 253 tokens, but both together may have at most 256, the model's context"
    );
    assert_eq!(results[&1].output(), expected(&launch(1, 8, 4)).output);
    assert_eq!(results.len(), 4);
}

#[test]
fn a_request_larger_than_the_pool_is_refused_with_the_numbers() {
    let (mut engine, _) = engine(&EngineSettings { kv_cache_memory: Some(ByteSize(9 * 64)), ..settings() });
    assert_eq!(engine.max_request_tokens(), 32);
    engine.launch(launch(1, 20, 12));
    engine.launch(launch(2, 20, 13));
    let results = run_to_end(&mut engine);
    assert_eq!(results[&2].refusal().message, "the request needs 9 KV pages, but the pool has 8");
    assert_eq!(results[&1].output().len(), 12);
}

#[test]
fn a_full_queue_is_overload() {
    let bounds = EngineSettings { max_running_requests: Some(1), ..settings() };
    let (mut engine, _) = engine_with_queue(&bounds, 1);
    for request in 0..3 {
        engine.launch(launch(request, 3, 2));
    }
    let results = run_to_end(&mut engine);
    assert_eq!(results[&2].refusal().kind(), pb::ErrorKind::Overloaded);
    assert!(results[&0].finished().generated == 2 && results[&1].finished().generated == 2);
}

#[test]
fn a_cancelled_request_ends_within_a_step_and_frees_its_pages() {
    let (mut engine, _) = engine(&settings());
    engine.cancel(launch(2, 1, 1).key.unwrap().into());
    for request in 1..=3 {
        engine.launch(launch(request, 30, 4));
    }
    let mut results = BTreeMap::new();
    collect(engine.step().unwrap().unwrap(), &mut results);
    assert_eq!(results[&2].outcome, Some(pb::completion::Outcome::Cancelled(pb::CancelledOutcome {})));
    engine.cancel(launch(1, 1, 1).key.unwrap().into());
    collect(engine.step().unwrap().unwrap(), &mut results);
    assert_eq!(results[&1].outcome, Some(pb::completion::Outcome::Cancelled(pb::CancelledOutcome {})));
    let rest = run_to_end(&mut engine);
    assert_eq!(rest[&3].output(), expected(&launch(3, 30, 4)).output);
}

#[test]
fn only_rows_at_fault_fail_in_a_step_that_the_device_refuses() {
    let (mut engine, probe) = engine(&settings());
    probe.lock().unwrap().poison = Some(VOCAB - 1);
    for request in 1..=3 {
        let mut launch = launch(request, 8, 4);
        if request == 2 {
            launch.spec.as_mut().unwrap().prompt[3] = VOCAB - 1;
        }
        engine.launch(launch);
    }
    let results = run_to_end(&mut engine);
    assert_eq!(results[&2].fault().message, "out of device memory: 9 bytes for logits");
    for request in [1, 3] {
        check(&results[&request], &launch(request, 8, 4));
    }
}

#[test]
fn a_step_that_fails_once_fails_no_request() {
    let (mut engine, probe) = engine(&settings());
    engine.launch(launch(1, 8, 4));
    engine.launch(launch(2, 8, 4));
    probe.lock().unwrap().fail_next = Some(DeviceError::OutOfMemory { what: "logits", wanted: 9 });
    let results = run_to_end(&mut engine);
    assert_eq!([results[&1].tokens.len(), results[&2].tokens.len()], [4, 4]);
}

#[test]
fn a_lost_device_ends_the_worker() {
    let (mut engine, probe) = engine(&settings());
    engine.launch(launch(1, 8, 4));
    probe.lock().unwrap().fail_next = Some(DeviceError::Lost("ECC".into()));
    assert_eq!(engine.step().unwrap_err().message(), "device lost: ECC");
}

#[test]
fn settings_that_permit_no_step_are_refused_by_name() {
    let refused = |settings: EngineSettings| {
        let error = Engine::new(model(InFlight::ONE).0, Rank(0), &settings, 64).err().expect("it is refused");
        error.to_string()
    };
    let step = refused(EngineSettings { max_step_tokens: 65, ..settings() });
    assert_eq!(step, "max_step_tokens: is 65, but the model was loaded for steps of 64 tokens");
    let pool = refused(EngineSettings { kv_cache_memory: Some(ByteSize(127)), ..settings() });
    assert!(pool.starts_with("kv_cache_memory: 127 bytes are 1 pages of 64 bytes"), "{pool}");
    let chunk = refused(EngineSettings { max_prefill_chunk_size: Some(0), ..settings() });
    assert_eq!(chunk, "max_prefill_chunk_size: is 0, but must be at least 1");
    let shapes = |shapes: &str| Some(shapes.parse().unwrap());
    let small = refused(EngineSettings { chunk_shapes: shapes("4,15"), ..settings() });
    let step = "but a step has up to 16 tokens (max_step_tokens)";
    assert_eq!(small, format!("chunk_shapes: has no shape above 15, {step}"));
    let large = refused(EngineSettings { chunk_shapes: shapes("16,65"), ..settings() });
    assert_eq!(large, "chunk_shapes: has a shape of 65, but the model was loaded for steps of 64 tokens");
}

#[test]
fn warm_up_leaves_nothing_behind() {
    let (mut engine, probe) = engine(&settings());
    engine.warm_up().unwrap();
    assert!(probe.lock().unwrap().tokens > 0);
    engine.launch(launch(1, 8, 4));
    assert_eq!(run_to_end(&mut engine)[&1].output(), expected(&launch(1, 8, 4)).output);
}

#[test]
fn a_launch_past_its_deadline_ends_before_it_runs() {
    let (mut engine, _) = engine(&settings());
    engine.launch(pb::LaunchGraph { timeout_ms: Some(0), ..launch(1, 3, 3) });
    engine.launch(pb::LaunchGraph { timeout_ms: Some(3_600_000), ..launch(2, 3, 3) });
    let results = run_to_end(&mut engine);
    let late = pb::completion::Outcome::DeadlineExceeded(pb::DeadlineOutcome {});
    assert_eq!(results[&1].outcome, Some(late));
    assert_eq!((results[&1].output().len(), results[&2].output().len()), (0, 3));
}

#[test]
fn a_lower_priority_number_runs_first() {
    let settings = EngineSettings { max_running_requests: Some(1), ..settings() };
    let (mut engine, _) = engine(&settings);
    for (request, priority) in [(1, 0), (2, 1), (3, -1)] {
        let mut launch = launch(request, 3, 2);
        launch.spec.as_mut().unwrap().priority = priority;
        engine.launch(launch);
    }
    let mut order = Vec::new();
    while let Some(report) = engine.step().unwrap() {
        order.extend(report.completions.iter().map(|completion| completion.key.unwrap().request));
    }
    assert_eq!(order, [3, 1, 2]);
}
