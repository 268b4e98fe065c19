//! Masks in plan messages: each once, in the shortest of three forms.

use tutti_kernels::TokenMask;
use tutti_proto::cluster::v1::{self as pb, token_mask::Form};

/// Bytes of a token id in a message, about.
const BYTES_PER_TOKEN: usize = 3;
/// Maximum number of words of a mask. It bounds the memory that a message can make a rank allocate.
const MAX_WORDS: u32 = 1 << 20;

/// The masks of a plan that is being encoded.
#[derive(Default)]
pub(super) struct Masks(Vec<TokenMask>);

impl Masks {
    /// Index of a mask in the plan.
    pub fn index(&mut self, mask: TokenMask) -> u32 {
        let known = self.0.iter().position(|other| other.shares_words(&mask));
        known.unwrap_or_else(|| {
            self.0.push(mask);
            self.0.len() - 1
        }) as u32
    }

    pub fn encode(self) -> Vec<pb::TokenMask> {
        self.0.iter().map(|mask| encode(mask.words())).collect()
    }
}

fn encode(words: &[u32]) -> pb::TokenMask {
    let allowed: usize = words.iter().map(|word| word.count_ones() as usize).sum();
    let forbidden = words.len() * 32 - allowed;
    let form = if allowed.min(forbidden) * BYTES_PER_TOKEN >= size_of_val(words) {
        Form::Bits(pb::MaskBits { words: words.to_vec() })
    } else if allowed <= forbidden {
        Form::Allowed(list(words.iter().copied()))
    } else {
        Form::Forbidden(list(words.iter().map(|word| !word)))
    };
    pb::TokenMask { words: words.len() as u32, form: Some(form) }
}

/// The tokens whose bits are set.
fn list(words: impl Iterator<Item = u32>) -> pb::TokenList {
    let of_word = |(first, word): (u32, u32)| {
        (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first * 32 + bit)
    };
    pb::TokenList { tokens: (0..).zip(words).flat_map(of_word).collect() }
}

/// Decodes a mask. Returns the reason if the message is not valid.
pub(super) fn decode(message: pb::TokenMask) -> Result<TokenMask, String> {
    let pb::TokenMask { words, form } = message;
    if words > MAX_WORDS {
        return Err(format!("a mask of {words} words, but a mask has at most {MAX_WORDS}"));
    }
    let (rest, flipped) = match form {
        Some(Form::Bits(pb::MaskBits { words: bits })) if bits.len() == words as usize => {
            return Ok(TokenMask::new(bits));
        }
        Some(Form::Bits(bits)) => return Err(format!("{} words of a mask of {words}", bits.words.len())),
        Some(Form::Allowed(list)) => (0, list),
        Some(Form::Forbidden(list)) => (u32::MAX, list),
        None => return Err("a mask of no known form".to_owned()),
    };
    let mut bits = vec![rest; words as usize];
    for token in flipped.tokens {
        let word = bits.get_mut(token as usize / 32);
        *word.ok_or_else(|| format!("token {token} of a mask of {words} words"))? ^= 1 << (token % 32);
    }
    Ok(TokenMask::new(bits))
}
