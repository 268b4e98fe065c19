//! Tests of the engine on models with state in slots. Results are bit-identical for any chunking and any other requests
//! in the batch. Preemption, a restored prefix, a replay, and the end or failure of another request do not change the
//! results.

use tutti_engine::EngineSettings;
use tutti_proto::cluster::v1::{self as pb, completion::Outcome};
use tutti_settings::{Admission, Chunking};

use crate::common::{Stateful, launch, run, run_to_end, settings, with_logprobs};

const CHUNKINGS: [Chunking; 3] = [Chunking::Scheduler, Chunking::Engine, Chunking::Off];

/// A request whose prompt begins with the first `shared` tokens of `other`.
fn sharing(other: &pb::LaunchGraph, shared: usize, request: u64, prompt: usize) -> pb::LaunchGraph {
    let mut launch = with_logprobs(launch(request, prompt, 9));
    let tokens = &mut launch.spec.as_mut().unwrap().prompt;
    tokens[..shared].clone_from_slice(&other.spec.as_ref().unwrap().prompt[..shared]);
    launch
}

#[test]
fn every_chunking_gives_the_results_of_a_request_alone() {
    for model in Stateful::ALL {
        let page = model.page_tokens();
        let mut launches =
            model.launches(&[1, 2, page - 1, page, page + 1, 2 * page + 1, 60, 64, 65, 90], 12);
        for launch in launches.iter_mut().step_by(2) {
            launch.spec.as_mut().unwrap().prompt_logprobs = Some(2);
        }
        let alone = model.alone(&launches).results;
        for chunking in CHUNKINGS {
            for (max_step_tokens, max_prefill_chunk_size) in
                [(64, None), (64, Some(7)), (8, None), (8, Some(3)), (1, None)]
            {
                let settings =
                    EngineSettings { max_step_tokens, max_prefill_chunk_size, chunking, ..settings() };
                let ran = run_to_end(&mut model.engine(&settings, 65), &launches);
                assert!(ran.results == alone, "{model:?}, {settings:?}");
                let padded =
                    EngineSettings { chunk_shapes: Some("5,64".parse().unwrap()), ..settings.clone() };
                let ran_padded = run_to_end(&mut model.engine(&padded, 65), &launches);
                assert!(ran_padded.results == alone, "{model:?}, {padded:?}");
                let running = 1 + settings.running_limit().min(max_step_tokens) as u32;
                assert!(ran.load.slots_total > running, "snapshots have slots");
            }
        }
    }
}

#[test]
fn preemption_changes_no_bit_and_goes_on_from_a_snapshot() {
    for model in Stateful::ALL.into_iter().chain([Stateful::FEW_SNAPSHOTS]) {
        let page = model.page_tokens();
        let prompts: Vec<usize> = (0..8).map(|request| 2 * page + request * page / 8).collect();
        let launches = model.launches(&prompts, 3 * page as u32);
        let alone = model.alone(&launches).results;
        let mut cached = 0;
        for (no_prefix_cache, max_prefill_chunk_size) in
            [(false, None), (false, Some(page + 1)), (true, None)]
        {
            let settings = EngineSettings {
                admission: Admission::Optimistic,
                max_step_tokens: 64,
                no_prefix_cache,
                max_prefill_chunk_size,
                ..settings()
            };
            let ran = run_to_end(&mut model.engine(&settings, 17), &launches);
            assert!(ran.results == alone, "{model:?}, {settings:?}");
            assert!(ran.load.preemptions > 0, "{model:?}: the pool is large enough for all");
            assert_eq!(ran.load.snapshots > 0, !no_prefix_cache, "{model:?}, {:?}", ran.load);
            assert!(!no_prefix_cache || ran.load.cached_tokens == 0);
            cached += ran.load.cached_tokens;
        }
        // If few snapshots fit, the snapshots of a preempted request may be replaced before the request runs again.
        assert!(cached > 0 || model == Stateful::FEW_SNAPSHOTS, "{model:?}");
    }
}

