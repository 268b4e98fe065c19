//! Codes and scales of one matrix, computed row by row on all cores.
//!
//! Each scale is chosen by error: of several scales, a group or a row has the one with the smallest squared error.
//! Scales are rounded to the type that the file holds before codes are chosen.

use std::{
    num::NonZero,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tutti_kernels::{WeightType, e4m3};

use super::QuantiserScheme;
use crate::weights::{store, widen};

/// Number of codes of four bits per word.
pub(super) const PER_WORD: usize = 8;
/// The codes of four bits that the largest weight of a group may have, without their sign. Codes end at -8 and 7, so a
/// larger number clips the largest weights and leaves finer steps to the others.
const INT4_EXTREMES: [f32; 8] = [7.0, 7.3, 7.6, 8.0, 8.4, 6.6, 6.2, 5.8];
/// Likewise for eight bits.
const INT8_EXTREMES: [f32; 4] = [127.0, 127.4, 126.0, 128.5];
/// Likewise for e4m3. A row's error depends on where its weights lie between two powers of two.
const E4M3_EXTREMES: [f32; 5] = [448.0, 384.0, 320.0, 288.0, 256.0];
/// Rows per task.
const TASK_ROWS: usize = 16;

/// The error of the weights that codes stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CodeError {
    /// Sum of the squares of the differences.
    squares: f64,
    /// Sum of the squares of the weights.
    of_weights: f64,
    /// The largest difference.
    pub largest: f32,
}

impl CodeError {
    /// Root of the mean square of the differences, relative to that of the weights.
    pub fn relative(&self) -> f64 {
        if self.of_weights == 0.0 { 0.0 } else { (self.squares / self.of_weights).sqrt() }
    }

    /// Adds the error of other weights.
    pub fn add(&mut self, other: Self) {
        self.squares += other.squares;
        self.of_weights += other.of_weights;
        self.largest = self.largest.max(other.largest);
    }

    fn add_weight(&mut self, weight: f32, held: f32) {
        let difference = (weight - held).abs();
        self.squares += f64::from(difference).powi(2);
        self.of_weights += f64::from(weight).powi(2);
        self.largest = self.largest.max(difference);
    }
}

/// A quantised matrix, as a file holds it.
pub(super) struct Codes {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub error: CodeError,
}

/// Quantises a matrix with `columns` columns, whose elements of type `dtype` are `bytes`. Fails with the index of a row
/// that holds a number that is not finite.
pub(super) fn quantise(
    scheme: QuantiserScheme,
    bytes: &[u8],
    dtype: WeightType,
    columns: usize,
) -> Result<Codes, usize> {
    let row_bytes = columns * dtype.bytes();
    let rows = bytes.len().checked_div(row_bytes).unwrap_or(0);
    let (code_bytes, groups) = match scheme {
        QuantiserScheme::Int4 { group } => (columns.div_ceil(PER_WORD) * 4, columns / group),
        QuantiserScheme::Int8 | QuantiserScheme::Fp8 => (columns, 1),
    };
    let scale_bytes = groups * dtype.bytes();
    let (mut codes, mut scales) = (vec![0; rows * code_bytes], vec![0; rows * scale_bytes]);
    let parts = codes
        .chunks_mut((TASK_ROWS * code_bytes).max(1))
        .zip(scales.chunks_mut((TASK_ROWS * scale_bytes).max(1)));
    let tasks: Vec<_> = parts.map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let outcome = Mutex::new(Ok(CodeError::default()));
    let work = || {
        let mut weights = Vec::with_capacity(columns);
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(index) else { break };
            let (codes, scales) = &mut *task.lock().unwrap_or_else(PoisonError::into_inner);
            let mut error = CodeError::default();
            for (row, (codes, scales)) in
                codes.chunks_mut(code_bytes).zip(scales.chunks_mut(scale_bytes)).enumerate()
            {
                let row = index * TASK_ROWS + row;
                weights.clear();
                widen(&bytes[row * row_bytes..][..row_bytes], dtype, &mut weights);
                if weights.iter().any(|weight| !weight.is_finite()) {
                    *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(row);
                    return;
                }
                error.add(quantise_row(scheme, &weights, dtype, codes, scales));
            }
            if let Ok(sum) = &mut *outcome.lock().unwrap_or_else(PoisonError::into_inner) {
                sum.add(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(work);
        }
        work();
    });
    drop(tasks);
    let error = outcome.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    Ok(Codes { codes, scales, error })
}

