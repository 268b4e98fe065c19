//! Hyper-connections: mixing of the streams of a row. Each row is computed alone, and each sum has one order.

use crate::cpu::memory::Shared;
use crate::cpu::rowwise::{each_row, rms_factor};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, HyperShape};

/// Number of outputs of a projection that are computed at once.
const OUTPUTS: usize = 4;

/// A projection of the streams.
#[derive(Clone, Copy)]
pub(super) struct Projection<'a> {
    /// `[outputs, streams * width]`.
    pub(super) weight: &'a [f32],
    pub(super) scale: &'a [f32],
    /// One per output.
    pub(super) base: &'a [f32],
}

/// Computes `out[t, i] = x[t]` for every stream `i`.
pub(super) fn spread(
    pool: &mut ThreadPool,
    x: &[f32],
    shape: HyperShape,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    each_row(pool, out, shape.width, |index, out| {
        out.copy_from_slice(&x[index / shape.streams * shape.width..][..shape.width]);
    })
}

/// Computes the mixes of a sublayer. `out` is `[rows, shape.mix_elements()]`.
pub(super) fn mix(
    path: Path,
    pool: &mut ThreadPool,
    streams: &[f32],
    projection: Projection<'_>,
    shape: HyperShape,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    let (elements, outputs) = (shape.stream_elements(), shape.mix_elements());
    project(path, pool, streams, projection.weight, (elements, outputs), out)?;
    let out = Shared::new(out);
    pool.run(streams.len() / elements, |row, _| {
        let x = &streams[row * elements..][..elements];
        // SAFETY: each row belongs to one task.
        let mixes = unsafe { out.slice_mut(row * outputs, outputs) };
        let factor = path.run(Factor { x, eps: shape.norm_eps });
        mixes.iter_mut().for_each(|m| *m *= factor);
        finish(mixes, projection, shape);
    })
}

/// Computes the products of each row with each output of a weight. A task is some outputs of one row.
fn project(
    path: Path,
    pool: &mut ThreadPool,
    streams: &[f32],
    weight: &[f32],
    (elements, outputs): (usize, usize),
    out: &mut [f32],
) -> Result<(), DeviceError> {
    let groups = outputs.div_ceil(OUTPUTS);
    let out = Shared::new(out);
    pool.run(streams.len() / elements * groups, |task, _| {
        let (row, first) = (task / groups, task % groups * OUTPUTS);
        let count = OUTPUTS.min(outputs - first);
        path.run(Products {
            x: &streams[row * elements..][..elements],
            weight: &weight[first * elements..][..count * elements],
            // SAFETY: each output of a row belongs to one task.
            out: unsafe { out.slice_mut(row * outputs + first, count) },
        });
    })
}

/// Products of one row with up to [`OUTPUTS`] outputs of a weight. A sum runs over blocks of sixteen elements, then
/// over lanes.
struct Products<'a> {
    x: &'a [f32],
    /// `[outputs, x.len()]`.
    weight: &'a [f32],
    out: &'a mut [f32],
}

impl Op for Products<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, weight, out } = self;
        // An output that is missing repeats the first one, and its result is dropped.
        let row = |output: usize| {
            let output = if output < out.len() { output } else { 0 };
            &weight[output * x.len()..][..x.len()]
        };
        let rows: [&[f32]; OUTPUTS] = std::array::from_fn(row);
        let mut sums = [s.splat(0.0); OUTPUTS];
        for (index, x) in x.chunks(LANES).enumerate() {
            let x = s.load_some(x, 0.0);
            for (sum, row) in sums.iter_mut().zip(&rows) {
                *sum = s.fma(s.load_some(&row[index * LANES..], 0.0), x, *sum);
            }
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = s.sum(sum));
    }
}

/// The factor of the norm of one row.
struct Factor<'a> {
    x: &'a [f32],
    eps: f32,
}

impl Op for Factor<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        rms_factor(s, self.x, self.eps)
    }
}

/// Turns the products of one row into mixes.
fn finish(mixes: &mut [f32], Projection { scale, base, .. }: Projection<'_>, shape: HyperShape) {
    let HyperShape { streams, eps, iterations, .. } = shape;
    for (index, (m, base)) in mixes.iter_mut().zip(base).enumerate() {
        let part = (index / streams).min(2);
        let x = *m * scale[part] + base;
        *m = match part {
            0 => sigmoid(x) + eps,
            1 => 2.0 * sigmoid(x),
            _ => x,
        };
    }
    let combination = &mut mixes[2 * streams..];
    for row in combination.chunks_exact_mut(streams) {
        let largest = row.iter().fold(f32::NEG_INFINITY, |largest, &x| if x > largest { x } else { largest });
        row.iter_mut().for_each(|x| *x = (*x - largest).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + eps);
    }
    divide_columns(combination, streams, eps);
    for _ in 1..iterations {
        for row in combination.chunks_exact_mut(streams) {
            let sum = row.iter().sum::<f32>() + eps;
            row.iter_mut().for_each(|x| *x /= sum);
        }
        divide_columns(combination, streams, eps);
    }
}

