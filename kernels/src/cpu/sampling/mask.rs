//! Masks of logits.

use crate::TokenMask;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Sets the logits of tokens that a mask forbids to negative infinity. `logits` are those of the tokens from `first`
/// on.
pub(super) fn apply(path: Path, mask: &TokenMask, first: usize, logits: &mut [f32]) {
    path.run(Forbid { words: mask.words(), first, logits });
}

struct Forbid<'a> {
    words: &'a [u32],
    first: usize,
    logits: &'a mut [f32],
}

impl Op for Forbid<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { words, first, logits } = self;
        for (index, chunk) in logits.chunks_mut(LANES).enumerate() {
            let allowed = bits(words, first + index * LANES);
            if allowed == u32::MAX >> (u32::BITS as usize - LANES) {
                continue;
            }
            for (lane, logit) in chunk.iter_mut().enumerate() {
                *logit = if allowed >> lane & 1 == 1 { *logit } else { f32::NEG_INFINITY };
            }
        }
    }
}

/// The next [`LANES`] bits from bit `first` on. Bits behind the last word are 0.
#[inline(always)]
fn bits(words: &[u32], first: usize) -> u32 {
    let word = |index: usize| u64::from(words.get(index).copied().unwrap_or(0));
    let pair = word(first / 32) | word(first / 32 + 1) << 32;
    (pair >> (first % 32)) as u32 & u32::MAX >> (u32::BITS as usize - LANES)
}
