//! Tests of output that follows a constraint: the tokens are those of a request alone, whatever happens beside it.

use std::{collections::BTreeMap, time::Duration};

use tutti_engine::{Engine, EngineSettings};
use tutti_proto::{
    cluster::v1::{self as pb, FinishReason, completion::Outcome},
    v1::constraint::Kind,
};
use tutti_runtime::{Error, ErrorKind};
use tutti_settings::{Admission, ByteSize, Chunking};

use crate::common::{
    InFlight, PAGE_BYTES, any_request, constrained, constrained_engine, engine, launch,
    probed_constrained_engine, regex, right, run, schema, settings, text, vocabulary,
};

/// Runs requests, and asserts that each has the tokens and the end of the request alone.
#[track_caller]
fn check(what: &str, engine: &mut Engine, launches: &[pb::LaunchGraph]) {
    let outcomes = run(engine, launches);
    for launch in launches {
        let request = launch.key.unwrap().request;
        let right = right(launch);
        let tokens: Vec<u32> = outcomes.results[&request].iter().map(|(token, _)| *token).collect();
        let known = launch.generated.len();
        assert_eq!(tokens, right.output[known..], "{what}: request {request}");
        let reason = if right.is_complete { FinishReason::EndOfSequence } else { FinishReason::Length };
        let Outcome::Finished(finished) = &outcomes.endings[&request] else {
            panic!("{what}: request {request}: {:?}", outcomes.endings[&request]);
        };
        assert_eq!(finished.reason(), reason, "{what}: request {request}");
        assert_eq!(finished.generated as usize, right.output.len(), "{what}: request {request}");
    }
    assert_eq!(outcomes.load.masks.unwrap().awaited, 0, "{what}");
}

fn mixture() -> Vec<pb::LaunchGraph> {
    (0..40).map(any_request).collect()
}

#[test]
fn the_mixture_has_outputs_that_end_by_themselves_and_others() {
    let rights: Vec<_> = mixture().iter().map(right).collect();
    let complete = rights.iter().filter(|right| right.is_complete).count();
    assert!(complete > 8 && complete < 32, "{complete}");
    let json = mixture().into_iter().zip(&rights).filter(|(launch, right)| {
        launch.key.unwrap().request % 5 == 1 && right.is_complete && text(&right.output).starts_with('{')
    });
    assert!(json.count() > 1);
}

#[test]
fn tokens_do_not_depend_on_steps_chunks_batches_and_devices() {
    for in_flight in InFlight::ALL {
        for (max_step_tokens, max_running_requests) in [(16, 8), (8, 8), (3, 3), (1, 1)] {
            let max_running_requests = Some(max_running_requests);
            let settings = EngineSettings { max_step_tokens, max_running_requests, ..settings() };
            let mut engine = constrained_engine(&settings, in_flight);
            check(&format!("{in_flight:?}, {max_step_tokens}"), &mut engine, &mixture());
        }
    }
}

/// With no time to wait, masks are often late, and their rows run again.
#[test]
fn late_masks_change_no_token() {
    let mut late = 0;
    for in_flight in InFlight::ALL {
        for admission in [Admission::WholeLife, Admission::Optimistic] {
            let kv_cache_memory = Some(ByteSize(41 * PAGE_BYTES as u64));
            let settings = EngineSettings { admission, kv_cache_memory, ..settings() };
            let mut engine = constrained_engine(&settings, in_flight);
            engine.set_mask_grace(Duration::ZERO);
            check(&format!("{in_flight:?}"), &mut engine, &mixture());
            late += engine.load().masks.unwrap().late;
        }
    }
    assert!(late > 0, "no mask was late");
}

/// With two steps in flight, the forward of a step runs before the masks of the step before can be made.
/// With chunking by the engine, a step may run several forwards.
#[test]
fn steps_of_several_forwards_change_no_token() {
    for in_flight in InFlight::ALL {
        let settings = EngineSettings { chunking: Chunking::Engine, max_step_tokens: 4, ..settings() };
        check(&format!("{in_flight:?}"), &mut constrained_engine(&settings, in_flight), &mixture());
    }
}

