//! Validates a request's parameters against their limits, and fills in defaults. Every error names the field, its value
//! and the limit.

use std::time::Duration;

use tutti_proto::{
    CacheSalt, RequestParts, TokenLimit,
    cluster::v1 as pb,
    parameters::{N, STOP_BYTES, STOPS, SamplingParams},
};
use tutti_runtime::{Error, ErrorKind};

use super::request::{GenerationRequest, Output, Stopping};
use crate::served::ServedModel;

/// Validates everything that does not depend on the tokenised prompt, so that a bad request costs no tokenising.
/// Returns the parts of the request that all choices share. The prompt of these parts is empty, and their `max_tokens`
/// is `u32::MAX` if the request sets none. Their salt is the default, because the API key is not known here, and they
/// have no block of reasoning, because the prompt may have opened it.
pub fn check(request: &GenerationRequest, model: &ServedModel) -> Result<RequestParts, Error> {
    if request.prompts.is_empty() {
        return Err(Error::invalid("prompt", "is empty"));
    }
    N.check(request.n.unwrap_or(1))?;
    check_stopping(&request.stopping, &request.output, model.text.tokenizer.is_some())?;
    // A timeout of 0 is not an invalid argument. A client may pass on its remaining time, which can be 0.
    if request.timeout == Some(Duration::ZERO) {
        let error = Error::new(ErrorKind::DeadlineExceeded, "is 0: no time is left for the request");
        return Err(error.with_field("timeout_ms"));
    }
    let Stopping { max_tokens, min_tokens, stop_token_ids, ignore_eos, .. } = &request.stopping;
    let common = RequestParts {
        prompt: Vec::new(),
        sampling: SamplingParams::complete(&request.sampling, &model.text.defaults, || fastrand::u64(..)),
        stopping: pb::Stopping {
            max_tokens: max_tokens.unwrap_or(u32::MAX),
            min_tokens: *min_tokens,
            stop_token_ids: stop_token_ids.clone(),
            ignore_eos: *ignore_eos,
        },
        logprobs: request.output.logprobs,
        prompt_logprobs: request.output.prompt_logprobs_needed(),
        priority: request.priority,
        media: Vec::new(),
        cache_salt: CacheSalt::default(),
        constraint: request.constraint.clone(),
        thinking: None,
    };
    common.check_parameters(&model.description.request_limits())?;
    Ok(common)
}

/// Refuses a request whose answer would report more than `limit` logprobs of prompts. `lengths` has the number of
/// tokens of each prompt.
pub fn prompt_logprobs(
    lengths: impl Iterator<Item = usize>,
    output: &Output,
    n: u32,
    limit: usize,
) -> Result<(), Error> {
    let Some(top) = output.prompt_logprobs_needed() else { return Ok(()) };
    let tokens: usize = lengths.sum();
    let entries = tokens.saturating_mul(n as usize).saturating_mul(top as usize + 1);
    if entries <= limit {
        return Ok(());
    }
    let field = if output.prompt_logprobs.is_some() { "prompt_logprobs" } else { "logprobs" };
    let message = format!(
        "asks for {entries} logprobs: {tokens} tokens of the prompt, n = {n}, {top} alternatives and the token itself; \
         the limit is {limit}"
    );
    Err(Error::invalid(field, message))
}

/// Refuses a request whose answer could report more than `limit` logprobs of output tokens. The router keeps these
/// logprobs until the client reads them, or until the end of an answer that is not streamed. `tokens` is the sum of
/// `max_tokens` over all choices.
pub fn output_logprobs(tokens: u64, output: &Output, limit: usize) -> Result<(), Error> {
    let Some(top) = output.logprobs else { return Ok(()) };
    let entries = tokens.saturating_mul(u64::from(top) + 1);
    if entries <= limit as u64 {
        return Ok(());
    }
    let message = format!(
        "asks for up to {entries} logprobs: {tokens} output tokens of all choices (max_tokens), {top} alternatives and the \
         token itself; the limit is {limit}"
    );
    Err(Error::invalid("logprobs", message))
}

fn check_stopping(stopping: &Stopping, output: &Output, has_tokenizer: bool) -> Result<(), Error> {
    STOPS.check(stopping.stop.len())?;
    for stop in &stopping.stop {
        if stop.is_empty() {
            return Err(Error::invalid("stop", "has an empty string, which would end every output at once"));
        }
        STOP_BYTES.check(stop.len())?;
    }
    if !has_tokenizer && !stopping.stop.is_empty() {
        let message = "needs a tokenizer, and the server runs with skip_tokenizer_init; use stop_token_ids";
        return Err(Error::invalid("stop", message));
    }
    if stopping.max_tokens == Some(0) && !output.echo && output.prompt_logprobs.is_none() {
        let message = "is 0, which leaves nothing to answer with unless echo or prompt_logprobs is set";
        return Err(Error::invalid("max_tokens", message));
    }
    Ok(())
}

/// Maximum number of output tokens for a prompt of `prompt` tokens.
pub fn max_tokens(stopping: &Stopping, prompt: usize, limit: TokenLimit) -> Result<u32, Error> {
    let room = limit.room(prompt)?;
    let max_tokens = match (stopping.max_tokens, stopping.default_max_tokens) {
        (Some(asked), _) => {
            limit.check(prompt, asked)?;
            asked
        }
        (None, Some(default)) => default.min(room),
        (None, None) => room,
    };
    if max_tokens == 0 && stopping.max_tokens.is_none() {
        let TokenLimit { tokens, what } = limit;
        let message =
            format!("has {prompt} tokens, which leaves no room for output: the limit is {tokens}, {what}");
        return Err(Error::invalid("prompt", message));
    }
    Ok(max_tokens)
}

/// The seed of a choice. Choice 0 has the request's seed, so that its output does not depend on `n`.
pub fn choice_seed(seed: u64, choice: u32) -> u64 {
    if choice == 0 {
        return seed;
    }
    // The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): nearby inputs give unrelated seeds.
    let mut z = seed.wrapping_add(u64::from(choice).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
