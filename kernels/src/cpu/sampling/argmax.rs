//! The arg max of each row of logits, computed while the logits are computed. A request that needs only the likeliest
//! token has no other use for the logits.
//!
//! Each thread keeps the best token that it has seen. The assignment of tokens to threads does not affect the result:
//! among equal logits, the lowest token id wins.

use crate::cpu::memory::Shared;
use crate::cpu::sampling::mask::{Masked, RowMasks};
use crate::cpu::simd::{LANES, Op, Simd};
use crate::device::sampler_preconditions as check;
use crate::{DeviceError, Sampled};

/// The best token that a thread has seen in a row of logits.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Best {
    logit: f32,
    token: u32,
    /// True if a logit was NaN.
    nan: bool,
}

/// The initial value, before a thread has seen a logit.
const NOTHING: Best = Best { logit: f32::NEG_INFINITY, token: u32::MAX, nan: false };

impl Best {
    /// Replaces this with `other` if `other` has a larger logit, or an equal logit and a lower token id.
    #[inline(always)]
    fn merge(&mut self, other: Self) {
        let nan = self.nan | other.nan;
        if other.logit > self.logit || (other.logit == self.logit && other.token < self.token) {
            *self = other;
        }
        self.nan = nan;
    }

    /// Returns the token. Fails if a logit was NaN or the largest logit is not finite. `masked` says that the row has a
    /// mask.
    pub(in crate::cpu) fn token(self, masked: bool) -> Result<Sampled, DeviceError> {
        if self.nan {
            return Err(check::logit_is_nan());
        }
        if masked && self.logit == f32::NEG_INFINITY {
            return Err(check::no_token_left());
        }
        if !self.logit.is_finite() {
            return Err(check::largest_is_infinite(self.logit));
        }
        Ok(Sampled { token: self.token, score: None })
    }

    /// Returns the logit and the token id, which is `first` plus the token's index.
    pub(in crate::cpu) fn candidate(self, first: usize) -> [f32; 2] {
        let logit = if self.nan { f32::NAN } else { self.logit };
        // If no logit is above negative infinity, there is no token, and the candidate's logit makes the row fail.
        let token = if self.token == u32::MAX { 0 } else { first as u32 + self.token };
        [logit, token as f32]
    }
}

/// The best token of every row per thread, `[threads, rows]`, among those that the row's mask allows.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct PartialArgmax<'a> {
    best: &'a Shared<'a, Best>,
    rows: usize,
    masks: RowMasks<'a>,
}

impl<'a> PartialArgmax<'a> {
    /// Wraps a list that [`clear`] made for `rows` rows.
    pub(in crate::cpu) fn new(best: &'a Shared<'a, Best>, rows: usize, masks: RowMasks<'a>) -> Self {
        Self { best, rows, masks }
    }
}

/// Resets the list to `threads` times `rows` initial values.
pub(in crate::cpu) fn clear(best: &mut Vec<Best>, threads: usize, rows: usize) {
    best.clear();
    best.resize(threads * rows, NOTHING);
}

/// Returns the best token of a row over all threads.
pub(in crate::cpu) fn merged(best: &[Best], rows: usize, row: usize) -> Best {
    let mut all = NOTHING;
    best.iter().skip(row).step_by(rows).for_each(|best| all.merge(*best));
    all
}

/// Returns the best of a row's candidates, each a logit and a token id.
pub(in crate::cpu) fn best_of(candidates: &[[f32; 2]]) -> Best {
    let mut all = NOTHING;
    for &[logit, token] in candidates {
        all.merge(Best { logit, token: token as u32, nan: logit.is_nan() });
    }
    all
}

/// Updates a thread's best token of a row with the logits of up to sixteen tokens from `first` on.
pub(in crate::cpu) struct UpdateArgmax<'a> {
    pub(in crate::cpu) partial: PartialArgmax<'a>,
    pub(in crate::cpu) thread: usize,
    pub(in crate::cpu) row: usize,
    pub(in crate::cpu) first: usize,
    /// The logits, at most sixteen.
    pub(in crate::cpu) logits: &'a [f32],
}

impl Op for UpdateArgmax<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { partial, thread, row, first, logits } = self;
        // SAFETY: each thread has its own range of `partial.best`, so no other thread accesses this element.
        let best = unsafe { &mut partial.best.slice_mut(thread * partial.rows + row, 1)[0] };
        let lanes = s.load_some(logits, f32::NEG_INFINITY);
        // `best` is written only if it changes, since the ranges of two threads may share a cache line.
        if s.any_nan(lanes) {
            best.nan = true;
            return;
        }
        let masked = partial.masks.masked(row, first, logits);
        let (logits, lanes) = match &masked {
            Masked::All => (logits, lanes),
            Masked::Nothing => return,
            Masked::Some(masked) => (&masked[..], s.load_some(masked, f32::NEG_INFINITY)),
        };
        let largest = s.largest(lanes);
        if largest < best.logit {
            return;
        }
        let lane = logits.iter().take(LANES).position(|&logit| logit == largest);
        let token = (first + lane.unwrap_or(0)) as u32;
        best.merge(Best { logit: largest, token, nan: false });
    }
}
