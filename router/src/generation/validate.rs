//! Validates a request's parameters against their limits, and fills in defaults. Every error names the field, its value
//! and the limit.

use std::{ops::RangeInclusive, time::Duration};

use tutti_proto::{MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_TOKENS, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind};

use super::request::{GenerationRequest, Output, Sampling, Stopping};
use crate::served::SamplingDefaults;

/// Maximum number of choices per prompt.
pub const MAX_N: u32 = 128;
/// Maximum number of stop strings per request. The limit bounds the text held back from the client.
pub const MAX_STOPS: usize = 16;
/// Maximum length of a stop string in bytes. The limit bounds the text held back from the client.
pub const MAX_STOP_BYTES: usize = 1024;
/// Maximum number of biased tokens per request.
pub const MAX_BIASES: usize = 1024;

const PENALTY: RangeInclusive<f32> = -2.0..=2.0;

/// Checks that a number is within a range. NaN is in no range.
fn within(field: &str, value: f32, range: RangeInclusive<f32>) -> Result<f32, Error> {
    if range.contains(&value) {
        return Ok(value);
    }
    let message = format!("is {value}, but must be from {} to {}", range.start(), range.end());
    Err(Error::invalid(field, message))
}

/// Checks that a fraction is above 0 and at most 1.
fn share(field: &str, value: f32) -> Result<f32, Error> {
    if value > 0.0 && value <= 1.0 {
        return Ok(value);
    }
    Err(Error::invalid(field, format!("is {value}, but must be above 0 and at most 1")))
}

fn at_most<T: PartialOrd + std::fmt::Display>(field: &str, value: T, limit: T) -> Result<T, Error> {
    if value <= limit {
        return Ok(value);
    }
    Err(Error::invalid(field, format!("is {value}, but must be at most {limit}")))
}

fn few(field: &str, what: &str, count: usize, limit: usize) -> Result<(), Error> {
    if count <= limit {
        return Ok(());
    }
    Err(Error::invalid(field, format!("has {count} {what}, but may have at most {limit}")))
}

/// Checks that a token id is in the vocabulary.
pub fn token_id(field: &str, id: u32, vocab_size: u32) -> Result<u32, Error> {
    if id < vocab_size {
        return Ok(id);
    }
    let message = format!("token id {id} is out of range: the vocabulary has {vocab_size} tokens");
    Err(Error::invalid(field, message))
}

/// Validates everything that does not depend on the tokenised prompt, so that a bad request costs no tokenising.
pub fn check(request: &GenerationRequest, vocab_size: u32, has_tokenizer: bool) -> Result<(), Error> {
    if request.prompts.is_empty() {
        return Err(Error::invalid("prompt", "is empty"));
    }
    match request.n {
        Some(0) => return Err(Error::invalid("n", "is 0, but must be at least 1")),
        n => at_most("n", n.unwrap_or(1), MAX_N)?,
    };
    check_stopping(&request.stopping, &request.output, vocab_size, has_tokenizer)?;
    at_most("logprobs", request.output.logprobs.unwrap_or(0), MAX_LOGPROBS)?;
    at_most("prompt_logprobs", request.output.prompt_logprobs.unwrap_or(0), MAX_LOGPROBS)?;
    if !(-MAX_PRIORITY..=MAX_PRIORITY).contains(&request.priority) {
        let message = format!("is {}, but must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", request.priority);
        return Err(Error::invalid("priority", message));
    }
    // A timeout of 0 is not an invalid argument: a client passes on the time that it has left, which may be 0.
    if request.timeout == Some(Duration::ZERO) {
        let error = Error::new(ErrorKind::DeadlineExceeded, "is 0: no time is left for the request");
        return Err(error.with_field("timeout_ms"));
    }
    Ok(())
}

/// Refuses a request whose answer would report more than `limit` logprobs of prompts. `lengths` are the prompts'
/// numbers of tokens.
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

/// Refuses a request whose answer could report more than `limit` logprobs of output tokens. They are kept until they
/// are read, or in a whole answer until its end. `tokens` is the sum of `max_tokens` over all choices.
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