#[test]
fn a_constrained_row_is_in_every_step_of_a_device_with_two_in_flight() {
    for is_late in [false, true] {
        let mut engine = constrained_engine(&settings(), InFlight { steps: 2, is_late });
        // Masks of this machine are quick, and the test must not depend on it.
        engine.set_mask_grace(Duration::from_secs(60));
        let launch = constrained(1, 5, 40, regex("[a-m]{60}"));
        check(&format!("{is_late}"), &mut engine, std::slice::from_ref(&launch));
        let steps = engine.load().steps;
        // Now and then a mask takes long, and its request waits.
        assert!((40..64).contains(&steps), "{steps} steps for 40 tokens");
    }
}

/// The rows of a refused forward run one by one. With two steps in flight, a row whose mask needs the token of the step
/// before cannot: it runs in a later step.
#[test]
fn a_refused_forward_changes_no_token() {
    let mut late = 0;
    for in_flight in InFlight::ALL {
        let (mut engine, probe) = probed_constrained_engine(&settings(), in_flight);
        // No mask is late for another reason.
        engine.set_mask_grace(Duration::from_secs(60));
        probe.lock().unwrap().refuse_every = Some(3);
        check(&format!("{in_flight:?}"), &mut engine, &mixture());
        late += engine.load().masks.unwrap().late;
    }
    assert!(late > 0, "no row ran in a later step");
}

#[test]
fn a_preempted_request_keeps_its_matcher() {
    for in_flight in InFlight::ALL {
        let settings = EngineSettings {
            admission: Admission::Optimistic,
            kv_cache_memory: Some(ByteSize(31 * PAGE_BYTES as u64)),
            ..settings()
        };
        let mut engine = constrained_engine(&settings, in_flight);
        check(&format!("{in_flight:?}"), &mut engine, &mixture());
        assert!(engine.load().preemptions > 4, "{}", engine.load().preemptions);
    }
}

#[test]
fn a_cached_prefix_and_a_compiled_constraint_change_nothing() {
    let mut engine = constrained_engine(&settings(), InFlight::ONE);
    for round in 0..3 {
        let launches: Vec<_> = (0..5)
            .map(|request| {
                let launch = any_request(request + 5);
                let key = pb::GraphKey { request: request + 5, incarnation: round, graph: 0 };
                pb::LaunchGraph { key: Some(key), ..launch }
            })
            .collect();
        check(&format!("round {round}"), &mut engine, &launches);
    }
    let load = engine.load();
    let masks = load.masks.unwrap();
    assert_eq!((masks.compilations, masks.cache_hits), (4, 8), "{masks:?}");
    assert!(load.cached_tokens > 0 && masks.masks > 0 && masks.mask_us > 0 && masks.compile_us > 0);
}

#[test]
fn a_replay_from_any_token_continues_as_before() {
    for request in 0..5 {
        let launch = any_request(request + 20);
        let output = right(&launch).output;
        let replays: Vec<_> = (0..output.len())
            .map(|known| pb::LaunchGraph {
                key: Some(pb::GraphKey { request: 100 + known as u64, incarnation: 1, graph: 0 }),
                generated: output[..known].to_vec(),
                ..launch.clone()
            })
            .collect();
        let mut engine = constrained_engine(&settings(), InFlight::ONE);
        check(&format!("request {request}"), &mut engine, &replays);
    }
}

#[test]
fn a_replay_of_a_complete_output_ends_without_a_token() {
    let launch = constrained(1, 5, 9, regex("ab"));
    let launch = pb::LaunchGraph { generated: "ab".bytes().map(u32::from).collect(), ..launch };
    let outcomes = run(&mut constrained_engine(&settings(), InFlight::ONE), &[launch]);
    assert_eq!(outcomes.results.len(), 0);
    let Outcome::Finished(finished) = &outcomes.endings[&1] else { panic!("{:?}", outcomes.endings) };
    assert_eq!((finished.reason(), finished.generated), (FinishReason::EndOfSequence, 2));
}

