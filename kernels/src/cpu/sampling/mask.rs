//! Masks of logits.

use crate::TokenMask;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};

/// Sets the logits of tokens that a mask forbids to negative infinity. `logits` are those of the tokens from `first`
/// on.
pub(super) fn apply(path: Path, mask: &TokenMask, first: usize, logits: &mut [f32]) {
    path.run(Forbid { words: mask.words(), first, logits });
}

/// The masks of an operation's rows. A row behind the last mask, or without one, may take every token.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct RowMasks<'a>(pub(in crate::cpu) &'a [Option<&'a TokenMask>]);

impl<'a> RowMasks<'a> {
    /// The mask of a row.
    pub(in crate::cpu) fn of(self, row: usize) -> Option<&'a TokenMask> {
        self.0.get(row).copied().flatten()
    }

    /// Masks the logits of up to [`LANES`] tokens of a row, from token `first` on.
    #[inline(always)]
    pub(in crate::cpu) fn masked(self, row: usize, first: usize, logits: &[f32]) -> Masked {
        let Some(mask) = self.of(row) else { return Masked::All };
        let allowed = bits(mask.words(), first);
        if allowed == 0 {
            return Masked::Nothing;
        }
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for (lane, (masked, &logit)) in lanes.iter_mut().zip(logits).enumerate() {
            if allowed >> lane & 1 == 1 {
                *masked = logit;
            }
        }
        Masked::Some(lanes)
    }
}

/// The logits of up to [`LANES`] tokens behind a mask.
pub(in crate::cpu) enum Masked {
    /// The row may take all tokens.
    All,
    /// The row may take none of these tokens.
    Nothing,
    /// The logits, of which those of forbidden tokens, and lanes without a token, are negative infinity.
    Some([f32; LANES]),
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
