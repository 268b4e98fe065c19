//! Inputs and results of sampling. The device does the arithmetic.

mod mask;
mod nomination;

pub use mask::TokenMask;
pub use nomination::{Adjustments, MAX_NOMINATED, Nomination};
pub use tutti_parameters::{LogitBias, SamplingParams};

use crate::DeviceError;

/// One row of logits to sample from.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// Parameters of the request.
    pub params: &'a SamplingParams,
    /// Tokens of the prompt, for the repetition penalty.
    pub prompt: &'a [u32],
    /// Tokens of the output so far, for all penalties.
    pub output: &'a [u32],
    /// Tokens that must not be sampled: end-of-sequence tokens while the output is shorter than `min_tokens`.
    pub forbidden: &'a [u32],
    /// The tokens that may be sampled, for output that follows a constraint; `None` allows all. It has
    /// [`TokenMask::words_of`] the vocabulary words.
    pub allowed: Option<&'a TokenMask>,
    /// Position of the sampled token. (seed, position) determines the random number of the draw.
    pub position: u64,
    /// Number of likeliest tokens to report in addition to the sampled token; `None` reports no logprobs.
    pub logprobs: Option<u32>,
}

impl SampleRow<'_> {
    /// True if bias, forbidden tokens, a mask or penalties change the row's logits.
    pub fn adjusts(&self) -> bool {
        let params = self.params;
        !params.logit_bias.is_empty()
            || !self.forbidden.is_empty()
            || self.allowed.is_some()
            || params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0
    }

    /// True if the row needs only the likeliest token, and not the logits.
    pub fn takes_the_likeliest(&self) -> bool {
        self.allowed.is_none() && self.takes_the_likeliest_allowed()
    }

    /// True if the row needs only the likeliest token that its mask allows, and not the logits.
    pub fn takes_the_likeliest_allowed(&self) -> bool {
        // This is the same comparison as in `sample`, so that both decide in the same way if the temperature is NaN.
        let draws = self.params.temperature > 0.0;
        let unmasked = Self { allowed: None, ..*self };
        !draws && self.logprobs.is_none() && !unmasked.adjusts()
    }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Vocabulary id.
    pub token: u32,
    /// Logprob, if requested.
    pub score: Option<TokenScore>,
}

/// One row of logits in which a known token is looked up (prompt logprobs).
#[derive(Clone, Copy, Debug)]
pub struct ScoreRow {
    /// The known token.
    pub token: u32,
    /// Number of likeliest tokens to report in addition to the known token.
    pub top: u32,
}

/// A token's score in the model's own distribution: the log-softmax of the raw logits, before penalties, temperature
/// and truncation (`raw_logprobs` in vLLM).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// Natural logarithm of the token's probability.
    pub logprob: f32,
    /// 1 + the number of strictly likelier tokens.
    pub rank: u32,
    /// The likeliest tokens and their logprobs, by descending logprob. Tokens of equal logprob are in ascending order
    /// of id.
    pub top: Vec<(u32, f32)>,
}

/// The results of a step, in the order in which its sampling operations were enqueued. A request that cannot be
/// answered has an error of its own, which is never [`DeviceError::Lost`]: the step has run, and the other requests
/// have their results.
#[derive(Clone, Debug, Default)]
pub struct StepResults {
    /// One result per sampled row.
    pub sampled: Vec<Result<Sampled, DeviceError>>,
    /// One result per scored row.
    pub scores: Vec<Result<TokenScore, DeviceError>>,
}

impl StepResults {
    /// True if there are no results.
    pub fn is_empty(&self) -> bool {
        self.sampled.is_empty() && self.scores.is_empty()
    }

    /// Removes all results and keeps the memory.
    pub fn clear(&mut self) {
        self.sampled.clear();
        self.scores.clear();
    }

    /// Moves all results of `other` to the end of this list.
    pub fn append(&mut self, other: &mut Self) {
        self.sampled.append(&mut other.sampled);
        self.scores.append(&mut other.scores);
    }
}