/// Divides each column of a square matrix by its sum plus `eps`.
fn divide_columns(matrix: &mut [f32], columns: usize, eps: f32) {
    for column in 0..columns {
        let sum = matrix.iter().skip(column).step_by(columns).sum::<f32>() + eps;
        matrix.iter_mut().skip(column).step_by(columns).for_each(|x| *x /= sum);
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Computes `out = Σ weights[i] * streams[i]`, row by row. `weights` has `stride` elements per row, of which the first
/// are those of the streams.
pub(super) fn collapse(
    path: Path,
    pool: &mut ThreadPool,
    streams: &[f32],
    (weights, stride): (&[f32], usize),
    shape: HyperShape,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    each_row(pool, out, shape.width, |row, out| {
        let streams = &streams[row * shape.stream_elements()..][..shape.stream_elements()];
        path.run(Collapse { streams, weights: &weights[row * stride..][..shape.streams], out });
    })
}

/// The weighted sum of the streams of one row.
struct Collapse<'a> {
    /// `[streams, width]`.
    streams: &'a [f32],
    weights: &'a [f32],
    out: &'a mut [f32],
}

impl Op for Collapse<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { streams, weights, out } = self;
        let width = out.len();
        for (block, out) in out.chunks_mut(LANES).enumerate() {
            let mut sum = s.splat(0.0);
            for (stream, &weight) in streams.chunks_exact(width).zip(weights) {
                sum = s.fma(s.splat(weight), s.load_some(&stream[block * LANES..], 0.0), sum);
            }
            s.store_some(out, sum);
        }
    }
}

/// Computes `streams'[k] = post[k] * y + Σ_j combination[j, k] * streams[j]`, row by row.
pub(super) fn combine(
    path: Path,
    pool: &mut ThreadPool,
    y: &[f32],
    mixes: &[f32],
    shape: HyperShape,
    streams: &mut [f32],
) -> Result<(), DeviceError> {
    each_row(pool, streams, shape.stream_elements(), |row, streams| {
        let mixes = &mixes[row * shape.mix_elements()..][..shape.mix_elements()];
        path.run(Combine { y: &y[row * shape.width..][..shape.width], mixes, count: shape.streams, streams });
    })
}

/// The streams of one row behind a sublayer.
struct Combine<'a> {
    y: &'a [f32],
    mixes: &'a [f32],
    /// Number of streams, at most [`HyperShape::MAX_STREAMS`].
    count: usize,
    /// `[streams, width]`.
    streams: &'a mut [f32],
}

impl Op for Combine<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { y, mixes, count, streams } = self;
        let (width, post) = (y.len(), &mixes[count..2 * count]);
        let combination = &mixes[2 * count..];
        for (block, y) in y.chunks(LANES).enumerate() {
            let (first, end) = (block * LANES, width.min((block + 1) * LANES));
            let y = s.load_some(y, 0.0);
            let mut old = [s.splat(0.0); HyperShape::MAX_STREAMS];
            for (old, stream) in old.iter_mut().zip(streams.chunks_exact(width)) {
                *old = s.load_some(&stream[first..end], 0.0);
            }
            for (k, stream) in streams.chunks_exact_mut(width).enumerate() {
                let mut sum = s.mul(s.splat(post[k]), y);
                for (j, &old) in old.iter().enumerate().take(count) {
                    sum = s.fma(s.splat(combination[j * count + k]), old, sum);
                }
                s.store_some(&mut stream[first..end], sum);
            }
        }
    }
}

/// Computes `out = Σ w[i] * streams[i]` with weights from a projection, row by row.
pub(super) fn head(
    path: Path,
    pool: &mut ThreadPool,
    streams: &[f32],
    projection: Projection<'_>,
    shape: HyperShape,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    let Projection { weight, scale, base } = projection;
    let elements = shape.stream_elements();
    let out = Shared::new(out);
    pool.run(streams.len() / elements, |row, _| {
        let streams = &streams[row * elements..][..elements];
        let mut weights = [0.0; HyperShape::MAX_STREAMS];
        let weights = &mut weights[..shape.streams];
        for (outputs, weight) in weights.chunks_mut(OUTPUTS).zip(weight.chunks(OUTPUTS * elements)) {
            path.run(Products { x: streams, weight, out: outputs });
        }
        let factor = path.run(Factor { x: streams, eps: shape.norm_eps });
        for (m, base) in weights.iter_mut().zip(base) {
            *m = sigmoid(*m * factor * scale[0] + base) + shape.eps;
        }
        // SAFETY: each row belongs to one task.
        let out = unsafe { out.slice_mut(row * shape.width, shape.width) };
        path.run(Collapse { streams, weights, out });
    })
}
