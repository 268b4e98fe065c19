use super::*;

fn model() -> pb::ModelDescription {
    pb::ModelDescription {
        vocab_size: 100,
        max_context_tokens: 64,
        max_request_tokens: 48,
        ..Default::default()
    }
}

fn good() -> pb::RequestSpec {
    pb::RequestSpec {
        prompt: vec![1, 2, 99],
        sampling: Some(pb::Sampling {
            temperature: 0.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            ..Default::default()
        }),
        stopping: Some(pb::Stopping { max_tokens: 16, ..Default::default() }),
        logprobs: Some(20),
        prompt_logprobs: Some(0),
        priority: -MAX_PRIORITY,
        media: vec![],
    }
}

fn refusal(change: impl FnOnce(&mut pb::RequestSpec)) -> Error {
    let mut spec = good();
    change(&mut spec);
    check_spec(&spec, &model()).unwrap_err()
}

fn sampling(change: impl FnOnce(&mut pb::Sampling)) -> Error {
    refusal(|spec| change(spec.sampling.as_mut().unwrap()))
}

fn stopping(change: impl FnOnce(&mut pb::Stopping)) -> Error {
    refusal(|spec| change(spec.stopping.as_mut().unwrap()))
}

#[track_caller]
fn names(error: &Error, field: &str, words: &[&str]) {
    assert_eq!(error.field(), Some(field), "{error}");
    for word in words {
        assert!(error.message().contains(word), "{error}");
    }
}

#[test]
fn a_good_request_passes_and_fills_the_pool_to_the_brim() {
    assert_eq!(check_spec(&good(), &model()), Ok(()));
    let mut full = good();
    full.stopping.as_mut().unwrap().max_tokens = 45;
    assert_eq!(check_spec(&full, &model()), Ok(()));
}

/// The router takes it; found by `tests/fuzz grpc`.
#[test]
fn any_top_p_above_0_is_taken() {
    let mut least = good();
    least.sampling.as_mut().unwrap().top_p = f32::from_bits(1);
    assert_eq!(check_spec(&least, &model()), Ok(()));
}

#[test]
fn a_prompt_may_be_scored_without_any_output() {
    let mut spec = good();
    spec.stopping.as_mut().unwrap().max_tokens = 0;
    assert_eq!(check_spec(&spec, &model()), Ok(()));
}

#[test]
fn prompts_are_checked() {
    names(&refusal(|s| s.prompt.clear()), "prompt", &["empty"]);
    names(&refusal(|s| s.prompt.push(100)), "prompt", &["100", "out of range"]);
}

#[test]
fn room_is_checked_against_context_and_pool() {
    names(&stopping(|s| s.max_tokens = 46), "max_tokens", &["49", "48", "KV pool"]);
    names(&stopping(|s| s.max_tokens = u32::MAX), "max_tokens", &["64", "context"]);
    names(&refusal(|s| s.prompt = vec![1; 64]), "prompt", &["80", "64"]);
}

#[test]
fn output_from_elsewhere_leaves_room_and_has_known_ids() {
    assert_eq!(check_generated(&[], &good(), &model()), Ok(()));
    assert_eq!(check_generated(&[5; 15], &good(), &model()), Ok(()));
    names(&check_generated(&[5; 16], &good(), &model()).unwrap_err(), "generated", &["16"]);
    names(&check_generated(&[100], &good(), &model()).unwrap_err(), "generated", &["100"]);
}

#[test]
fn stopping_is_checked() {
    names(&stopping(|s| s.min_tokens = 17), "min_tokens", &["17", "16"]);
    names(&stopping(|s| s.stop_token_ids = vec![5, 100]), "stop_token_ids", &["100"]);
    names(&stopping(|s| s.stop_token_ids = vec![5; 129]), "stop_token_ids", &["129", "128"]);
}

#[test]
fn sampling_is_checked() {
    names(&sampling(|s| s.temperature = f32::NAN), "temperature", &["NaN"]);
    names(&sampling(|s| s.temperature = -0.5), "temperature", &["-0.5"]);
    names(&sampling(|s| s.temperature = f32::INFINITY), "temperature", &["inf"]);
    names(&sampling(|s| s.top_p = 0.0), "top_p", &["0", "(0, 1]"]);
    names(&sampling(|s| s.top_p = 1.5), "top_p", &["1.5"]);
    names(&sampling(|s| s.min_p = -0.1), "min_p", &["-0.1"]);
    names(&sampling(|s| s.repetition_penalty = 0.0), "repetition_penalty", &["0"]);
    names(&sampling(|s| s.presence_penalty = 2.5), "presence_penalty", &["2.5"]);
    names(&sampling(|s| s.frequency_penalty = f32::NEG_INFINITY), "frequency_penalty", &["-inf"]);
}

#[test]
fn logit_bias_is_checked() {
    let entry = |token_id, bias| pb::LogitBias { token_id, bias };
    names(&sampling(|s| s.logit_bias = vec![entry(100, 1.0)]), "logit_bias", &["100"]);
    names(&sampling(|s| s.logit_bias = vec![entry(3, 101.0)]), "logit_bias", &["101"]);
    names(&sampling(|s| s.logit_bias = vec![entry(3, 1.0), entry(3, 2.0)]), "logit_bias", &["twice"]);
}

#[test]
fn logprobs_are_checked() {
    names(&refusal(|s| s.logprobs = Some(21)), "logprobs", &["21", "20"]);
    names(&refusal(|s| s.prompt_logprobs = Some(21)), "prompt_logprobs", &["21", "20"]);
}

#[test]
fn priorities_are_checked() {
    names(&refusal(|s| s.priority = 9), "priority", &["9", "from -8 to 8"]);
    names(&refusal(|s| s.priority = i32::MIN), "priority", &["-2147483648"]);
}
