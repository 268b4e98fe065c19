//! Nominations: the parameters of a request that each rank of a TP group needs to send its best tokens instead of its
//! logits.

use super::{SampleRow, TokenMask};

/// Maximum of [`Nomination::count`]. A row with a larger `top_k` needs all of its logits.
pub const MAX_NOMINATED: u32 = 256;
/// Maximum number of tokens that a nomination lists for bias, forbidden tokens and penalties. Longer lists would cost
/// more than the logits that the nomination saves.
const MAX_LISTED: usize = 8192;

/// A row whose token depends only on its best tokens. Each rank adjusts the logits of its share of the vocabulary and
/// nominates its `count` best tokens; the whole row's `count` best are among them.
#[derive(Clone, Debug, PartialEq)]
pub struct Nomination {
    /// Number of tokens that each rank nominates, from 1 to [`MAX_NOMINATED`].
    pub count: u32,
    /// Temperature. Above 0, tokens are ordered as truncation orders them: by descending weight (the exponential of a
    /// logit at this temperature), and equal weights by ascending id. At 0, they are ordered by descending logit, and
    /// equal logits by ascending id.
    pub temperature: f32,
    /// `None` if the raw logits are used.
    pub adjustments: Option<Adjustments>,
}

/// Mask, bias, forbidden tokens and penalties of a row, by token. They apply in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adjustments {
    /// The mask of the whole vocabulary: the logits of all other tokens become negative infinity. `None` allows all.
    pub allowed: Option<TokenMask>,
    /// Pairs of a token id and the number that is added to its logit.
    pub bias: Vec<(u32, f32)>,
    /// Tokens whose logit becomes negative infinity.
    pub forbidden: Vec<u32>,
    /// Factor that makes the tokens in `repeated` less likely: their logits are divided by it if positive, and else
    /// multiplied.
    pub repetition_penalty: f32,
    /// Tokens of the prompt and the output, each once. Empty if the penalty is 1.
    pub repeated: Vec<u32>,
    /// Number that is subtracted once from the logit of each token in `counted`.
    pub presence_penalty: f32,
    /// Number that is subtracted per occurrence from the logit of each token in `counted`.
    pub frequency_penalty: f32,
    /// Tokens of the output with their numbers of occurrences, each token once. Empty if both penalties are 0.
    pub counted: Vec<(u32, u32)>,
}

impl Nomination {
    /// The nomination of a row that [takes the likeliest token](SampleRow::takes_the_likeliest).
    pub const LIKELIEST: Self = Self { count: 1, temperature: 0.0, adjustments: None };

    /// True if the row's token is drawn at random. The order of tokens then depends on the largest logit of the whole
    /// row.
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }
}

impl SampleRow<'_> {
    /// Returns the nomination of this row. Returns `None` if the row needs all of its logits: for logprobs, for a draw
    /// without a `top_k` or with a large one, or because bias and penalties list too many tokens.
    pub fn nomination(&self) -> Option<Nomination> {
        let params = self.params;
        let count = match params.temperature > 0.0 {
            true => params.top_k,
            false => 1,
        };
        if self.logprobs.is_some() || !(1..=MAX_NOMINATED).contains(&count) {
            return None;
        }
        let adjustments = match self.adjusts() {
            true => Some(self.adjustments()?),
            false => None,
        };
        Some(Nomination { count, temperature: params.temperature, adjustments })
    }

    fn adjustments(&self) -> Option<Adjustments> {
        let params = self.params;
        let repeats = params.repetition_penalty != 1.0;
        let counts = params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        let (repeated, counted) = (
            if repeats { self.prompt.len() + self.output.len() } else { 0 },
            if counts { self.output.len() } else { 0 },
        );
        if params.logit_bias.len() + self.forbidden.len() + repeated + counted > MAX_LISTED {
            return None;
        }
        let mut adjustments = Adjustments {
            allowed: self.allowed.cloned(),
            bias: params.logit_bias.iter().map(|bias| (bias.token_id, bias.bias)).collect(),
            forbidden: self.forbidden.to_vec(),
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            ..Adjustments::default()
        };
        if repeats {
            adjustments.repeated = [self.prompt, self.output].concat();
            adjustments.repeated.sort_unstable();
            adjustments.repeated.dedup();
        }
        if counts {
            let mut output = self.output.to_vec();
            output.sort_unstable();
            let occurrences = output.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32));
            adjustments.counted = occurrences.collect();
        }
        Some(adjustments)
    }
}
