//! The checks at the door: what cannot be run is refused here, with the field, the value and the limit, so that nothing
//! behind this point has to doubt a request.

use tutti_proto::{MAX_PRIORITY, cluster::v1 as pb};
use tutti_runtime::Error;

/// The most alternatives beside a logprob.
pub const MAX_LOGPROBS: u32 = 20;
/// The most stop tokens of a request: each sampled token is compared with all of them.
pub const MAX_STOP_TOKENS: usize = 1024;

/// Refuses what `model` cannot run. Fields are named as clients spell them.
pub fn check_spec(spec: &pb::RequestSpec, model: &pb::ModelDescription) -> Result<(), Error> {
    let stopping = spec.stopping.as_ref().ok_or_else(|| Error::invalid("max_tokens", "is missing"))?;
    let sampling = spec.sampling.as_ref().ok_or_else(|| Error::invalid("temperature", "is missing"))?;
    check_prompt(&spec.prompt, model)?;
    check_stopping(stopping, model)?;
    check_room(spec.prompt.len(), stopping.max_tokens, model)?;
    check_sampling(sampling, model)?;
    check_logprobs("logprobs", spec.logprobs)?;
    check_logprobs("prompt_logprobs", spec.prompt_logprobs)?;
    check_priority(spec.priority)
}

/// Refuses output that the request cannot go on behind.
pub fn check_generated(
    generated: &[u32],
    spec: &pb::RequestSpec,
    model: &pb::ModelDescription,
) -> Result<(), Error> {
    let max_tokens = spec.stopping.as_ref().map_or(0, |stopping| stopping.max_tokens as usize);
    let count = generated.len();
    if count > 0 && count >= max_tokens {
        let message = format!("has {count} tokens, which leaves none of max_tokens {max_tokens}");
        return Err(Error::invalid("generated", message));
    }
    check_ids("generated", generated.iter().copied(), model.vocab_size)
}

fn check_prompt(prompt: &[u32], model: &pb::ModelDescription) -> Result<(), Error> {
    if prompt.is_empty() {
        return Err(Error::invalid("prompt", "is empty: at least 1 token is needed"));
    }
    check_ids("prompt", prompt.iter().copied(), model.vocab_size)
}

fn check_stopping(stopping: &pb::Stopping, model: &pb::ModelDescription) -> Result<(), Error> {
    let pb::Stopping { max_tokens, min_tokens, stop_token_ids, .. } = stopping;
    if min_tokens > max_tokens {
        let message = format!("is {min_tokens}, more than max_tokens {max_tokens}");
        return Err(Error::invalid("min_tokens", message));
    }
    if stop_token_ids.len() > MAX_STOP_TOKENS {
        let message = format!("has {} ids, the limit is {MAX_STOP_TOKENS}", stop_token_ids.len());
        return Err(Error::invalid("stop_token_ids", message));
    }
    check_ids("stop_token_ids", stop_token_ids.iter().copied(), model.vocab_size)
}

/// Prompt and output have to fit the context, and the KV pool of every worker that may get the request.
fn check_room(prompt: usize, max_tokens: u32, model: &pb::ModelDescription) -> Result<(), Error> {
    let total = prompt as u64 + u64::from(max_tokens);
    let limits = [
        (model.max_context_tokens, "the model's context"),
        (model.max_request_tokens, "what a worker's KV pool can hold (--kv-cache-memory)"),
    ];
    for (limit, what) in limits {
        let limit = u64::from(limit);
        if total <= limit {
            continue;
        }
        let sum = format!("{prompt} prompt tokens + max_tokens {max_tokens} = {total}");
        // The prompt is at fault where no output length could help.
        let field = if prompt as u64 >= limit { "prompt" } else { "max_tokens" };
        return Err(Error::invalid(field, format!("{sum} tokens are over the limit of {limit}, {what}")));
    }
    Ok(())
}

fn check_sampling(sampling: &pb::Sampling, model: &pb::ModelDescription) -> Result<(), Error> {
    within("temperature", sampling.temperature, 0.0, f32::MAX, "0 or more")?;
    within("top_p", sampling.top_p, f32::MIN_POSITIVE, 1.0, "in (0, 1]")?;
    within("min_p", sampling.min_p, 0.0, 1.0, "in [0, 1]")?;
    // Beyond this a logit could overflow.
    within("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0, "in [0.01, 100]")?;
    within("presence_penalty", sampling.presence_penalty, -2.0, 2.0, "in [-2, 2]")?;
    within("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0, "in [-2, 2]")?;
    let bias = &sampling.logit_bias;
    check_ids("logit_bias", bias.iter().map(|entry| entry.token_id), model.vocab_size)?;
    if let Some(pair) = bias.windows(2).find(|pair| pair[0].token_id >= pair[1].token_id) {
        let message = format!("token id {} is named twice or out of order", pair[1].token_id);
        return Err(Error::invalid("logit_bias", message));
    }
    bias.iter().try_for_each(|entry| within("logit_bias", entry.bias, -100.0, 100.0, "in [-100, 100]"))
}

fn check_logprobs(field: &str, top: Option<u32>) -> Result<(), Error> {
    match top {
        Some(top) if top > MAX_LOGPROBS => {
            Err(Error::invalid(field, format!("is {top}, the limit is {MAX_LOGPROBS}")))
        }
        _ => Ok(()),
    }
}

fn check_priority(priority: i32) -> Result<(), Error> {
    if (-MAX_PRIORITY..=MAX_PRIORITY).contains(&priority) {
        return Ok(());
    }
    let message = format!("is {priority}, but must be from -{MAX_PRIORITY} to {MAX_PRIORITY}");
    Err(Error::invalid("priority", message))
}

fn check_ids(field: &str, mut ids: impl Iterator<Item = u32>, vocab: u32) -> Result<(), Error> {
    match ids.find(|id| *id >= vocab) {
        Some(id) => Err(Error::invalid(
            field,
            format!("token id {id} is out of range: the vocabulary has {vocab} ids, counted from 0"),
        )),
        None => Ok(()),
    }
}

/// NaN is in no range.
fn within(field: &str, value: f32, low: f32, high: f32, range: &str) -> Result<(), Error> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(field, format!("is {value}, but must be {range}")))
}

#[cfg(test)]
mod tests {
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
        names(&stopping(|s| s.stop_token_ids = vec![5; 1025]), "stop_token_ids", &["1025", "1024"]);
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
}
