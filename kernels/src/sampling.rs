//! What sampling takes and gives. The arithmetic is the device's.

/// How one request samples. Validated at the front door; see `tutti.v1.Sampling` for ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 changes nothing. Counts prompt and output.
    pub repetition_penalty: f32,
    /// 0 changes nothing. Counts output only.
    pub presence_penalty: f32,
    /// 0 changes nothing. Counts output only.
    pub frequency_penalty: f32,
    /// Added to logits, sorted by token id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Random numbers are a function of (seed, position).
    pub seed: u64,
}

/// One row of logits to sample from.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// How.
    pub params: &'a SamplingParams,
    /// The prompt's tokens, for the repetition penalty.
    pub prompt: &'a [u32],
    /// The output so far, for all penalties.
    pub output: &'a [u32],
    /// Tokens that must not be sampled now (ends of sequence before `min_tokens`).
    pub forbidden: &'a [u32],
    /// Position of the token to be sampled: with the seed, the key of its random number.
    pub position: u64,
    /// How many of the likeliest tokens to report beside the sampled one; `None` reports no logprobs at all.
    pub logprobs: Option<u32>,
}

impl SampleRow<'_> {
    /// Whether the row's logits are changed before anything else: by bias, forbidden tokens or penalties.
    pub fn adjusts(&self) -> bool {
        let params = self.params;
        !params.logit_bias.is_empty()
            || !self.forbidden.is_empty()
            || params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0
    }

    /// Whether the likeliest token is all that is asked for, so that nobody needs the logits themselves.
    pub fn takes_the_likeliest(&self) -> bool {
        // Written as sampling asks it.
        let draws = self.params.temperature > 0.0;
        !draws && self.logprobs.is_none() && !self.adjusts()
    }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The vocabulary id.
    pub token: u32,
    /// Its logprob, when asked for.
    pub score: Option<TokenScore>,
}

/// One row of logits in which a known token is looked up (prompt logprobs).
#[derive(Clone, Copy, Debug)]
pub struct ScoreRow {
    /// The token that really follows.
    pub token: u32,
    /// How many of the likeliest tokens to report beside it.
    pub top: u32,
}

/// Where a token stands in the model's own distribution: log-softmax of the raw logits, before penalties,
/// temperature and truncation (what vLLM calls `raw_logprobs`).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// Natural logarithm.
    pub logprob: f32,
    /// 1 + the number of tokens that are strictly likelier.
    pub rank: u32,
    /// The likeliest tokens, falling; equals are ordered by lowest id.
    pub top: Vec<(u32, f32)>,
}
