//! The largest logit of each row, found while logits are computed: nobody else needs them where nothing but the likeliest
//! token is asked for.
//!
//! Each thread keeps the best of what it has seen. Which thread sees what does not matter: of equal logits the lowest
//! token wins, wherever it was found.

use crate::cpu::memory::Shared;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::{DeviceError, Sampled};

/// The best that a thread has seen of a row.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Best {
    logit: f32,
    token: u32,
    /// Whether a logit was not a number.
    nan: bool,
}

/// Before anything is seen.
const NOTHING: Best = Best { logit: f32::NEG_INFINITY, token: u32::MAX, nan: false };

impl Best {
    /// Takes the other's place where it is better, or as good and earlier.
    #[inline(always)]
    fn meet(&mut self, other: Self) {
        let nan = self.nan | other.nan;
        if other.logit > self.logit || (other.logit == self.logit && other.token < self.token) {
            *self = other;
        }
        self.nan = nan;
    }
}

/// What every thread has seen of every row, `[threads, rows]`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct PartialArgmax<'a> {
    best: &'a Shared<'a, Best>,
    rows: usize,
}

impl<'a> PartialArgmax<'a> {
    /// Of a `best` that [`clear`] made for so many rows.
    pub(in crate::cpu) fn new(best: &'a Shared<'a, Best>, rows: usize) -> Self {
        Self { best, rows }
    }
}

/// Makes room for what so many threads see of so many rows.
pub(in crate::cpu) fn clear(best: &mut Vec<Best>, threads: usize, rows: usize) {
    best.clear();
    best.resize(threads * rows, NOTHING);
}

/// Appends each row's token; an error where logits are not what a working device computes.
pub(in crate::cpu) fn decide(best: &[Best], rows: usize, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
    for row in 0..rows {
        let mut all = NOTHING;
        best.iter().skip(row).step_by(rows).for_each(|best| all.meet(*best));
        if all.nan {
            return Err(DeviceError::Lost("a logit is not a number".to_owned()));
        }
        if !all.logit.is_finite() {
            return Err(DeviceError::Lost(format!("the largest logit is {}", all.logit)));
        }
        out.push(Sampled { token: all.token, score: None });
    }
    Ok(())
}

/// Some logits of a row, of the tokens from `first` on, as a thread sees them.
pub(in crate::cpu) struct UpdateArgmax<'a> {
    pub(in crate::cpu) partial: PartialArgmax<'a>,
    pub(in crate::cpu) thread: usize,
    pub(in crate::cpu) row: usize,
    pub(in crate::cpu) first: usize,
    /// At most sixteen.
    pub(in crate::cpu) logits: &'a [f32],
}

impl Op for UpdateArgmax<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { partial, thread, row, first, logits } = self;
        // SAFETY: each thread has a part of its own.
        let best = unsafe { &mut partial.best.slice_mut(thread * partial.rows + row, 1)[0] };
        let lanes = s.load_some(logits, f32::NEG_INFINITY);
        // Written to only where something changes: threads' parts may share a cache line.
        if s.any_nan(lanes) {
            best.nan = true;
            return;
        }
        let largest = s.largest(lanes);
        if largest < best.logit {
            return;
        }
        let lane = logits.iter().take(LANES).position(|&logit| logit == largest);
        let token = (first + lane.unwrap_or(0)) as u32;
        best.meet(Best { logit: largest, token, nan: false });
    }
}
