//! Resampling of recordings: a low-pass filter in f64, a sinc under a Kaiser window, evaluated at the exact ratio of
//! the two rates.
//!
//! Up to 7/8 of half the lower rate, amplitudes stay within 0.1 dB. From half the lower rate on, what would be folded
//! back is below -80 dB. Equal rates pass samples on, to the bit.

use std::f64::consts::PI;

/// Part of half the lower rate at which the filter begins to fall.
const PASSED: f64 = 7.0 / 8.0;
/// Attenuation of the window in dB, with a margin.
const ATTENUATION: f64 = 90.0;
/// Kaiser's formula for the window's shape.
const BETA: f64 = 0.1102 * (ATTENUATION - 8.7);
/// Maximum number of positions between two samples at which the filter is evaluated: that of multiples of 11,025.
const MAX_PHASES: u64 = 640;
/// The rates that are taken.
const RATES: std::ops::RangeInclusive<u32> = 4000..=192_000;

/// Resamples a stream of samples.
pub struct Resampler {
    /// The step from one output to the next is `step / phases` inputs.
    step: u64,
    phases: u64,
    /// Inputs on each side of an output.
    half: usize,
    /// Weights of each phase, `2 * half` of them.
    weights: Vec<f64>,
    /// Inputs that further outputs need. The first stands for input `first - half`, with silence in front of input 0.
    window: Vec<f32>,
    first: u64,
    /// Number of inputs, and of outputs.
    taken: u64,
    given: u64,
}

impl Resampler {
    /// A resampler from one rate to another; `None` for rates that it does not take.
    pub fn new(from: u32, to: u32) -> Option<Self> {
        let divisor = gcd(u64::from(from), u64::from(to));
        let (step, phases) = (u64::from(from).checked_div(divisor)?, u64::from(to).checked_div(divisor)?);
        if !RATES.contains(&from) || !RATES.contains(&to) || phases > MAX_PHASES {
            return None;
        }
        if from == to {
            let (weights, window) = (Vec::new(), Vec::new());
            return Some(Self { step, phases, half: 0, weights, window, first: 0, taken: 0, given: 0 });
        }
        // Frequencies in cycles per input.
        let nyquist = f64::from(from.min(to)) / 2.0 / f64::from(from);
        let cutoff = nyquist * (1.0 + PASSED) / 2.0;
        let width = nyquist * (1.0 - PASSED);
        let taps = (ATTENUATION - 7.95) / (2.285 * 2.0 * PI * width);
        let half = (taps / 2.0).ceil() as usize + 1;
        let middle = bessel(BETA);
        let weight = |phase: u64, tap: usize| {
            // The distance in inputs from the output to the tap's input.
            let distance = tap as f64 - (half as f64 - 1.0) - phase as f64 / phases as f64;
            2.0 * cutoff * sinc(2.0 * cutoff * distance) * kaiser(distance / half as f64) / middle
        };
        let mut weights = Vec::with_capacity(phases as usize * 2 * half);
        for phase in 0..phases {
            let first = weights.len();
            weights.extend((0..2 * half).map(|tap| weight(phase, tap)));
            // Each phase passes a constant unchanged.
            let total: f64 = weights[first..].iter().sum();
            weights[first..].iter_mut().for_each(|weight| *weight /= total);
        }
        Some(Self { step, phases, half, weights, window: vec![0.0; half], first: 0, taken: 0, given: 0 })
    }

    /// Number of outputs of `inputs` inputs, rounded up.
    pub fn outputs(&self, inputs: u64) -> u64 {
        inputs.saturating_mul(self.phases).div_ceil(self.step)
    }

    /// Takes inputs, and appends the outputs that they complete.
    pub fn push(&mut self, inputs: &[f32], outputs: &mut Vec<f32>) {
        self.taken += inputs.len() as u64;
        if self.half == 0 {
            return outputs.extend_from_slice(inputs);
        }
        self.window.extend_from_slice(inputs);
        self.give(u64::MAX, outputs);
    }

    /// Appends the last outputs, with silence behind the inputs.
    pub fn finish(mut self, outputs: &mut Vec<f32>) {
        if self.half > 0 {
            let last = self.outputs(self.taken);
            self.window.extend(std::iter::repeat_n(0.0, self.half + 1));
            self.give(last, outputs);
        }
    }

    /// Appends outputs up to number `last` for which there are inputs.
    fn give(&mut self, last: u64, outputs: &mut Vec<f32>) {
        let taps = 2 * self.half;
        while self.given < last {
            let (input, phase) = (self.given * self.step / self.phases, self.given * self.step % self.phases);
            // The first tap is input - half + 1, and the window begins with input first - half.
            let start = (input + 1 - self.first) as usize;
            let Some(inputs) = self.window.get(start..start + taps) else { break };
            let weights = &self.weights[phase as usize * taps..][..taps];
            outputs.push(dot(weights, inputs) as f32);
            self.given += 1;
        }
        let next = self.given * self.step / self.phases;
        let past = ((next + 1).saturating_sub(self.first) as usize).min(self.window.len());
        self.window.drain(..past);
        self.first += past as u64;
    }
}

/// A product in eight sums, whose order is the same on all machines.
fn dot(weights: &[f64], inputs: &[f32]) -> f64 {
    let mut sums = [0.0; 8];
    let (weights, last_weights) = weights.as_chunks::<8>();
    let (inputs, last_inputs) = inputs.as_chunks::<8>();
    for (weights, inputs) in weights.iter().zip(inputs) {
        for lane in 0..8 {
            sums[lane] += weights[lane] * f64::from(inputs[lane]);
        }
    }
    let last = last_weights.iter().zip(last_inputs).map(|(weight, input)| weight * f64::from(*input));
    sums.iter().sum::<f64>() + last.sum::<f64>()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { (PI * x).sin() / (PI * x) }
}

/// Kaiser's window at `x` of its half width, times its value in the middle.
fn kaiser(x: f64) -> f64 {
    if x.abs() > 1.0 { 0.0 } else { bessel(BETA * (1.0 - x * x).sqrt()) }
}

/// The modified Bessel function of the first kind, order 0, as its series.
fn bessel(x: f64) -> f64 {
    let (mut term, mut sum) = (1.0, 1.0);
    for n in 1..64 {
        term *= (x / 2.0 / f64::from(n)).powi(2);
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests;
