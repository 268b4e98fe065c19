//! Sampling parameters: their ranges and defaults, the completion of the client's values, and the check of all values.

use crate::{
    AskedSampling, LogitBias, SamplingParams,
    range::{Bounded, Count, Integers, Numbers, Refused, check_token_ids},
};

/// A sampling parameter that is a number.
#[derive(Clone, Copy)]
pub struct SamplingNumber {
    /// Name and range.
    pub bounds: Bounded<Numbers>,
    /// The value if neither the request nor the checkpoint sets one.
    pub default: f32,
    /// True if the checkpoint's `generation_config.json` may set a default.
    pub in_checkpoint: bool,
    /// The parameter's meaning, if its name does not say it.
    pub note: &'static str,
    /// Path of the field in `tutti.v1.GenerateRequest`.
    pub grpc: &'static [&'static str],
    /// Reads the value that a client asks for.
    asked: fn(&AskedSampling) -> Option<f32>,
    /// Writes the value that a client asks for.
    pub ask: fn(&mut AskedSampling, f32),
    /// Reads the complete value.
    pub of: fn(&SamplingParams) -> f32,
    /// Writes the complete value.
    pub set: fn(&mut SamplingParams, f32),
}

/// Declares a number by its field in both messages, its range, its default, whether the checkpoint may set a default,
/// and a note.
macro_rules! number {
    ($field:ident, $range:expr, $default:literal, $in_checkpoint:literal, $note:literal) => {
        SamplingNumber {
            bounds: Bounded { name: stringify!($field), range: $range },
            default: $default,
            in_checkpoint: $in_checkpoint,
            note: $note,
            grpc: &[concat!("sampling.", stringify!($field))],
            asked: |asked| asked.$field,
            ask: |asked, value| asked.$field = Some(value),
            of: |params| params.$field,
            set: |params, value| params.$field = value,
        }
    };
}

/// The sampling parameters that are numbers. Their ranges bound the penalties, so that no logit overflows.
pub const NUMBERS: [SamplingNumber; 6] = [
    number!(temperature, Numbers::new(0.0, 2.0), 1.0, true, "0 is greedy"),
    number!(top_p, Numbers::above(0.0, 1.0), 1.0, true, ""),
    number!(min_p, Numbers::new(0.0, 1.0), 0.0, true, ""),
    number!(presence_penalty, Numbers::new(-2.0, 2.0), 0.0, false, "over the output"),
    number!(frequency_penalty, Numbers::new(-2.0, 2.0), 0.0, false, "over the output"),
    number!(repetition_penalty, Numbers::new(0.01, 100.0), 1.0, true, "over prompt and output"),
];

/// `top_k` in HTTP bodies. As in vLLM, -1 means all tokens.
pub const TOP_K: Bounded<Integers> = Bounded { name: "top_k", range: Integers::new(-1, u32::MAX as i64) };

/// Maximum number of tokens that a request may bias.
pub const BIASES: Bounded<Count> =
    Bounded { name: "logit_bias", range: Count { most: 1024, items: "tokens" } };

/// The range of one token's bias.
pub const BIAS: Bounded<Numbers> = Bounded { name: BIASES.name, range: Numbers::new(-100.0, 100.0) };

impl SamplingParams {
    /// Greedy sampling without penalties or bias.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        seed: 0,
    };

    /// Fills in the values that a client does not ask for: with the checkpoint's defaults, or else with the declared
    /// defaults. If the client asks for no seed, `seed` makes one.
    pub fn complete(asked: &AskedSampling, checkpoint: &AskedSampling, seed: impl FnOnce() -> u64) -> Self {
        let mut params = Self::GREEDY;
        for number in &NUMBERS {
            let value = (number.asked)(asked).or((number.asked)(checkpoint));
            (number.set)(&mut params, value.unwrap_or(number.default));
        }
        params.top_k = asked.top_k.or(checkpoint.top_k).unwrap_or(0);
        params.logit_bias = asked.logit_bias.iter().map(|(&id, &bias)| LogitBias::from((id, bias))).collect();
        params.logit_bias.sort_unstable_by_key(|bias| bias.token_id);
        params.seed = asked.seed.unwrap_or_else(seed);
        params
    }

    /// Refuses values out of their ranges.
    pub fn check(&self, vocab_size: u32) -> Result<(), Refused> {
        for number in &NUMBERS {
            number.bounds.check((number.of)(self))?;
        }
        BIASES.check(self.logit_bias.len())?;
        check_token_ids(BIASES.name, self.logit_bias.iter().map(|bias| bias.token_id), vocab_size)?;
        if let Some(pair) = self.logit_bias.windows(2).find(|pair| pair[0].token_id >= pair[1].token_id) {
            let message = format!("names token {} twice or out of order", pair[1].token_id);
            return Err(Refused::new(BIASES.name, message));
        }
        self.logit_bias.iter().try_for_each(|bias| BIAS.check(bias.bias).map(drop))
    }
}

impl From<(u32, f32)> for LogitBias {
    fn from((token_id, bias): (u32, f32)) -> Self {
        Self { token_id, bias }
    }
}

#[cfg(test)]
mod tests;