fn check_stopping(
    stopping: &Stopping,
    output: &Output,
    vocab_size: u32,
    has_tokenizer: bool,
) -> Result<(), Error> {
    few("stop", "strings", stopping.stop.len(), MAX_STOPS)?;
    for stop in &stopping.stop {
        if stop.is_empty() {
            return Err(Error::invalid("stop", "has an empty string, which would end every output at once"));
        }
        if stop.len() > MAX_STOP_BYTES {
            let message =
                format!("has a string of {} bytes, but may have at most {MAX_STOP_BYTES}", stop.len());
            return Err(Error::invalid("stop", message));
        }
    }
    if !has_tokenizer && !stopping.stop.is_empty() {
        let message = "needs a tokenizer, and the server runs with skip_tokenizer_init; use stop_token_ids";
        return Err(Error::invalid("stop", message));
    }
    few("stop_token_ids", "tokens", stopping.stop_token_ids.len(), MAX_STOP_TOKENS)?;
    for &id in &stopping.stop_token_ids {
        token_id("stop_token_ids", id, vocab_size)?;
    }
    if stopping.max_tokens == Some(0) && !output.echo && output.prompt_logprobs.is_none() {
        let message = "is 0, which leaves nothing to answer with unless echo or prompt_logprobs is set";
        return Err(Error::invalid("max_tokens", message));
    }
    Ok(())
}

/// The sampling parameters: the request's, else the checkpoint's defaults, else OpenAI's.
pub fn sampling(
    asked: &Sampling,
    defaults: &SamplingDefaults,
    vocab_size: u32,
) -> Result<pb::Sampling, Error> {
    let default_temperature = match defaults.do_sample {
        Some(false) => Some(0.0),
        _ => defaults.temperature,
    };
    let temperature = asked.temperature.or(default_temperature).unwrap_or(1.0);
    let top_p = asked.top_p.or(defaults.top_p).unwrap_or(1.0);
    let min_p = asked.min_p.or(defaults.min_p).unwrap_or(0.0);
    let repetition = asked.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0);
    Ok(pb::Sampling {
        temperature: within("temperature", temperature, 0.0..=2.0)?,
        top_k: asked.top_k.or(defaults.top_k).unwrap_or(0),
        top_p: share("top_p", top_p)?,
        min_p: within("min_p", min_p, 0.0..=1.0)?,
        repetition_penalty: within("repetition_penalty", repetition, 0.01..=100.0)?,
        presence_penalty: within("presence_penalty", asked.presence_penalty.unwrap_or(0.0), PENALTY)?,
        frequency_penalty: within("frequency_penalty", asked.frequency_penalty.unwrap_or(0.0), PENALTY)?,
        logit_bias: logit_bias(&asked.logit_bias, vocab_size)?,
        seed: asked.seed.unwrap_or_else(|| fastrand::u64(..)),
    })
}

fn logit_bias(asked: &[(u32, f32)], vocab_size: u32) -> Result<Vec<pb::LogitBias>, Error> {
    few("logit_bias", "tokens", asked.len(), MAX_BIASES)?;
    let mut biases = asked
        .iter()
        .map(|&(id, bias)| {
            let token_id = token_id("logit_bias", id, vocab_size)?;
            Ok(pb::LogitBias { token_id, bias: within("logit_bias", bias, -100.0..=100.0)? })
        })
        .collect::<Result<Vec<_>, Error>>()?;
    biases.sort_unstable_by_key(|bias| bias.token_id);
    match biases.windows(2).find(|pair| pair[0].token_id == pair[1].token_id) {
        Some(pair) => {
            let message = format!("names token {} twice", pair[0].token_id);
            Err(Error::invalid("logit_bias", message))
        }
        None => Ok(biases),
    }
}

/// Maximum number of output tokens for a prompt of this length. `limit` is the maximum number of tokens per request,
/// prompt and output together, with the reason for that maximum.
pub fn max_tokens(stopping: &Stopping, prompt: usize, limit: (u32, &str)) -> Result<u32, Error> {
    let (limit, what) = limit;
    let room = u32::try_from(prompt).ok().and_then(|prompt| limit.checked_sub(prompt));
    let Some(room) = room else {
        let message = format!("has {prompt} tokens, but a request may have at most {limit}, {what}");
        return Err(Error::invalid("prompt", message));
    };
    let max_tokens = match (stopping.max_tokens, stopping.default_max_tokens) {
        (Some(asked), _) if asked > room => {
            let message = format!(
                "is {asked} and the prompt has {prompt} tokens, but both together may have at most {limit}, {what}"
            );
            return Err(Error::invalid("max_tokens", message));
        }
        (Some(asked), _) => asked,
        (None, Some(default)) => default.min(room),
        (None, None) => room,
    };
    if max_tokens == 0 && stopping.max_tokens.is_none() {
        let message =
            format!("has {prompt} tokens, which leaves no room for output: the limit is {limit}, {what}");
        return Err(Error::invalid("prompt", message));
    }
    if stopping.min_tokens > max_tokens {
        let message = format!("is {}, but must be at most max_tokens, {max_tokens}", stopping.min_tokens);
        return Err(Error::invalid("min_tokens", message));
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