/// Quantises a row into its bytes of codes and scales.
fn quantise_row(
    scheme: QuantiserScheme,
    weights: &[f32],
    dtype: WeightType,
    codes: &mut [u8],
    scales: &mut [u8],
) -> CodeError {
    let mut error = CodeError::default();
    match scheme {
        QuantiserScheme::Int4 { group } => {
            let nearest = |scaled: f32| scaled.round_ties_even().clamp(-8.0, 7.0);
            let groups = weights.chunks(group).zip(scales.chunks_exact_mut(dtype.bytes()));
            for (index, (weights, bytes)) in groups.enumerate() {
                let scale = best_scale(weights, &INT4_EXTREMES, dtype, nearest);
                store(scale, dtype, bytes);
                for (at, &weight) in weights.iter().enumerate() {
                    let code = nearest(weight / scale);
                    let at = index * group + at;
                    codes[at / 2] |= ((code + 8.0) as u8) << (at % 2 * 4);
                    error.add_weight(weight, code * scale);
                }
            }
        }
        QuantiserScheme::Int8 => {
            let nearest = |scaled: f32| scaled.round_ties_even().clamp(-128.0, 127.0);
            let scale = best_scale(weights, &INT8_EXTREMES, dtype, nearest);
            store(scale, dtype, scales);
            for (&weight, to) in weights.iter().zip(codes) {
                let code = nearest(weight / scale);
                *to = (code as i8).cast_unsigned();
                error.add_weight(weight, code * scale);
            }
        }
        QuantiserScheme::Fp8 => {
            let nearest = |scaled: f32| e4m3::value(e4m3::nearest(scaled));
            let scale = best_scale(weights, &E4M3_EXTREMES, dtype, nearest);
            store(scale, dtype, scales);
            for (&weight, to) in weights.iter().zip(codes) {
                *to = e4m3::nearest(weight / scale);
                error.add_weight(weight, e4m3::value(*to) * scale);
            }
        }
    }
    error
}

/// Returns the scale with the smallest squared error among those that give the largest weight one of the `extremes`.
/// `nearest` returns the number nearest to a scaled weight that a code stands for. The scale is never 0.
fn best_scale(weights: &[f32], extremes: &[f32], dtype: WeightType, nearest: impl Fn(f32) -> f32) -> f32 {
    let largest = weights.iter().fold(0f32, |largest, weight| largest.max(weight.abs()));
    let mut best: Option<(f32, f32)> = None;
    for extreme in extremes {
        let scale = rounded(largest / extreme, dtype);
        // A scale of 0 or infinity stands for weights that the type of scales is too narrow for.
        if scale < f32::MIN_POSITIVE || !scale.is_finite() {
            continue;
        }
        let error =
            weights.iter().map(|&weight| (weight - nearest(weight / scale) * scale).powi(2)).sum::<f32>();
        if best.is_none_or(|(least, _)| error < least) {
            best = Some((error, scale));
        }
    }
    best.map_or(1.0, |(_, scale)| scale)
}

/// Rounds a number to the nearest of a type.
fn rounded(value: f32, dtype: WeightType) -> f32 {
    let mut bytes = [0; 4];
    let bytes = &mut bytes[..dtype.bytes()];
    store(value, dtype, bytes);
    let mut held = Vec::with_capacity(1);
    widen(bytes, dtype, &mut held);
    held[0]
}
