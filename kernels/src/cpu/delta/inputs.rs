//! Inputs of the delta rule: causal convolutions with SiLU, norms of q and k, decays and betas.

use crate::cpu::memory::Shared;
use crate::cpu::memory::slots::SlotStates;
use crate::cpu::rowwise::silu;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::step::Row;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeltaShape, DeviceError, SlotId};

/// Minimum number of elements per task, below which waking another thread costs more than it saves.
const TASK_ELEMENTS: usize = 4 << 10;
/// Value added to the sum of squares of a head of q or k.
const EPS: f32 = 1e-6;
/// Argument above which softplus is the identity, as in torch.
const SOFTPLUS_THRESHOLD: f32 = 20.0;

/// The operands of [`inputs`].
pub(in crate::cpu) struct Inputs<'a> {
    /// `[tokens, shape.projected()]`.
    pub(in crate::cpu) projected: &'a [f32],
    pub(in crate::cpu) shape: DeltaShape,
    /// `[taps, channels]`.
    pub(in crate::cpu) taps: &'a [f32],
    pub(in crate::cpu) rate: &'a [f32],
    pub(in crate::cpu) bias: &'a [f32],
    /// Last inputs of the convolutions of q and k.
    pub(in crate::cpu) keys: SlotStates<'a>,
    /// Last inputs of the convolutions of v.
    pub(in crate::cpu) values: SlotStates<'a>,
    /// `[tokens, shape.inputs()]`.
    pub(in crate::cpu) out: &'a mut [f32],
}

/// Computes the inputs of the delta rule for all rows. Tasks are some heads of a row each, so that a head's state belongs
/// to one task.
pub(in crate::cpu) fn inputs(
    path: Path,
    pool: &mut ThreadPool,
    rows: &[Row],
    operands: Inputs<'_>,
) -> Result<(), DeviceError> {
    let Inputs { projected, shape, taps, rate, bias, keys, values, out } = operands;
    let units = shape.key_heads + shape.value_heads;
    let longest = rows.iter().map(|row| row.tokens).max().unwrap_or(0);
    let unit_elements = longest * shape.channels().div_ceil(units.max(1)).max(1);
    let units_per_task = TASK_ELEMENTS.div_ceil(unit_elements.max(1)).min(units.max(1));
    let tasks_per_row = units.div_ceil(units_per_task);
    let out = Shared::new(out);
    pool.run(rows.len() * tasks_per_row, |task, _| {
        let row = &rows[task / tasks_per_row];
        let first = task % tasks_per_row * units_per_task;
        let units = first..units.min(first + units_per_task);
        path.run(Heads {
            row,
            units,
            projected,
            shape,
            taps,
            rate,
            bias,
            keys: &keys,
            values: &values,
            out: &out,
        });
    })
}

/// One task: some units of one row. Units are first the key heads, then the value heads.
struct Heads<'a> {
    row: &'a Row,
    units: std::ops::Range<usize>,
    projected: &'a [f32],
    shape: DeltaShape,
    taps: &'a [f32],
    rate: &'a [f32],
    bias: &'a [f32],
    keys: &'a SlotStates<'a>,
    values: &'a SlotStates<'a>,
    out: &'a Shared<'a, f32>,
}

/// Consecutive channels of one head.
#[derive(Clone, Copy)]
struct Strip {
    /// First channel.
    column: usize,
    width: usize,
    /// Factor after the head's norm; `None` without a norm.
    normed: Option<f32>,
}

impl Op for Heads<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let DeltaShape { key_heads, key_dim, value_dim, taps, .. } = self.shape;
        let (kept, slot) = (taps - 1, self.row.slot);
        for unit in self.units.clone() {
            if unit < key_heads {
                let len = kept * key_dim;
                let scale = (key_dim as f32).sqrt().recip();
                let q = Strip { column: unit * key_dim, width: key_dim, normed: Some(scale) };
                let k = Strip { column: (key_heads + unit) * key_dim, normed: Some(1.0), ..q };
                if slot == SlotId::NULL {
                    self.clear(q);
                    self.clear(k);
                    continue;
                }
                // SAFETY: this head of this slot belongs to this task.
                let state = unsafe { self.keys.part(slot, 2 * unit * len, 2 * len) };
                let (of_q, of_k) = state.split_at_mut(len);
                self.strip(s, q, of_q);
                self.strip(s, k, of_k);
            } else {
                let head = unit - key_heads;
                let column = 2 * key_heads * key_dim + head * value_dim;
                let v = Strip { column, width: value_dim, normed: None };
                if slot == SlotId::NULL {
                    self.clear(v);
                    continue;
                }
                let len = kept * value_dim;
                // SAFETY: this head of this slot belongs to this task.
                let state = unsafe { self.values.part(slot, head * len, len) };
                self.strip(s, v, state);
                self.gates(head);
            }
        }
    }
}