#[test]
fn a_cancelled_request_leaves_nothing_to_the_next_owner_of_its_slot() {
    for in_flight in InFlight::ALL {
        for after in 0..6 {
            let settings = EngineSettings { max_running_requests: Some(1), ..settings() };
            let mut engine = constrained_engine(&settings, in_flight);
            let first = constrained(1, 6, 40, regex("[a-m]{30}"));
            engine.launch(first.clone());
            for _ in 0..after {
                engine.step().unwrap();
            }
            engine.cancel(first.key.unwrap().into());
            let second = constrained(2, 6, 40, regex("[n-z]{30}"));
            engine.launch(second.clone());
            let mut tokens = BTreeMap::<u64, Vec<u32>>::new();
            while let Some(report) = engine.step().unwrap() {
                for row in report.rows {
                    let ids = row.tokens.iter().map(|token| token.token_id);
                    tokens.entry(row.key.unwrap().request).or_default().extend(ids);
                }
            }
            assert_eq!(tokens[&2], right(&second).output, "{in_flight:?}, after {after}");
        }
    }
}

#[test]
fn rows_beside_constrained_ones_have_the_tokens_and_logprobs_that_they_have_alone() {
    let free: Vec<_> = (50..56)
        .map(|request| {
            let mut launch = launch(request, 9, 30);
            launch.spec.as_mut().unwrap().logprobs = Some(3);
            launch
        })
        .collect();
    for in_flight in InFlight::ALL {
        let alone = run(&mut constrained_engine(&settings(), in_flight), &free).results;
        let mut both = free.clone();
        both.extend((0..12).map(any_request));
        let beside = run(&mut constrained_engine(&settings(), in_flight), &both).results;
        for (request, results) in &alone {
            assert!(beside[request] == *results, "{in_flight:?}: request {request}");
        }
    }
}

/// The error of a request that failed.
fn error(outcome: &Outcome) -> Error {
    match outcome {
        Outcome::Failed(fault) => fault.clone().into(),
        other => panic!("{other:?}"),
    }
}

/// The message of a request that failed.
fn failure(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Failed(fault) | Outcome::Refused(fault) => format!("{}: {}", fault.field, fault.message),
        other => panic!("{other:?}"),
    }
}

