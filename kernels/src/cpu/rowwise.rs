//! Operations on single tokens: embedding, addition, rotary angles, norms and the gated activation.

use crate::cpu::memory::Shared;
use crate::cpu::memory::format::{Format, STEP, with_format};
use crate::cpu::memory::matrix::Elements;
use crate::cpu::memory::weights::Weights;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd, exp};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, RopeFrequencies};

/// Minimum number of elements per task, below which waking another thread costs more than it saves.
pub(super) const TASK_ELEMENTS: usize = 8 << 10;

/// Calls `f` for each row of `out`, which is `width` wide, in parallel.
pub(super) fn each_row(
    pool: &mut ThreadPool,
    out: &mut [f32],
    width: usize,
    f: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(), DeviceError> {
    let rows = out.len() / width.max(1);
    let share = (TASK_ELEMENTS / width.max(1)).max(1);
    let out = Shared::new(out);
    pool.run(rows.div_ceil(share), |task, _| {
        for row in task * share..rows.min((task + 1) * share) {
            // SAFETY: each row belongs to one task, so no other task accesses the row.
            f(row, unsafe { out.slice_mut(row * width, width) });
        }
    })
}

/// Computes `out[t] = table[ids[t] - first]`. `table` holds the rows from `first` on of a table of `vocabulary` rows.
/// The result is zeros for an id whose row `table` does not hold. A look-up gives the weights of the checkpoint, unless
/// they were quantised to eight bits.
pub(super) fn embed(
    path: Path,
    pool: &mut ThreadPool,
    table: &Weights,
    first: usize,
    vocabulary: usize,
    ids: &[u32],
    out: &mut [f32],
) -> Result<(), DeviceError> {
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        return Err(DeviceError::Misuse(format!("token id {id} of a table of {vocabulary}")));
    }
    let outputs = table.plain_outputs()?;
    let held = |row: usize| (ids[row] as usize).checked_sub(first).filter(|&id| id < outputs);
    match table {
        Weights::Int8(table) => each_row(pool, out, table.shape.inputs, |row, out| match held(row) {
            Some(id) => table.read_row(path, id, out),
            None => out.fill(0.0),
        }),
        Weights::Grouped(table) => each_row(pool, out, table.shape.inputs, |row, out| match held(row) {
            Some(id) => table.read_row(id, out),
            None => out.fill(0.0),
        }),
        Weights::Stored(table) => match &table.data {
            Elements::BlockFloat(data) => {
                let Some(corrections) = &table.corrections else {
                    let why = "a matrix of rounded weights, where a table of embeddings is wanted";
                    return Err(DeviceError::Misuse(why.to_owned()));
                };
                each_row(pool, out, table.shape.inputs, |row, out| match held(row) {
                    Some(id) => {
                        data.read_row(id, out);
                        corrections.apply(id, out);
                    }
                    None => out.fill(0.0),
                })
            }
            Elements::Stored(data) => {
                let steps = table.shape.steps();
                with_format!(data, Fmt, data => each_row(pool, out, table.shape.inputs, |row, out| {
                    let Some(id) = held(row) else { return out.fill(0.0) };
                    let panel = &data[id / LANES * steps * STEP..][..steps * STEP];
                    for (input, out) in out.iter_mut().enumerate() {
                        *out = Fmt::widen(panel[input / 2 * STEP + Fmt::index_in_step(input % 2, id % LANES)]);
                    }
                }))
            }
        },
    }
}

/// Computes `out += x`.
pub(super) fn add(
    pool: &mut ThreadPool,
    x: &[f32],
    width: usize,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    each_row(pool, out, width, |row, out| {
        out.iter_mut().zip(&x[row * width..]).for_each(|(out, x)| *out += x);
    })
}

/// Computes `out[t] = [cos | sin](positions[axis][t] * inverse) * scale`.
pub(super) fn rope_angles(
    pool: &mut ThreadPool,
    rope: &RopeFrequencies,
    positions: &[Vec<f32>; 3],
    out: &mut [f32],
) -> Result<(), DeviceError> {
    let half = rope.inverse.len();
    let known = rope.axes.iter().all(|&axis| usize::from(axis) < positions.len());
    if !known || (!rope.axes.is_empty() && rope.axes.len() != half) {
        let axes = &rope.axes;
        return Err(DeviceError::Misuse(format!("axes {axes:?} of {half} rotary frequencies")));
    }
    each_row(pool, out, 2 * half, |row, out| {
        let (cos, sin) = out.split_at_mut(half);
        for (i, inverse) in rope.inverse.iter().enumerate() {
            let axis = rope.axes.get(i).map_or(0, |&axis| usize::from(axis));
            (cos[i], sin[i]) = cos_sin(positions[axis][row], *inverse, rope.scale);
        }
    })
}