impl Heads<'_> {
    /// The output of a token in these columns.
    #[allow(clippy::mut_from_ref)] // Each element belongs to one task.
    #[inline(always)]
    fn out(&self, token: usize, column: usize, width: usize) -> &mut [f32] {
        let start = (self.row.first_token + token) * self.shape.inputs() + column;
        // SAFETY: this column of this row belongs to this task, which holds one slice at a time.
        unsafe { self.out.slice_mut(start, width) }
    }

    /// Writes zeros for a row without state. Its decays and betas are not read.
    #[inline(always)]
    fn clear(&self, strip: Strip) {
        (0..self.row.tokens).for_each(|token| self.out(token, strip.column, strip.width).fill(0.0));
    }

    /// Convolves the channels of a strip over the row's tokens. `state` holds the inputs before them,
    /// `[taps - 1, width]`.
    #[inline(always)]
    fn strip<S: Simd>(&self, s: S, strip: Strip, state: &mut [f32]) {
        let Strip { column, width, normed } = strip;
        let (kept, channels, stride) = (self.shape.taps - 1, self.shape.channels(), self.shape.projected());
        let tokens = self.row.tokens;
        let projected = &self.projected[self.row.first_token * stride..][..tokens * stride];
        // Input `index` counts from the oldest one of the state.
        let input = |state: &[f32], index: usize, at: usize, end: usize| -> S::F {
            match index.checked_sub(kept) {
                Some(token) => {
                    s.load_some(&projected[token * stride + column + at..token * stride + column + end], 0.0)
                }
                None => s.load_some(&state[index * width + at..index * width + end], 0.0),
            }
        };
        for token in 0..tokens {
            let out = self.out(token, column, width);
            let mut squares = s.splat(0.0);
            for at in (0..width).step_by(LANES) {
                let end = width.min(at + LANES);
                let mut sum = s.splat(0.0);
                for tap in 0..=kept {
                    let weight = s.load_some(
                        &self.taps[tap * channels + column + at..tap * channels + column + end],
                        0.0,
                    );
                    sum = s.fma(weight, input(state, token + tap, at, end), sum);
                }
                let silu = silu(s, sum);
                squares = s.fma(silu, silu, squares);
                s.store_some(&mut out[at..end], silu);
            }
            if let Some(scale) = normed {
                let factor = s.splat(scale / (s.sum(squares) + EPS).sqrt());
                for out in out.chunks_mut(LANES) {
                    s.store_some(out, s.mul(s.load_some(out, 0.0), factor));
                }
            }
        }
        for index in 0..kept {
            match (tokens + index).checked_sub(kept) {
                Some(token) => state[index * width..][..width]
                    .copy_from_slice(&projected[token * stride + column..][..width]),
                None => {
                    state.copy_within((tokens + index) * width..(tokens + index + 1) * width, index * width)
                }
            }
        }
    }

    /// Computes the decay and the beta of a value head.
    #[inline(always)]
    fn gates(&self, head: usize) {
        let (shape, heads) = (self.shape, self.shape.value_heads);
        let (rate, bias) = (self.rate[head], self.bias[head]);
        for token in 0..self.row.tokens {
            let projected = &self.projected[(self.row.first_token + token) * shape.projected()..];
            let at = shape.channels() + shape.values() + head;
            let (b, a) = (projected[at], projected[at + heads] + bias);
            let softplus = if a > SOFTPLUS_THRESHOLD { a } else { a.exp().ln_1p() };
            self.out(token, shape.channels() + head, 1)[0] = (rate * softplus).exp();
            self.out(token, shape.channels() + heads + head, 1)[0] = 1.0 / (1.0 + (-b).exp());
        }
    }
}
