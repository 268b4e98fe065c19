//! Log-mel frames of clips: the input of the audio encoder, from samples at 16 kHz.
//!
//! Reference: transformers `models/whisper/feature_extraction_whisper.py` and `audio_utils.py`. Paper: Radford et al.,
//! arXiv:2212.04356, §2.2. Everything is computed in f64.

use std::{f64::consts::TAU, ops::Range};

use super::fourier::Fourier;

/// Samples per second.
pub(crate) const RATE: u32 = 16_000;
/// Samples per window of a frame.
const WINDOW: usize = 400;
/// Samples from the start of a frame to the start of the next.
pub(crate) const HOP: usize = 160;
/// Fewest samples of a request's longest clip: the reflection at its ends needs them.
pub(crate) const SHORTEST: usize = WINDOW / 2 + 1;
/// Frequencies of a frame.
const FREQUENCIES: usize = WINDOW / 2 + 1;
/// Minimum power.
const FLOOR: f64 = 1e-10;
/// Range of a clip's logarithms of power below its maximum.
const RANGE: f64 = 8.0;

/// The log-mel frames of one clip, `[bins, frames]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mel {
    pub bins: usize,
    pub frames: usize,
    pub values: Vec<f32>,
}

impl Mel {
    /// Returns some frames, `[bins, width]`, padded with zeros behind the last.
    pub(super) fn padded(&self, frames: Range<usize>, width: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.bins * width);
        for bin in self.values.chunks_exact(self.frames) {
            out.extend_from_slice(&bin[frames.clone()]);
            out.resize(out.len() + width - frames.len(), 0.0);
        }
        out
    }
}

/// The filters of a number of bins, and the tables of the transform.
pub(crate) struct MelFilters {
    /// For each bin, its first frequency and its weights from there on.
    filters: Vec<(usize, Vec<f64>)>,
    window: Vec<f64>,
    transform: Fourier,
}

impl MelFilters {
    pub fn new(bins: usize) -> Self {
        let hann = |index: usize| 0.5 - 0.5 * (TAU * index as f64 / WINDOW as f64).cos();
        Self {
            filters: filters(bins),
            window: (0..WINDOW).map(hann).collect(),
            transform: Fourier::new(WINDOW),
        }
    }

    /// Returns the frames of all clips of a request. Clips are padded with zeros to the longest, so a clip may have a
    /// frame more than it would have alone. Returns `None` if the longest clip is shorter than half a window, which the
    /// reflection at its ends needs.
    pub fn frames(&self, clips: &[&[f32]]) -> Option<Vec<Mel>> {
        let longest = clips.iter().map(|clip| clip.len()).max()?;
        if longest < SHORTEST {
            return None;
        }
        let of_clip =
            |clip: &&[f32]| self.of_clip(clip, longest, clip.len().div_ceil(HOP).min(longest / HOP));
        Some(clips.iter().map(of_clip).collect())
    }

    /// Returns the first `kept` frames of a clip that is padded to `length` samples.
    fn of_clip(&self, clip: &[f32], length: usize, kept: usize) -> Mel {
        let bins = self.filters.len();
        let sample = |index: isize| {
            // Samples in front of the first one and behind the last one are reflected.
            let index = index.unsigned_abs();
            let index = if index < length { index } else { 2 * (length - 1) - index };
            clip.get(index).map_or(0.0, |sample| f64::from(*sample))
        };
        let (mut powers, mut most) = (vec![0.0; bins * kept], FLOOR.log10());
        for frame in 0..length / HOP {
            let first = (frame * HOP) as isize - (WINDOW / 2) as isize;
            // A frame behind the clip is silent, which is never the maximum.
            if first >= clip.len() as isize && frame >= kept {
                break;
            }
            let windowed: Vec<f64> =
                self.window.iter().zip(first..).map(|(weight, index)| weight * sample(index)).collect();
            let spectrum = self.transform.run(&windowed);
            let spectrum: Vec<f64> = spectrum[..FREQUENCIES]
                .iter()
                .map(|[real, imaginary]| real * real + imaginary * imaginary)
                .collect();
            for (bin, (first, weights)) in self.filters.iter().enumerate() {
                let power: f64 = weights.iter().zip(&spectrum[*first..]).map(|(weight, x)| weight * x).sum();
                let power = power.max(FLOOR).log10();
                most = most.max(power);
                if frame < kept {
                    powers[bin * kept + frame] = power;
                }
            }
        }
        let value = |power: f64| ((power.max(most - RANGE) + 4.0) / 4.0) as f32;
        Mel { bins, frames: kept, values: powers.into_iter().map(value).collect() }
    }
}

/// Returns triangular filters from 0 to 8,000 Hz on Slaney's scale, each of the same area.
fn filters(bins: usize) -> Vec<(usize, Vec<f64>)> {
    let highest = mel_of(f64::from(RATE) / 2.0);
    let edges: Vec<f64> =
        (0..bins + 2).map(|edge| hertz_of(highest * edge as f64 / (bins + 1) as f64)).collect();
    let filter = |edges: &[f64]| {
        let [low, centre, high] = [edges[0], edges[1], edges[2]];
        let weight = |frequency: usize| {
            let hertz = f64::from(RATE) / 2.0 * frequency as f64 / (FREQUENCIES - 1) as f64;
            let slope = ((hertz - low) / (centre - low)).min((high - hertz) / (high - centre));
            slope.max(0.0) * 2.0 / (high - low)
        };
        let weights: Vec<f64> = (0..FREQUENCIES).map(weight).collect();
        let first = weights.iter().position(|weight| *weight > 0.0).unwrap_or(0);
        let end = weights.iter().rposition(|weight| *weight > 0.0).map_or(first, |last| last + 1);
        (first, weights[first..end].to_vec())
    };
    edges.windows(3).map(filter).collect()
}

/// Frequency from which Slaney's scale is logarithmic.
const KNEE_HERTZ: f64 = 1000.0;
/// Place of that frequency on the scale.
const KNEE_MEL: f64 = 15.0;
/// Places per factor of 6.4 in frequency above it.
const MELS_PER_STEP: f64 = 27.0;

fn mel_of(hertz: f64) -> f64 {
    match hertz < KNEE_HERTZ {
        true => hertz * KNEE_MEL / KNEE_HERTZ,
        false => KNEE_MEL + (hertz / KNEE_HERTZ).ln() * MELS_PER_STEP / 6.4f64.ln(),
    }
}

fn hertz_of(mel: f64) -> f64 {
    match mel < KNEE_MEL {
        true => mel * KNEE_HERTZ / KNEE_MEL,
        false => KNEE_HERTZ * ((mel - KNEE_MEL) * 6.4f64.ln() / MELS_PER_STEP).exp(),
    }
}