/// Returns cosine and sine of `position * inverse`, multiplied by `scale`. The angle is rounded to f32 as in the
/// reference implementation. Its cosine and sine are correctly rounded.
pub(super) fn cos_sin(position: f32, inverse: f32, scale: f32) -> (f32, f32) {
    let (s, c) = f64::from(position * inverse).sin_cos();
    (c as f32 * scale, s as f32 * scale)
}

/// Computes `out = x / sqrt(mean(x²) + eps) * weight`, row by row.
pub(super) fn rms_norm(
    path: Path,
    pool: &mut ThreadPool,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<(), DeviceError> {
    let width = weight.len();
    each_row(pool, out, width, |row, out| {
        let x = &x[row * width..(row + 1) * width];
        path.run(RmsNorm { x, weight, eps, out });
    })
}

/// The RMS norm of one row.
struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Op for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = rms_factor(s, self.x, self.eps);
        let blocks = self.x.chunks(LANES).zip(self.weight.chunks(LANES)).zip(self.out.chunks_mut(LANES));
        for ((x, weight), out) in blocks {
            let normal = s.mul(s.load_some(x, 0.0), s.splat(factor));
            s.store_some(out, s.mul(normal, s.load_some(weight, 0.0)));
        }
    }
}

/// Returns `1 / sqrt(mean(x²) + eps)`. The sum runs over blocks of sixteen elements, then over lanes.
#[inline(always)]
pub(super) fn rms_factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let mut squares = s.splat(0.0);
    for block in x.chunks(LANES) {
        let x = s.load_some(block, 0.0);
        squares = s.fma(x, x, squares);
    }
    1.0 / (s.sum(squares) / x.len() as f32 + eps).sqrt()
}

/// The gated activation: `out = silu(gate) * up`.
pub(super) struct SiluMul<'a> {
    pub(super) gate: &'a [f32],
    pub(super) up: &'a [f32],
    /// With a bound `l`, the gate is at most `l` and up is in `-l ..= l`.
    pub(super) limit: Option<f32>,
    pub(super) out: &'a mut [f32],
}

impl Op for SiluMul<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let blocks = self.gate.chunks(LANES).zip(self.up.chunks(LANES)).zip(self.out.chunks_mut(LANES));
        for ((gate, up), out) in blocks {
            let (mut gate, mut up) = (s.load_some(gate, 0.0), s.load_some(up, 0.0));
            if let Some(limit) = self.limit {
                // The comparisons are false for NaN, which therefore stays.
                let (most, least) = (s.splat(limit), s.splat(-limit));
                gate = s.less(most, gate, most, gate);
                up = s.less(most, up, most, up);
                up = s.less(up, least, least, up);
            }
            s.store_some(out, s.mul(silu(s, gate), up));
        }
    }
}

/// Returns `x / (1 + e^-x)`.
#[inline(always)]
pub(super) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    let decay = exp(s, s.sub(s.splat(0.0), x));
    s.div(x, s.add(s.splat(1.0), decay))
}

/// Computes `x = x * sigmoid(gate)`, row by row. `gates` is the number of gates per row: `width`, or 1 for all
/// elements.
pub(super) fn sigmoid_gate(
    path: Path,
    pool: &mut ThreadPool,
    (gate, gates): (&[f32], usize),
    width: usize,
    x: &mut [f32],
) -> Result<(), DeviceError> {
    each_row(pool, x, width, |row, x| path.run(SigmoidGate { gate: &gate[row * gates..][..gates], x }))
}

/// The sigmoid gate of one row.
struct SigmoidGate<'a> {
    gate: &'a [f32],
    x: &'a mut [f32],
}

impl Op for SigmoidGate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (index, x) in self.x.chunks_mut(LANES).enumerate() {
            let gate = match *self.gate {
                [gate] => s.splat(gate),
                _ => s.load_some(&self.gate[index * LANES..], 0.0),
            };
            let decay = exp(s, s.sub(s.splat(0.0), gate));
            s.store_some(x, s.div(s.load_some(x, 0.0), s.add(s.splat(1.0), decay)));
        }
    }
}
