//! The check of a request. Every process that receives a request makes the same check. A request that has passed it is
//! a [`CheckedRequest`], which later code need not check again.

mod token_limit;

use std::ops::Deref;

pub use token_limit::TokenLimit;
use tutti_parameters::{
    LOGPROBS, MIN_TOKENS, PRIORITY, PROMPT_LOGPROBS, Refused, STOP_TOKEN_IDS, SamplingParams, check_token_ids,
};

use crate::{
    CacheSalt,
    cluster::v1::{MediaItem, ModelDescription, RequestSpec, Stopping, Thinking},
    v1::Constraint,
};

/// Facts about the served model that requests are checked against.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits<'a> {
    /// Number of token ids.
    pub vocab_size: u32,
    /// The model's own end-of-sequence ids.
    pub eos_token_ids: &'a [u32],
    /// The limit on the tokens of prompt and output together.
    pub tokens: TokenLimit,
}

impl ModelDescription {
    /// Returns the limits of requests to this model.
    pub fn request_limits(&self) -> RequestLimits<'_> {
        RequestLimits {
            vocab_size: self.vocab_size,
            eos_token_ids: &self.eos_token_ids,
            tokens: TokenLimit::new(self.max_context_tokens, self.max_request_tokens),
        }
    }
}

impl Stopping {
    /// Refuses values outside of their ranges.
    pub fn check(&self, limits: &RequestLimits<'_>) -> Result<(), Refused> {
        let Self { max_tokens, min_tokens, stop_token_ids, ignore_eos } = self;
        if min_tokens > max_tokens {
            let message = format!("is {min_tokens}, but must be at most max_tokens, {max_tokens}");
            return Err(Refused::new(MIN_TOKENS.name, message));
        }
        STOP_TOKEN_IDS.check(stop_token_ids.len())?;
        check_token_ids(STOP_TOKEN_IDS.name, stop_token_ids.iter().copied(), limits.vocab_size)?;
        let own = if *ignore_eos { &[][..] } else { limits.eos_token_ids };
        if *min_tokens > 0 && own.len() + stop_token_ids.len() >= limits.vocab_size as usize {
            let mut ends = [own, stop_token_ids].concat();
            ends.sort_unstable();
            ends.dedup();
            if ends.len() >= limits.vocab_size as usize {
                let message = format!("is {min_tokens}, but every token of the vocabulary ends the output");
                return Err(Refused::new(MIN_TOKENS.name, message));
            }
        }
        Ok(())
    }
}

/// All fields of a [`RequestSpec`]. No field is missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestParts {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Conditions that end the output.
    pub stopping: Stopping,
    /// See [`RequestSpec::logprobs`].
    pub logprobs: Option<u32>,
    /// See [`RequestSpec::prompt_logprobs`].
    pub prompt_logprobs: Option<u32>,
    /// See [`RequestSpec::priority`].
    pub priority: i32,
    /// Media items, in the order of the prompt.
    pub media: Vec<MediaItem>,
    /// See [`RequestSpec::cache_salt`].
    pub cache_salt: CacheSalt,
    /// See [`RequestSpec::constraint`]. Only its compilation checks it further.
    pub constraint: Option<Constraint>,
    /// See [`RequestSpec::thinking`].
    pub thinking: Option<Thinking>,
}

impl RequestParts {
    /// Refuses parameters outside of their ranges. Checks that depend on the prompt are left to [`RequestSpec::check`].
    pub fn check_parameters(&self, limits: &RequestLimits<'_>) -> Result<(), Refused> {
        self.sampling.check(limits.vocab_size)?;
        self.stopping.check(limits)?;
        self.logprobs.map(|top| LOGPROBS.check(top)).transpose()?;
        self.prompt_logprobs.map(|top| PROMPT_LOGPROBS.check(top)).transpose()?;
        if self.constraint.as_ref().is_some_and(|constraint| constraint.kind.is_none()) {
            return Err(Refused::new("constraint", "is of no kind: one of its kinds is required"));
        }
        if let Some(Thinking { begin, end, .. }) = self.thinking {
            check_token_ids("thinking", begin.into_iter().chain([end]), limits.vocab_size)?;
        }
        PRIORITY.check(self.priority).map(drop)
    }

    /// Refuses a prompt that is empty, that has ids outside of the vocabulary, or that is too long together with the
    /// output. `generated` is the output of an earlier try, which the request continues.
    fn check_tokens(&self, generated: &[u32], limits: &RequestLimits<'_>) -> Result<(), Refused> {
        if self.prompt.is_empty() {
            return Err(Refused::new("prompt", "is empty: it has no tokens"));
        }
        check_token_ids("prompt", self.prompt.iter().copied(), limits.vocab_size)?;
        let max_tokens = self.stopping.max_tokens;
        limits.tokens.check(self.prompt.len(), max_tokens)?;
        let count = generated.len();
        if count > 0 && count >= max_tokens as usize {
            let message = format!("has {count} tokens, which leaves none of max_tokens, {max_tokens}");
            return Err(Refused::new("generated", message));
        }
        check_token_ids("generated", generated.iter().copied(), limits.vocab_size)
    }
}

impl From<RequestParts> for RequestSpec {
    fn from(parts: RequestParts) -> Self {
        let RequestParts {
            prompt,
            sampling,
            stopping,
            logprobs,
            prompt_logprobs,
            priority,
            media,
            cache_salt,
            constraint,
            thinking,
        } = parts;
        let (sampling, stopping) = (Some(sampling), Some(stopping));
        let cache_salt = cache_salt.to_message();
        Self {
            prompt,
            sampling,
            stopping,
            logprobs,
            prompt_logprobs,
            priority,
            media,
            cache_salt,
            constraint,
            thinking,
        }
    }
}

/// A request that has passed [`RequestSpec::check`].
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedRequest(RequestParts);

impl RequestSpec {
    /// Checks the prompt and all parameters. `generated` is the output of an earlier try, which the request continues.
    /// Media have a separate check,
    /// [`ModelDeclaration::encoder_calls`](crate::declaration::ModelDeclaration::encoder_calls).
    pub fn check(self, generated: &[u32], limits: &RequestLimits<'_>) -> Result<CheckedRequest, Refused> {
        let Self {
            prompt,
            sampling,
            stopping,
            logprobs,
            prompt_logprobs,
            priority,
            media,
            cache_salt,
            constraint,
            thinking,
        } = self;
        let sampling = sampling.ok_or_else(|| Refused::new("sampling", "is missing"))?;
        let stopping = stopping.ok_or_else(|| Refused::new("stopping", "is missing"))?;
        let cache_salt = CacheSalt::from_message(&cache_salt)?;
        let parts = RequestParts {
            prompt,
            sampling,
            stopping,
            logprobs,
            prompt_logprobs,
            priority,
            media,
            cache_salt,
            constraint,
            thinking,
        };
        parts.check_tokens(generated, limits)?;
        parts.check_parameters(limits)?;
        Ok(CheckedRequest(parts))
    }
}

impl Deref for CheckedRequest {
    type Target = RequestParts;

    fn deref(&self) -> &RequestParts {
        &self.0
    }
}

impl CheckedRequest {
    /// The media items, for changes. The request's check does not depend on media.
    pub fn media_mut(&mut self) -> &mut Vec<MediaItem> {
        &mut self.0.media
    }

    /// Returns all fields of the request.
    pub fn into_parts(self) -> RequestParts {
        self.0
    }
}

#[cfg(test)]
mod tests;
