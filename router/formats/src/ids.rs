//! Ids of calls.

/// The form of a family's ids. Its chat template may refuse others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum IdStyle {
    /// `call_` and 24 letters and digits, as OpenAI writes them.
    #[default]
    OpenAi,
    /// Nine letters and digits. Templates of Mistral raise on any other.
    Mistral,
    /// `functions.NAME:N`, where N counts the calls of the conversation.
    Kimi,
}

const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// Makes the ids of one output. They are a function of the seed, so that a test can name them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ids {
    pub style: IdStyle,
    /// Random number of the output.
    pub seed: u64,
    /// Number of calls in earlier turns of the conversation.
    pub earlier_calls: usize,
}

impl Ids {
    /// The id of the call with this index, if the model did not write one of the family's form.
    pub fn id(&self, index: usize, name: &str) -> String {
        match self.style {
            IdStyle::OpenAi => format!("call_{}", self.random(index, 24)),
            IdStyle::Mistral => self.random(index, 9),
            IdStyle::Kimi => format!("functions.{name}:{}", self.earlier_calls + index),
        }
    }

    /// Letters and digits by SplitMix64 (Steele, Lea and Flood, 2014).
    fn random(&self, index: usize, length: usize) -> String {
        let mut state = self.seed ^ (index as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = state;
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bits ^ (bits >> 31)
        };
        (0..length).map(|_| char::from(ALPHABET[(next() % ALPHABET.len() as u64) as usize])).collect()
    }
}
