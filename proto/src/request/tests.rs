use super::*;
use crate::v1::constraint::Kind;

const LIMITS: RequestLimits<'static> = RequestLimits {
    vocab_size: 100,
    eos_token_ids: &[99],
    tokens: TokenLimit { tokens: 48, what: "a test" },
};

fn good() -> RequestSpec {
    RequestSpec {
        prompt: vec![1, 2, 99],
        sampling: Some(SamplingParams::GREEDY),
        stopping: Some(Stopping { max_tokens: 16, ..Default::default() }),
        logprobs: Some(20),
        prompt_logprobs: Some(0),
        priority: -8,
        media: vec![],
        cache_salt: vec![3; 16],
        constraint: Some(Constraint { kind: Some(Kind::Regex("a+".into())), ..Default::default() }),
        thinking: Some(Thinking { begin: Some(1), end: 99, max_tokens: Some(3) }),
    }
}

fn refusal(change: impl FnOnce(&mut RequestSpec)) -> Refused {
    let mut spec = good();
    change(&mut spec);
    spec.check(&[], &LIMITS).unwrap_err()
}

fn stopping(change: impl FnOnce(&mut Stopping)) -> Refused {
    refusal(|spec| change(spec.stopping.as_mut().unwrap()))
}

#[track_caller]
fn names(refused: &Refused, parameter: &str, words: &[&str]) {
    assert_eq!(refused.parameter, parameter, "{refused}");
    for word in words {
        assert!(refused.message.contains(word), "{refused}");
    }
}

#[test]
fn a_checked_request_is_the_message_with_nothing_left_out() {
    let checked = good().check(&[], &LIMITS).unwrap();
    assert_eq!((checked.stopping.max_tokens, checked.priority), (16, -8));
    assert_eq!(RequestSpec::from(checked.into_parts()), good());
}

#[test]
fn a_salt_of_another_length_is_refused() {
    names(&refusal(|spec| spec.cache_salt.truncate(15)), "cache_salt", &["15", "16"]);
}

#[test]
fn a_constraint_without_a_kind_and_markers_outside_of_the_vocabulary_are_refused() {
    names(&refusal(|spec| spec.constraint = Some(Constraint::default())), "constraint", &["kind"]);
    names(&refusal(|spec| spec.thinking.as_mut().unwrap().end = 100), "thinking", &["100", "vocabulary"]);
    names(
        &refusal(|spec| spec.thinking.as_mut().unwrap().begin = Some(100)),
        "thinking",
        &["100", "vocabulary"],
    );
}

#[test]
fn a_missing_message_is_named() {
    names(&refusal(|spec| spec.sampling = None), "sampling", &["missing"]);
    names(&refusal(|spec| spec.stopping = None), "stopping", &["missing"]);
}

#[test]
fn a_request_may_fill_the_limit_to_the_brim() {
    let fill = |max_tokens| {
        let mut spec = good();
        spec.stopping.as_mut().unwrap().max_tokens = max_tokens;
        spec.check(&[], &LIMITS)
    };
    assert!(fill(45).is_ok() && fill(0).is_ok());
    names(&fill(46).unwrap_err(), "max_tokens", &["46", "3", "48", "a test"]);
    names(&fill(u32::MAX).unwrap_err(), "max_tokens", &["4294967295", "48"]);
    names(&refusal(|spec| spec.prompt = vec![1; 49]), "prompt", &["49", "48", "a test"]);
}

#[test]
fn the_smaller_of_context_and_pool_is_the_limit() {
    let limit = TokenLimit::new(64, 48);
    assert!(limit.tokens == 48 && limit.what.contains("KV pool"));
    let limit = TokenLimit::new(64, 64);
    assert!(limit.tokens == 64 && limit.what.contains("context"));
    assert_eq!((limit.room(60), limit.room(64)), (Ok(4), Ok(0)));
}

