//! Sampling: from a row of logits to a token.
//!
//! The order is vLLM's: mask, logit bias, forbidden tokens, repetition, frequency and presence penalties. Then, at
//! temperature 0, the likeliest token is taken. At other temperatures, division by the temperature, min-p, top-k, top-p
//! and one draw follow. The draw uses the random number of (seed, position). The draw inverts the distribution function
//! over ascending token ids. The sums of this function have a fixed order, so the same row always gives the same token.

use crate::cpu::sampling::logits::{CHUNK, ChunkSum, Exponentials, largest, score};
use crate::cpu::sampling::mask;
use crate::cpu::sampling::philox::uniform;
use crate::cpu::sampling::truncate::{self, cut};
use crate::cpu::simd::isa::Path;
use crate::device::sampler_preconditions as check;
use crate::{DeviceError, SampleRow, Sampled};

/// Memory that one thread's sampling reuses from call to call.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    /// Logits with bias and penalties, `[vocabulary]`. When a row is sampled from candidates, this buffer holds weights
    /// instead: those chunks of the vocabulary that have a weight above 0.
    pub(super) logits: Vec<f32>,
    /// Unnormalised probabilities, `[vocabulary]`.
    pub(super) weights: Vec<f32>,
    /// Number of occurrences of each token in the output, `[vocabulary]`. All zero between calls.
    counts: Vec<u32>,
    pub(super) truncate: truncate::Scratch,
    /// Best tokens of a rank, at most as many as a nomination requests.
    pub(super) top: Vec<(u32, f32)>,
}

impl Scratch {
    /// Maximum size in bytes for a vocabulary of `vocabulary` tokens.
    pub(in crate::cpu) fn bytes(vocabulary: usize) -> usize {
        vocabulary * (2 * size_of::<f32>() + size_of::<u32>()) + truncate::Scratch::bytes(vocabulary)
    }
}

/// Samples one token.
pub(in crate::cpu) fn sample(
    path: Path,
    raw: &[f32],
    row: &SampleRow<'_>,
    scratch: &mut Scratch,
) -> Result<Sampled, DeviceError> {
    let mut highest = largest(path, raw)?;
    let adjusted = row.adjusts();
    if adjusted {
        scratch.logits.clear();
        scratch.logits.extend_from_slice(raw);
        adjust(path, row, &mut scratch.logits, &mut scratch.counts)?;
        highest = largest(path, &scratch.logits).map_err(|_| check::no_token_left())?;
    }
    let Scratch { logits, weights, truncate, .. } = scratch;
    let logits = if adjusted { &logits[..] } else { raw };
    let token = if row.params.temperature > 0.0 {
        weights.clear();
        weights.resize(logits.len(), 0.0);
        path.run(Exponentials { logits, largest: highest, temperature: row.params.temperature, weights });
        draw(path, row, weights, truncate)
    } else {
        logits.iter().position(|&logit| logit == highest).map(|id| id as u32)
    };
    let token = token.ok_or_else(|| DeviceError::NotFinite("no token has any probability".to_owned()))?;
    let score = row.logprobs.map(|top| score(path, raw, token, top)).transpose()?;
    Ok(Sampled { token, score })
}

/// Applies mask, bias, forbidden tokens and penalties. A logit that the mask forbids stays negative infinity.
fn adjust(
    path: Path,
    row: &SampleRow<'_>,
    logits: &mut [f32],
    counts: &mut Vec<u32>,
) -> Result<(), DeviceError> {
    check::adjusted_tokens(row, logits.len())?;
    if let Some(allowed) = row.allowed {
        mask::apply(path, allowed, 0, logits);
    }
    for bias in &row.params.logit_bias {
        logits[bias.token_id as usize] += bias.bias;
    }
    for &token in row.forbidden {
        logits[token as usize] = f32::NEG_INFINITY;
    }
    penalise(row, logits, counts);
    Ok(())
}

/// Returns the logit of a token that has occurred, after the repetition penalty.
pub(super) fn repetition_penalised(logit: f32, penalty: f32) -> f32 {
    if logit > 0.0 { logit / penalty } else { logit * penalty }
}