/// An object with many members that may be absent. It compiles, and its first mask or token exceeds a limit of work.
fn hostile() -> Kind {
    let members: Vec<String> = (0..900).map(|n| format!(r#""m{n}": {{"type": "integer"}}"#)).collect();
    schema(&format!(r#"{{"type": "object", "properties": {{{}}}}}"#, members.join(",")))
}

#[test]
fn a_constraint_that_cannot_be_followed_fails_its_request_alone() {
    for in_flight in InFlight::ALL {
        let mut engine = constrained_engine(&settings(), in_flight);
        let mut launches: Vec<_> = (0..10).map(any_request).collect();
        launches.push(constrained(70, 5, 20, hostile()));
        launches.push(constrained(71, 5, 20, Kind::Lark("start: start".to_owned())));
        launches.push(constrained(72, 5, 20, schema("{\"not\": {}}")));
        let outcomes = run(&mut engine, &launches);
        for launch in &launches[..10] {
            let request = launch.key.unwrap().request;
            let tokens: Vec<u32> = outcomes.results[&request].iter().map(|(token, _)| *token).collect();
            assert_eq!(tokens, right(launch).output, "{in_flight:?}");
        }
        for (request, kind) in
            [(70, ErrorKind::InvalidArgument), (71, ErrorKind::InvalidArgument), (72, ErrorKind::Internal)]
        {
            // The router refuses the last one. If it comes here all the same, the fault is not the client's.
            assert_eq!(error(&outcomes.endings[&request]).kind(), kind, "{:?}", outcomes.endings[&request]);
        }
        assert_eq!(outcomes.load.masks.unwrap().failures, 3);
    }
}

#[test]
fn a_request_that_waits_for_a_compilation_delays_no_other() {
    let mut engine = constrained_engine(&settings(), InFlight::ONE);
    engine.launch(constrained(1, 5, 20, hostile()));
    let free = launch(2, 5, 9);
    engine.launch(free);
    let mut rows = 0;
    while rows < 9 {
        let report = engine.step().unwrap().unwrap();
        rows += report.rows.len();
        // The compilation takes many times as long as these steps.
        assert!(report.completions.iter().all(|completion| completion.key.unwrap().request == 2));
    }
    engine.cancel(pb::GraphKey { request: 1, incarnation: 0, graph: 0 }.into());
    while engine.step().unwrap().is_some() {}
    assert!(engine.is_idle());
}

#[test]
fn without_a_vocabulary_a_constraint_is_refused() {
    let (mut engine, _) = engine(&settings());
    let outcomes = run(&mut engine, &[constrained(1, 5, 9, regex("a")), launch(2, 5, 9)]);
    assert_eq!(failure(&outcomes.endings[&1]), "constraint: needs a tokenizer, and this worker has none");
    assert!(matches!(outcomes.endings[&2], Outcome::Finished(_)));
    engine.set_vocabulary(std::sync::Arc::new(|| Err("the tokenizer is broken".to_owned())));
    let outcomes = run(&mut engine, &[constrained(3, 5, 9, regex("a"))]);
    assert_eq!(error(&outcomes.endings[&3]).kind(), ErrorKind::Internal);
    assert!(failure(&outcomes.endings[&3]).ends_with("the tokenizer is broken"));
    // Once a request has asked for it, the vocabulary does not change.
    engine.set_vocabulary(vocabulary());
    let outcomes = run(&mut engine, &[constrained(4, 5, 9, regex("a"))]);
    assert!(failure(&outcomes.endings[&4]).ends_with("the tokenizer is broken"));
}

#[test]
fn a_constraint_goes_before_min_tokens() {
    let mut launch = constrained(1, 5, 20, regex("ab?"));
    launch.spec.as_mut().unwrap().stopping.as_mut().unwrap().min_tokens = 10;
    let outcomes = run(&mut constrained_engine(&settings(), InFlight::ONE), &[launch]);
    let tokens: Vec<u32> = outcomes.results[&1].iter().map(|(token, _)| *token).collect();
    // The end is forbidden behind `a`, so `b` follows, and then nothing can.
    assert_eq!(text(&tokens), "ab");
    let Outcome::Finished(finished) = &outcomes.endings[&1] else { panic!("{:?}", outcomes.endings) };
    assert_eq!((finished.reason(), finished.generated), (FinishReason::EndOfSequence, 2));
}

#[test]
fn an_end_is_sampled_although_it_is_early_if_nothing_else_may_follow() {
    // Behind `a` the regex allows a byte that the vocabulary does not have.
    let mut launch = constrained(1, 5, 20, regex("a(\u{ff}\u{ff})?"));
    launch.spec.as_mut().unwrap().stopping.as_mut().unwrap().min_tokens = 10;
    let mut engine = constrained_engine(&settings(), InFlight::ONE);
    engine.set_vocabulary(std::sync::Arc::new(|| Ok(crate::common::ascii())));
    let outcomes = run(&mut engine, &[launch]);
    let tokens: Vec<u32> = outcomes.results[&1].iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [u32::from(b'a'), crate::common::END]);
    let Outcome::Finished(finished) = &outcomes.endings[&1] else { panic!("{:?}", outcomes.endings) };
    assert_eq!(finished.reason(), FinishReason::EndOfSequence);
}

#[test]
fn a_stop_token_that_the_text_needs_ends_it_before_min_tokens() {
    let stop = u32::from(b'b');
    for in_flight in InFlight::ALL {
        let mut launch = constrained(1, 5, 20, regex("aab{9}"));
        let stopping = launch.spec.as_mut().unwrap().stopping.as_mut().unwrap();
        (stopping.min_tokens, stopping.stop_token_ids) = (9, vec![stop]);
        let outcomes = run(&mut constrained_engine(&settings(), in_flight), &[launch]);
        let tokens: Vec<u32> = outcomes.results[&1].iter().map(|(token, _)| *token).collect();
        assert_eq!(text(&tokens), "aab");
        let Outcome::Finished(finished) = &outcomes.endings[&1] else { panic!("{:?}", outcomes.endings) };
        assert_eq!((finished.reason(), finished.stop_token_id), (FinishReason::StopToken, Some(stop)));
    }
}

#[test]
fn a_stop_token_may_come_where_the_text_may_end() {
    const STOP: u32 = 300;
    let mut launch = constrained(1, 5, 40, regex("[a-c]{4,30}"));
    launch.spec.as_mut().unwrap().stopping.as_mut().unwrap().stop_token_ids = vec![STOP];
    for request in 1..30 {
        launch.key = Some(pb::GraphKey { request, incarnation: 0, graph: 0 });
        launch.spec.as_mut().unwrap().sampling.as_mut().unwrap().seed = request;
        let outcomes = run(&mut constrained_engine(&settings(), InFlight::ONE), &[launch.clone()]);
        let tokens: Vec<u32> = outcomes.results[&request].iter().map(|(token, _)| *token).collect();
        if let Some(at) = tokens.iter().position(|token| *token == STOP) {
            assert!(at >= 4 && at == tokens.len() - 1, "{tokens:?}");
            return;
        }
    }
    panic!("the stop token never came");
}

/// A thinking block whose end is a token behind the vocabulary's own.
fn thinking(begin: Option<u32>, max_tokens: Option<u32>) -> Option<pb::Thinking> {
    Some(pb::Thinking { begin, end: u32::from(b'#'), max_tokens })
}

#[test]
fn a_constraint_begins_behind_the_thinking_block() {
    for in_flight in InFlight::ALL {
        let mut engine = constrained_engine(&settings(), in_flight);
        let launches: Vec<_> = (1..20)
            .map(|request| {
                let mut launch = constrained(request, 5, 30, regex("[0-9]{5}"));
                let budget = (request % 2 == 0).then_some(request as u32 % 7);
                launch.spec.as_mut().unwrap().thinking = thinking(None, budget);
                launch
            })
            .collect();
        let outcomes = run(&mut engine, &launches);
        for launch in &launches {
            let request = launch.key.unwrap().request;
            let tokens: Vec<u32> = outcomes.results[&request].iter().map(|(token, _)| *token).collect();
            let end = tokens.iter().position(|token| *token == u32::from(b'#'));
            if let Some(budget) = launch.spec.as_ref().unwrap().thinking.unwrap().max_tokens {
                let end = end.unwrap_or_else(|| panic!("{tokens:?}"));
                // A character that has begun ends first.
                assert!(end <= budget as usize + 3, "{tokens:?}");
                let answer = text(&tokens[end + 1..]);
                let answer = answer.trim_start_matches('\n');
                assert!(answer.len() == 5 && answer.bytes().all(|byte| byte.is_ascii_digit()), "{answer}");
            } else if let Some(end) = end {
                let answer = text(&tokens[end + 1..]);
                assert!(
                    answer.trim_start_matches('\n').bytes().all(|byte| byte.is_ascii_digit()),
                    "{answer}"
                );
            }
        }
    }
}

#[test]
fn a_budget_closes_the_block_of_a_request_without_a_constraint() {
    let end = u32::from(b'#');
    for in_flight in InFlight::ALL {
        // No vocabulary is needed.
        let (mut engine, _) = crate::common::engine_in_flight(&settings(), in_flight);
        let mut launches = Vec::new();
        for budget in 0..6 {
            let mut launch = launch(u64::from(budget) + 1, 5, 20);
            launch.spec.as_mut().unwrap().thinking = thinking(None, Some(budget));
            // The replay of a request whose budget was spent, or was not.
            for known in [0, 3, 6] {
                let key = pb::GraphKey { request: u64::from(budget * 100 + known) + 1, ..Default::default() };
                let generated = vec![7; known as usize];
                launches.push(pb::LaunchGraph { key: Some(key), generated, ..launch.clone() });
            }
        }
        let outcomes = run(&mut engine, &launches);
        for launch in &launches {
            let budget = launch.spec.as_ref().unwrap().thinking.unwrap().max_tokens.unwrap() as usize;
            let tokens: Vec<u32> =
                outcomes.results[&launch.key.unwrap().request].iter().map(|(token, _)| *token).collect();
            let inside = tokens.iter().position(|token| *token == end).unwrap_or(usize::MAX);
            let left = budget.saturating_sub(launch.generated.len());
            assert!(inside <= left, "{budget}, {:?}: {tokens:?}", launch.generated);
            assert!(tokens.len() + launch.generated.len() == 20, "the output goes on");
        }
    }
}