#[test]
fn a_prefix_hit_ends_at_a_snapshot_and_changes_no_bit() {
    for model in Stateful::ALL {
        let page = model.page_tokens();
        let prompt = 9 * page + page / 2;
        let first = model.launches(&[prompt], 9).remove(0);
        // Each case is the number of shared tokens, and the number of tokens up to the last snapshot among them. There
        // are snapshots after 4 pages, after 8 pages and after the last whole page.
        let cases = [
            (prompt, 9 * page),
            (9 * page + 1, 9 * page),
            (8 * page + 1, 8 * page),
            (7 * page, 4 * page),
            (4 * page, 4 * page),
            (4 * page - 1, 0),
        ];
        let launches: Vec<_> = cases
            .iter()
            .zip(2..)
            .map(|((shared, _), request)| sharing(&first, *shared, request, prompt))
            .collect();
        let alone = model.alone(&launches).results;
        for at_once in [false, true] {
            for (no_prefix_cache, shapes) in [(false, None), (true, None), (false, Some("3,16"))] {
                let chunk_shapes = shapes.map(|shapes| shapes.parse().unwrap());
                let settings = EngineSettings { no_prefix_cache, chunk_shapes, ..settings() };
                let mut engine = model.engine(&settings, 129);
                run_to_end(&mut engine, std::slice::from_ref(&first));
                let batches = launches.chunks(if at_once { launches.len() } else { 1 });
                for batch in batches {
                    let ran = run_to_end(&mut engine, batch);
                    for launch in batch {
                        let request = launch.key.unwrap().request;
                        let hit = if no_prefix_cache { 0 } else { cases[request as usize - 2].1 };
                        assert_eq!(ran.cached(request) as usize, hit, "{model:?}, request {request}");
                        assert!(ran.results[&request] == alone[&request], "{model:?}, request {request}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_replay_continues_after_its_output() {
    for model in Stateful::ALL {
        let whole = model.launches(&[2 * model.page_tokens() + 3], 12).remove(0);
        let alone = model.alone(std::slice::from_ref(&whole)).results.remove(&1).unwrap();
        let output: Vec<u32> = alone.iter().map(|(token, _)| *token).collect();
        for sent in [1, 5, 11] {
            for max_prefill_chunk_size in [None, Some(4)] {
                let settings = EngineSettings { max_prefill_chunk_size, ..settings() };
                let mut engine = model.engine(&settings, 65);
                // Other requests have run before and have left their state in the slots.
                let others: Vec<_> = (10..18).map(|request| launch(request, 20, 20)).collect();
                run_to_end(&mut engine, &others);
                let replay = pb::LaunchGraph { generated: output[..sent].to_vec(), ..whole.clone() };
                let ran = run_to_end(&mut engine, &[replay]);
                assert!(ran.results[&1] == alone[sent..], "{model:?}, after {sent} tokens");
            }
        }
    }
}

/// There are as many slots as running requests, so the next request gets the slot of one that has ended.
#[test]
fn ends_inside_steps_in_flight_leave_no_trace_in_slots() {
    for model in Stateful::ALL {
        let prompts: Vec<usize> = (0..12).map(|request| 3 + request * 5 % 17).collect();
        let mut launches = model.launches(&prompts, 16);
        let alone = model.alone(&launches).results;
        let mut ends = alone.clone();
        for launch in &mut launches {
            let request = launch.key.unwrap().request;
            let result = ends.get_mut(&request).unwrap();
            let stop = result[request as usize % 16].0;
            result.truncate(1 + result.iter().position(|(token, _)| *token == stop).unwrap());
            launch.spec.as_mut().unwrap().stopping.as_mut().unwrap().stop_token_ids = vec![stop];
        }
        let settings = EngineSettings { max_running_requests: Some(2), no_prefix_cache: true, ..settings() };
        let ran = run_to_end(&mut model.engine(&settings, 33), &launches);
        assert!(ran.results == ends, "{model:?}");
        let several = matches!(model, Stateful::Sim { steps_in_flight: 2, .. });
        assert_eq!(ran.load.void_rows > 0, several, "{model:?}");
    }
}

/// A refused step runs row by row, each with the slot copies of its request.
#[test]
fn refused_steps_lose_no_slot_copy() {
    for model in Stateful::SIMS {
        let page = model.page_tokens();
        let first = model.launches(&[7 * page + 1], 9).remove(0);
        let launches: Vec<_> = (2..20)
            .map(|request| sharing(&first, request as usize * page / 3, request, 8 * page + request as usize))
            .collect();
        let alone = model.alone(&launches).results;
        for chunking in CHUNKINGS {
            for fail_every in [5, 6, 7] {
                let settings = EngineSettings {
                    max_running_requests: Some(3),
                    max_step_tokens: 64,
                    admission: Admission::Optimistic,
                    chunking,
                    ..settings()
                };
                let mut engine = model.engine_with(&settings, 33, |sim| sim.fail_every = Some(fail_every));
                run_to_end(&mut engine, std::slice::from_ref(&first));
                let ran = run_to_end(&mut engine, &launches);
                assert!(
                    ran.results == alone,
                    "{model:?}, {settings:?}, one of {fail_every} steps is refused"
                );
                assert!(chunking != Chunking::Scheduler || ran.load.cached_tokens > 0);
            }
        }
    }
}

/// The snapshot of a page is saved at the beginning of the step with the request's next row. If the device refuses that
/// row, the page has no snapshot.
#[test]
fn a_refused_row_leaves_no_snapshot() {
    const POISON: u32 = 499;
    for model in Stateful::SIMS {
        let page = model.page_tokens();
        let mut refused = launch(1, 12 * page, 4);
        refused.spec.as_mut().unwrap().prompt[8 * page] = POISON;
        let next = sharing(&refused, 8 * page, 2, 12 * page);
        assert!(!next.spec.as_ref().unwrap().prompt.contains(&POISON));
        let alone = model.alone(std::slice::from_ref(&next)).results;
        let mut engine = model.engine_with(&settings(), 65, |sim| sim.fail_on_token = Some(POISON));
        let ran = run(&mut engine, std::slice::from_ref(&refused));
        assert!(matches!(&ran.endings[&1], Outcome::Failed(fault) if fault.message.contains("token 499")));
        let ran = run_to_end(&mut engine, &[next]);
        assert_eq!(ran.cached(2) as usize, 4 * page, "{model:?}");
        assert!(ran.results == alone, "{model:?}");
    }
}

/// If `max_running_requests` is not set, the number of slots that fit into half of the memory limits the running
/// requests. If it is set too high, the engine refuses the setting by name and states the limit.
#[test]
fn slots_that_do_not_fit_limit_the_requests_unless_their_number_is_set() {
    for ranks in [1, 2] {
        let model = Stateful::Hybrid { state_size: 960, ranks };
        let slot = model.engine(&settings(), 65).model().declaration().slot_bytes();
        let settings = EngineSettings {
            max_running_requests: None,
            max_step_tokens: 64,
            no_prefix_cache: true,
            ..settings()
        };
        // Half of the memory holds five slots, one of them the null slot. In the other half, each request has one page.
        let memory = 10 * slot + 9;
        let launches = model.launches(&[9; 12], 5);
        let mut engine = model.engine_in(&settings, memory).unwrap();
        assert_eq!(engine.running_limit(), 4, "what the worker says to its conductor");
        let mut most = 0;
        launches.iter().for_each(|launch| engine.launch(launch.clone()));
        let mut ended = 0;
        while let Some(report) = engine.step().unwrap() {
            most = most.max(report.load.unwrap().running);
            ended += report.completions.len();
        }
        assert_eq!((most, ended), (4, launches.len()), "{model:?}");

        let asked = EngineSettings { max_running_requests: Some(60), ..settings };
        let refused = model.engine_in(&asked, memory).err().unwrap();
        assert_eq!(refused.field(), Some("max_running_requests"), "{model:?}: {refused}");
        assert!(refused.message().contains("is 60, the limit is "), "{model:?}: {refused}");
    }
}
