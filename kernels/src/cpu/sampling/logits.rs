//! Statistics of a row of logits: the largest logit, log-softmax, ranks and the likeliest tokens.

use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd, exp};
use crate::device::sampler_preconditions as check;
use crate::{DeviceError, TokenScore};

/// Number of elements per chunk. A chunk is summed in f32, and the sums of chunks are added in f64. The number is
/// fixed, so that the order of every sum is fixed.
pub(in crate::cpu) const CHUNK: usize = 1024;

/// Returns the largest element, or an error if an element is NaN or the largest is not finite: no token may be sampled
/// from such logits.
pub(in crate::cpu) fn largest(path: Path, logits: &[f32]) -> Result<f32, DeviceError> {
    check_largest(path.run(Largest(logits)))
}

/// Returns the largest logit, or an error if it is not finite. `None` stands for a row with a NaN.
pub(in crate::cpu) fn check_largest(largest: Option<f32>) -> Result<f32, DeviceError> {
    match largest {
        Some(largest) if largest.is_finite() => Ok(largest),
        Some(largest) => Err(check::largest_is_infinite(largest)),
        None => Err(check::logit_is_nan()),
    }
}

/// Computes the largest element, or `None` if an element is NaN.
pub(in crate::cpu) struct Largest<'a>(pub(in crate::cpu) &'a [f32]);

impl Op for Largest<'_> {
    type Output = Option<f32>;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Option<f32> {
        let mut largest = s.splat(f32::NEG_INFINITY);
        let mut nan = false;
        for chunk in self.0.chunks(LANES) {
            let x = s.load_some(chunk, f32::NEG_INFINITY);
            nan |= s.any_nan(x);
            largest = s.max(x, largest);
        }
        (!nan).then(|| s.largest(largest))
    }
}

/// Computes `weights[i] = exp((logits[i] - largest) / temperature)`.
pub(in crate::cpu) struct Exponentials<'a> {
    pub(in crate::cpu) logits: &'a [f32],
    pub(in crate::cpu) largest: f32,
    pub(in crate::cpu) temperature: f32,
    pub(in crate::cpu) weights: &'a mut [f32],
}

impl Op for Exponentials<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (largest, temperature) = (s.splat(self.largest), s.splat(self.temperature));
        for (x, out) in self.logits.chunks(LANES).zip(self.weights.chunks_mut(LANES)) {
            let x = s.sub(s.load_some(x, f32::NEG_INFINITY), largest);
            s.store_some(out, exp(s, s.div(x, temperature)));
        }
    }
}

/// Computes the sum of one chunk, lane by lane and then over lanes.
pub(in crate::cpu) struct ChunkSum<'a>(pub(in crate::cpu) &'a [f32]);

impl Op for ChunkSum<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sum = s.splat(0.0);
        for x in self.0.chunks(LANES) {
            sum = s.add(sum, s.load_some(x, 0.0));
        }
        s.sum(sum)
    }
}

/// Computes the sum of `exp(logits[i] - largest)` over one chunk.
struct ExpSum<'a>(&'a [f32], f32);

impl Op for ExpSum<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sum = s.splat(0.0);
        for x in self.0.chunks(LANES) {
            let x = s.load_some(x, f32::NEG_INFINITY);
            sum = s.add(sum, exp(s, s.sub(x, s.splat(self.1))));
        }
        s.sum(sum)
    }
}

/// Collects the `count` largest elements with their indices, in descending order.
pub(in crate::cpu) struct Top<'a> {
    pub(in crate::cpu) logits: &'a [f32],
    pub(in crate::cpu) count: usize,
    pub(in crate::cpu) top: &'a mut Vec<(u32, f32)>,
}

impl Op for Top<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { logits, count, top } = self;
        if count == 0 {
            return;
        }
        for (index, chunk) in logits.chunks(LANES).enumerate() {
            let full = top.len() == count;
            let last = if full { top[count - 1].1 } else { f32::NEG_INFINITY };
            // Equal logits are ordered by ascending id. Once the list is full, a later logit therefore enters the list
            // only if it is larger than the list's last logit.
            if full && s.largest(s.load_some(chunk, f32::NEG_INFINITY)) <= last {
                continue;
            }
            for (lane, &logit) in chunk.iter().enumerate() {
                if top.len() == count && logit <= top[count - 1].1 {
                    continue;
                }
                top.truncate(count - 1);
                let rank = top.partition_point(|&(_, other)| other >= logit);
                top.insert(rank, ((index * LANES + lane) as u32, logit));
            }
        }
    }
}

/// Returns the log-probability and rank of `token` in the log-softmax of `logits`, and the `top` likeliest tokens.
pub(in crate::cpu) fn score(
    path: Path,
    logits: &[f32],
    token: u32,
    top: u32,
) -> Result<TokenScore, DeviceError> {
    check::scored_token(token, logits.len())?;
    let logit = logits[token as usize];
    let largest = largest(path, logits)?;
    let sum: f64 = logits.chunks(CHUNK).map(|chunk| f64::from(path.run(ExpSum(chunk, largest)))).sum();
    let normaliser = f64::from(largest) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
    let rank = 1 + logits.iter().filter(|&&other| other > logit).count() as u32;
    let count = (top as usize).min(logits.len());
    let mut likeliest = Vec::with_capacity(count);
    path.run(Top { logits, count, top: &mut likeliest });
    likeliest.iter_mut().for_each(|(_, value)| *value = logprob(*value));
    Ok(TokenScore { logprob: logprob(logit), rank, top: likeliest })
}

#[cfg(test)]
mod tests;
