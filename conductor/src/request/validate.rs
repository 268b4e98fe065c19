//! Validation on arrival. A request that cannot run is refused with the field, the value and the limit, so that later
//! code need not check it again.

use tutti_proto::{MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_TOKENS, cluster::v1 as pb};
use tutti_runtime::Error;

/// The smallest number above 0, which is subnormal.
const LEAST_POSITIVE: f32 = f32::from_bits(1);

/// Refuses a request that `model` cannot run. Errors name fields as clients spell them.
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

/// Refuses `generated`, the earlier output, if the request cannot continue after it.
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

/// Refuses a request whose prompt and output together exceed the model's context, or the KV pool of any worker that may
/// get the request.
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
        // The prompt is at fault if it leaves no room for any output.
        let field = if prompt as u64 >= limit { "prompt" } else { "max_tokens" };
        return Err(Error::invalid(field, format!("{sum} tokens are over the limit of {limit}, {what}")));
    }
    Ok(())
}

fn check_sampling(sampling: &pb::Sampling, model: &pb::ModelDescription) -> Result<(), Error> {
    within("temperature", sampling.temperature, 0.0, f32::MAX, "0 or more")?;
    within("top_p", sampling.top_p, LEAST_POSITIVE, 1.0, "in (0, 1]")?;
    within("min_p", sampling.min_p, 0.0, 1.0, "in [0, 1]")?;
    // The penalties are bounded, because a logit could overflow with a penalty beyond these bounds.
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

/// Refuses a value outside the range. NaN is in no range.
fn within(field: &str, value: f32, low: f32, high: f32, range: &str) -> Result<(), Error> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(field, format!("is {value}, but must be {range}")))
}

#[cfg(test)]
mod tests;