/// Returns the logit of a token that has occurred `count` times in the output, after the frequency and presence
/// penalties.
pub(super) fn count_penalised(logit: f32, frequency: f32, presence: f32, count: u32) -> f32 {
    logit - (frequency * count as f32 + presence)
}

/// Applies the repetition penalty once per token that has occurred, and the presence and frequency penalties to tokens
/// of the output.
fn penalise(row: &SampleRow<'_>, logits: &mut [f32], counts: &mut Vec<u32>) {
    let params = row.params;
    counts.resize(logits.len(), 0);
    // The highest bit marks tokens whose repetition penalty has been applied.
    const SEEN: u32 = 1 << 31;
    if params.repetition_penalty != 1.0 {
        for &token in row.prompt.iter().chain(row.output) {
            let (logit, count) = (&mut logits[token as usize], &mut counts[token as usize]);
            if *count & SEEN == 0 {
                *count |= SEEN;
                *logit = repetition_penalised(*logit, params.repetition_penalty);
            }
        }
    }
    if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
        row.output.iter().for_each(|&token| counts[token as usize] += 1);
        for &token in row.output {
            let count = counts[token as usize] & !SEEN;
            if count > 0 {
                let logit = &mut logits[token as usize];
                *logit = count_penalised(*logit, params.frequency_penalty, params.presence_penalty, count);
                counts[token as usize] = 0;
            }
        }
    }
    row.prompt.iter().chain(row.output).for_each(|&token| counts[token as usize] = 0);
}

/// Sets the weights that min-p, top-k and top-p exclude to 0, and draws a token by the remaining weights. The largest
/// weight is 1.
fn draw(
    path: Path,
    row: &SampleRow<'_>,
    weights: &mut [f32],
    scratch: &mut truncate::Scratch,
) -> Option<u32> {
    truncate(row, weights, scratch);
    invert(path, row, weights.chunks(CHUNK).enumerate())
}

/// Sets the weights that min-p, top-k and top-p exclude to 0.
pub(super) fn truncate(row: &SampleRow<'_>, weights: &mut [f32], scratch: &mut truncate::Scratch) {
    let params = row.params;
    if params.min_p > 0.0 {
        // The bound is at most 1, so the largest weight stays even if min_p is above 1.
        let least = params.min_p.min(1.0);
        weights.iter_mut().filter(|weight| **weight < least).for_each(|weight| *weight = 0.0);
    }
    let truncates = params.top_k > 0 || params.top_p < 1.0;
    if let Some(cut) = truncates.then(|| cut(weights, params.top_k as usize, params.top_p, scratch)).flatten()
    {
        for (id, weight) in (0u32..).zip(weights.iter_mut()) {
            if !cut.keeps(*weight, id) {
                *weight = 0.0;
            }
        }
    }
}

/// Draws a token by weights. `chunks` are the chunks of weights with their indices, ascending; chunks without a weight
/// above 0 may be missing.
pub(super) fn invert<'a>(
    path: Path,
    row: &SampleRow<'_>,
    chunks: impl Iterator<Item = (usize, &'a [f32])> + Clone,
) -> Option<u32> {
    let sum = |chunk| f64::from(path.run(ChunkSum(chunk)));
    let total: f64 = chunks.clone().map(|(_, chunk)| sum(chunk)).sum();
    let target = uniform(row.params.seed, row.position) * total;
    let mut below = 0.0;
    let mut last = None;
    for (index, chunk) in chunks {
        let here = sum(chunk);
        if below + here <= target {
            // Because of rounding, the target may lie just beyond the sum of all chunks. The last chunk with a weight
            // above 0 is remembered for that case.
            if here > 0.0 {
                last = Some((index, chunk));
            }
            below += here;
            continue;
        }
        last = Some((index, chunk));
        let mut reached = below;
        for (id, &weight) in chunk.iter().enumerate() {
            reached += f64::from(weight);
            if weight > 0.0 && reached > target {
                return Some((index * CHUNK + id) as u32);
            }
        }
        break;
    }
    // No element has reached the target, because of rounding, so the last candidate of chunk `last` is drawn.
    let (index, chunk) = last?;
    chunk.iter().rposition(|&weight| weight > 0.0).map(|id| (index * CHUNK + id) as u32)
}
