//! Candidates of a row of logits that is divided among the ranks of a TP group, and sampling from them.
//!
//! Each rank [adjusts](adjust) its logits and learns the largest logit of the whole row, so that the weights by which
//! [truncation](super::truncate) orders tokens are the same on all ranks. A rank then [nominates](nominate) its best
//! tokens, with their logits. Truncation keeps at most `top_k` tokens, and each of them is among its own rank's
//! nominated tokens. [`sample`] repeats the whole row's computation on the candidates: every sum adds the same numbers
//! in the same order, because tokens that truncation excludes have the weight 0. The token is therefore the one that
//! [`sample`](super::sample::sample) returns for the whole row.

use crate::cpu::sampling::logits::{CHUNK, Exponentials, Largest, Top, check_largest};
use crate::cpu::sampling::mask;
use crate::cpu::sampling::sample::{Scratch, count_penalised, invert, repetition_penalised, truncate};
use crate::cpu::simd::isa::Path;
use crate::device::sampler_preconditions as check;
use crate::{Adjustments, DeviceError, Nomination, SampleRow, Sampled};

/// An entry without a candidate in a list of candidates. Its token id is invalid.
const NO_CANDIDATE: [f32; 2] = [f32::NEG_INFINITY, -1.0];

/// The largest logit of a row before adjustments, and the largest after them. NaN if any logit is NaN.
pub(in crate::cpu) type Peaks = [f32; 2];

/// Applies mask, bias, forbidden tokens and penalties to the logits of the tokens from `first` on. Returns their peaks.
pub(in crate::cpu) fn adjust(path: Path, logits: &mut [f32], nomination: &Nomination, first: usize) -> Peaks {
    let peak = |logits: &[f32]| path.run(Largest(logits)).unwrap_or(f32::NAN);
    let raw = peak(logits);
    let Some(adjustments) = &nomination.adjustments else { return [raw, raw] };
    apply(path, adjustments, logits, first);
    [raw, peak(logits)]
}

fn apply(path: Path, adjustments: &Adjustments, logits: &mut [f32], first: usize) {
    let tokens = logits.len();
    if let Some(allowed) = &adjustments.allowed {
        mask::apply(path, allowed, first, logits);
    }
    // Tokens of other ranks are skipped, because their ranks adjust them.
    let own = |token: u32| (token as usize).checked_sub(first).filter(|index| *index < tokens);
    for (index, bias) in adjustments.bias.iter().filter_map(|&(token, bias)| Some((own(token)?, bias))) {
        logits[index] += bias;
    }
    for index in adjustments.forbidden.iter().filter_map(|&token| own(token)) {
        logits[index] = f32::NEG_INFINITY;
    }
    for index in adjustments.repeated.iter().filter_map(|&token| own(token)) {
        logits[index] = repetition_penalised(logits[index], adjustments.repetition_penalty);
    }
    let (frequency, presence) = (adjustments.frequency_penalty, adjustments.presence_penalty);
    for (index, count) in adjustments.counted.iter().filter_map(|&(token, count)| Some((own(token)?, count)))
    {
        logits[index] = count_penalised(logits[index], frequency, presence, count);
    }
}

/// Fills `out` with the best tokens in order, each as a logit and a token id. `logits` are the adjusted logits of the
/// tokens from `first` on. `peaks` are the peaks of the whole row.
pub(in crate::cpu) fn nominate(
    path: Path,
    logits: &[f32],
    nomination: &Nomination,
    (first, peaks): (usize, Peaks),
    scratch: &mut Scratch,
    out: &mut [[f32; 2]],
) {
    let Scratch { weights, top, .. } = scratch;
    let values = if nomination.draws() {
        weights.clear();
        weights.resize(logits.len(), 0.0);
        let temperature = nomination.temperature;
        path.run(Exponentials { logits, largest: peaks[1], temperature, weights });
        &weights[..]
    } else {
        logits
    };
    top.clear();
    let count = (nomination.count as usize).min(values.len()).min(out.len());
    path.run(Top { logits: values, count, top: &mut *top });
    out.fill(NO_CANDIDATE);
    for (out, &(index, _)) in out.iter_mut().zip(top.iter()) {
        *out = [logits[index as usize], (first + index as usize) as f32];
    }
}

/// Samples one token of a vocabulary from the candidates of all ranks. `peaks` are the peaks of the whole row.
pub(in crate::cpu) fn sample(
    path: Path,
    candidates: &[[f32; 2]],
    (vocabulary, peaks): (usize, Peaks),
    row: &SampleRow<'_>,
    scratch: &mut Scratch,
) -> Result<Sampled, DeviceError> {
    let some = |peak: f32| (!peak.is_nan()).then_some(peak);
    let mut highest = check_largest(some(peaks[0]))?;
    if row.adjusts() {
        check::adjusted_tokens(row, vocabulary)?;
        highest = check_largest(some(peaks[1])).map_err(|_| check::no_token_left())?;
    }
    let mut by_token: Vec<(u32, f32)> = candidates
        .iter()
        .filter(|[_, token]| *token >= 0.0)
        .map(|&[logit, token]| (token as u32, logit))
        .collect();
    by_token.sort_unstable_by_key(|&(token, _)| token);
    let token = if row.params.temperature > 0.0 {
        draw(path, &by_token, highest, row, scratch)
    } else {
        by_token.iter().find(|(_, logit)| *logit == highest).map(|(token, _)| *token)
    };
    let token = token.ok_or_else(|| DeviceError::NotFinite("no token has any probability".to_owned()))?;
    Ok(Sampled { token, score: None })
}

fn draw(
    path: Path,
    by_token: &[(u32, f32)],
    largest: f32,
    row: &SampleRow<'_>,
    scratch: &mut Scratch,
) -> Option<u32> {
    let Scratch { logits: chunks, weights, truncate: memory, .. } = scratch;
    let logits: Vec<f32> = by_token.iter().map(|&(_, logit)| logit).collect();
    weights.clear();
    weights.resize(logits.len(), 0.0);
    path.run(Exponentials { logits: &logits, largest, temperature: row.params.temperature, weights });
    truncate(row, weights, memory);
    // Rebuilds those chunks of the whole row that have a weight above 0. Each weight is at its token's index in the
    // chunk.
    chunks.clear();
    let mut indices: Vec<usize> = Vec::new();
    for (&(token, _), &weight) in by_token.iter().zip(weights.iter()).filter(|(_, weight)| **weight > 0.0) {
        let (chunk, offset) = (token as usize / CHUNK, token as usize % CHUNK);
        if indices.last() != Some(&chunk) {
            indices.push(chunk);
            chunks.resize(indices.len() * CHUNK, 0.0);
        }
        let begin = chunks.len() - CHUNK;
        chunks[begin + offset] = weight;
    }
    invert(path, row, indices.iter().copied().zip(chunks.chunks(CHUNK)))
}