#[test]
fn every_token_may_end_an_output_that_has_no_minimum() {
    let all = |min_tokens, ignore_eos| {
        let mut spec = good();
        let stop_token_ids = (0..99).collect();
        spec.stopping = Some(Stopping { max_tokens: 8, min_tokens, stop_token_ids, ignore_eos });
        spec.check(&[], &LIMITS)
    };
    assert!(all(0, false).is_ok() && all(1, true).is_ok());
    names(&all(1, false).unwrap_err(), "min_tokens", &["1", "every token"]);
}

#[test]
fn the_least_of_all_and_the_most_of_all_are_named() {
    names(&stopping(|s| s.min_tokens = 17), "min_tokens", &["17", "16"]);
    names(&stopping(|s| s.stop_token_ids = vec![5; 129]), "stop_token_ids", &["129", "128"]);
    names(&refusal(|s| s.logprobs = Some(21)), "logprobs", &["21", "20"]);
    names(&refusal(|s| s.priority = i32::MIN), "priority", &["-2147483648", "from -8 to 8"]);
}

#[test]
fn output_of_an_earlier_try_leaves_room_and_has_known_ids() {
    let generated = |generated: &[u32]| good().check(generated, &LIMITS);
    assert!(generated(&[]).is_ok() && generated(&[5; 15]).is_ok());
    names(&generated(&[5; 16]).unwrap_err(), "generated", &["16"]);
    names(&generated(&[100]).unwrap_err(), "generated", &["100"]);
}

#[test]
fn every_bound_is_exact_and_a_refusal_names_value_and_limit() {
    let limits = RequestLimits {
        vocab_size: 2000,
        eos_token_ids: &[],
        tokens: TokenLimit { tokens: 19, what: "a test" },
    };
    for probe in crate::probes::probes(&good(), limits.vocab_size) {
        let checked = probe.spec.clone().check(&[], &limits);
        match &probe.refused {
            None => assert!(checked.is_ok(), "{probe:?}: {checked:?}"),
            Some([value, limit]) => names(&checked.unwrap_err(), probe.parameter, &[value, limit]),
        }
    }
}

#[test]
fn every_parameter_with_a_bound_has_probes() {
    use tutti_parameters::{Kind, all};
    let probes = crate::probes::probes(&good(), 2000);
    // These parameters have no probes: either only the router knows them, or every value in the message is valid.
    let others = [
        "n",
        "top_k",
        "timeout_ms",
        "best_of",
        "max_completion_tokens",
        "top_logprobs",
        "thinking_token_budget",
    ];
    for parameter in all() {
        let is_bounded = matches!(
            parameter.kind,
            Kind::Number(_) | Kind::Integer(_) | Kind::TokenIds(Some(_)) | Kind::Biases(..)
        );
        let has_probes = probes.iter().any(|probe| probe.parameter == parameter.name);
        assert!(!is_bounded || has_probes || others.contains(&parameter.name), "{}", parameter.name);
    }
}

#[test]
fn prompts_are_checked() {
    names(&refusal(|spec| spec.prompt.clear()), "prompt", &["empty"]);
    names(&refusal(|spec| spec.prompt.push(100)), "prompt", &["100", "out of range"]);
}

#[test]
fn logit_bias_is_checked() {
    let bias = |biases: &[(u32, f32)]| {
        let biases = biases.iter().map(|&bias| bias.into()).collect();
        refusal(|spec| spec.sampling.as_mut().unwrap().logit_bias = biases)
    };
    names(&bias(&[(100, 1.0)]), "logit_bias", &["100"]);
    names(&bias(&[(3, 101.0)]), "logit_bias", &["101"]);
    names(&bias(&[(3, 1.0), (3, 2.0)]), "logit_bias", &["twice"]);
    names(&bias(&[(4, 1.0), (3, 2.0)]), "logit_bias", &["out of order"]);
}

/// The fuzzer `tests/fuzz grpc` found this failure.
#[test]
fn any_top_p_above_0_is_taken() {
    let mut least = good();
    least.sampling.as_mut().unwrap().top_p = f32::from_bits(1);
    assert!(least.check(&[], &LIMITS).is_ok());
}
