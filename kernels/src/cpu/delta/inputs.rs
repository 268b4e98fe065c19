//! Inputs of the delta rule: causal convolutions with SiLU, norms of q and k, decays and betas.

use std::ops::Range;

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
/// Number of tasks per thread, if there are enough elements. Several tasks per thread balance the load.
const TASKS: usize = 4;
/// Maximum number of tokens per task. All channels of a token are adjacent, so that few tokens with many channels are read
/// as a few streams, which the hardware prefetches. Many tokens with few channels would wait for each cache line.
const BLOCK_TOKENS: usize = 16;
/// Maximum number of inputs that an output of a convolution depends on.
pub(in crate::cpu) const MAX_TAPS: usize = BLOCK_TOKENS;
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

/// Computes the inputs of the delta rule for all rows. A task is a block of the step's tokens, which may be of several rows,
/// or some heads of it. The task with a row's first token reads and writes the row's state; it also has the other tokens
/// whose convolutions reach back into the state.
pub(in crate::cpu) fn inputs(
    path: Path,
    pool: &mut ThreadPool,
    rows: &[Row],
    operands: Inputs<'_>,
) -> Result<(), DeviceError> {
    let Inputs { projected, shape, taps, rate, bias, keys, values, out } = operands;
    let units = shape.key_heads + shape.value_heads;
    let tokens = rows.last().map_or(0, |row| row.first_token + row.tokens);
    let blocks = tokens.div_ceil(BLOCK_TOKENS);
    let most_groups = (tokens.min(BLOCK_TOKENS) * shape.channels()).div_ceil(TASK_ELEMENTS);
    let groups = (TASKS * pool.threads()).div_ceil(blocks.max(1)).min(most_groups).max(1);
    let group_units = units.div_ceil(groups).max(1);
    let groups = units.div_ceil(group_units);
    let out = Shared::new(out);
    pool.run(blocks * groups, |task, _| {
        let (first_token, first_unit) = (task / groups * BLOCK_TOKENS, task % groups * group_units);
        path.run(Block {
            rows,
            tokens: first_token..tokens.min(first_token + BLOCK_TOKENS),
            units: first_unit..units.min(first_unit + group_units),
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

/// One task: some units of a block of tokens. Units are first the key heads, then the value heads.
struct Block<'a> {
    rows: &'a [Row],
    /// Tokens of the step.
    tokens: Range<usize>,
    units: Range<usize>,
    projected: &'a [f32],
    shape: DeltaShape,
    taps: &'a [f32],
    rate: &'a [f32],
    bias: &'a [f32],
    keys: &'a SlotStates<'a>,
    values: &'a SlotStates<'a>,
    out: &'a Shared<'a, f32>,
}

/// A task's tokens of one row.
struct RowTokens<'a> {
    row: &'a Row,
    /// Tokens of the row. The part with the row's state begins with token 0.
    tokens: Range<usize>,
}

impl<'a> Block<'a> {
    /// The parts of rows in this block.
    fn parts(&self) -> impl Iterator<Item = RowTokens<'a>> {
        let (Range { start, end }, kept) = (self.tokens.clone(), self.shape.taps - 1);
        let first = self.rows.partition_point(|row| row.first_token + row.tokens <= start);
        let rows = self.rows[first..].iter().take_while(move |row| row.first_token < end);
        rows.map(move |row| {
            let tokens = match start.checked_sub(row.first_token) {
                // The block before has the row's state.
                Some(before @ 1..) => before.max(kept)..row.tokens.min(end - row.first_token),
                _ => 0..row.tokens.min(kept.max(end - row.first_token)),
            };
            RowTokens { row, tokens }
        })
        .filter(|part| !part.tokens.is_empty())
    }
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

impl Op for Block<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for part in self.parts() {
            for unit in self.units.clone() {
                self.unit(s, &part, unit);
            }
        }
    }
}

impl Block<'_> {
    /// Computes the inputs of one unit.
    #[inline(always)]
    fn unit<S: Simd>(&self, s: S, part: &RowTokens<'_>, unit: usize) {
        let DeltaShape { key_heads, key_dim, value_dim, taps, .. } = self.shape;
        let (kept, slot) = (taps - 1, part.row.slot);
        let has_state = part.tokens.start == 0;
        if unit < key_heads {
            let len = kept * key_dim;
            let scale = (key_dim as f32).sqrt().recip();
            let q = Strip { column: unit * key_dim, width: key_dim, normed: Some(scale) };
            let k = Strip { column: (key_heads + unit) * key_dim, normed: Some(1.0), ..q };
            if slot == SlotId::NULL {
                self.clear(part, q);
                self.clear(part, k);
                return;
            }
            // SAFETY: this head of this slot belongs to the task with the row's first token.
            let state = has_state.then(|| unsafe { self.keys.part(slot, 2 * unit * len, 2 * len) });
            let (of_q, of_k) = state.map(|state| state.split_at_mut(len)).unwrap_or_default();
            self.strip(s, part, q, of_q);
            self.strip(s, part, k, of_k);
        } else {
            let head = unit - key_heads;
            let column = 2 * key_heads * key_dim + head * value_dim;
            let v = Strip { column, width: value_dim, normed: None };
            if slot == SlotId::NULL {
                self.clear(part, v);
                return;
            }
            let len = kept * value_dim;
            // SAFETY: this head of this slot belongs to the task with the row's first token.
            let state = has_state.then(|| unsafe { self.values.part(slot, head * len, len) });
            self.strip(s, part, v, state.unwrap_or_default());
            self.gates(part, head);
        }
    }

    /// The output of a token in these columns.
    #[allow(clippy::mut_from_ref)] // Each element belongs to one task.
    #[inline(always)]
    fn out(&self, row: &Row, token: usize, column: usize, width: usize) -> &mut [f32] {
        let start = (row.first_token + token) * self.shape.inputs() + column;
        // SAFETY: this column of this token belongs to this task, which holds one slice at a time.
        unsafe { self.out.slice_mut(start, width) }
    }

    /// Writes zeros for a row without state. Its decays and betas are not read.
    #[inline(always)]
    fn clear(&self, RowTokens { row, tokens }: &RowTokens<'_>, strip: Strip) {
        tokens.clone().for_each(|token| self.out(row, token, strip.column, strip.width).fill(0.0));
    }

    /// Convolves the channels of a strip over a part of a row. `state` holds the inputs before the row, `[taps - 1, width]`,
    /// and receives its last inputs; it is empty if the part does not have the state.
    #[inline(always)]
    fn strip<S: Simd>(&self, s: S, part: &RowTokens<'_>, strip: Strip, state: &mut [f32]) {
        let Strip { column, width, normed } = strip;
        let (kept, channels, stride) = (self.shape.taps - 1, self.shape.channels(), self.shape.projected());
        let RowTokens { row, tokens } = part;
        let projected = &self.projected[row.first_token * stride..][..row.tokens * stride];
        let mut weights = [s.splat(0.0); MAX_TAPS];
        let mut window = [s.splat(0.0); MAX_TAPS - 1 + BLOCK_TOKENS];
        for at in (0..width).step_by(LANES) {
            let end = width.min(at + LANES);
            for (tap, weight) in weights[..=kept].iter_mut().enumerate() {
                *weight = s.load_some(&self.taps[tap * channels + column..][at..end], 0.0);
            }
            // All inputs are loaded before the first output is stored: the processor takes a load for one that depends on an
            // earlier store if the low bits of their addresses are equal, which they are at these strides.
            for (index, x) in window[..kept + tokens.len()].iter_mut().enumerate() {
                let index = tokens.start + index;
                *x = match index.checked_sub(kept) {
                    Some(token) => s.load_some(&projected[token * stride + column..][at..end], 0.0),
                    None => s.load_some(&state[index * width..][at..end], 0.0),
                };
            }
            for (token, inputs) in tokens.clone().zip(window.windows(kept + 1)) {
                let products = weights.iter().zip(inputs);
                let sum = products.fold(s.splat(0.0), |sum, (&weight, &x)| s.fma(weight, x, sum));
                s.store_some(self.out(row, token, column + at, end - at), silu(s, sum));
            }
        }
        if let Some(scale) = normed {
            for token in tokens.clone() {
                let out = self.out(row, token, column, width);
                let squares = out.chunks(LANES).fold(s.splat(0.0), |squares, out| {
                    let x = s.load_some(out, 0.0);
                    s.fma(x, x, squares)
                });
                let factor = s.splat(scale / (s.sum(squares) + EPS).sqrt());
                for out in out.chunks_mut(LANES) {
                    s.store_some(out, s.mul(s.load_some(out, 0.0), factor));
                }
            }
        }
        if state.is_empty() {
            return;
        }
        for index in 0..kept {
            match (row.tokens + index).checked_sub(kept) {
                Some(token) => state[index * width..][..width]
                    .copy_from_slice(&projected[token * stride + column..][..width]),
                None => {
                    let from = (row.tokens + index) * width;
                    state.copy_within(from..from + width, index * width);
                }
            }
        }
    }

    /// Computes the decay and the beta of a value head.
    #[inline(always)]
    fn gates(&self, RowTokens { row, tokens }: &RowTokens<'_>, head: usize) {
        let (shape, heads) = (self.shape, self.shape.value_heads);
        let (rate, bias) = (self.rate[head], self.bias[head]);
        for token in tokens.clone() {
            let projected = &self.projected[(row.first_token + token) * shape.projected()..];
            let at = shape.channels() + shape.values() + head;
            let (b, a) = (projected[at], projected[at + heads] + bias);
            let softplus = if a > SOFTPLUS_THRESHOLD { a } else { a.exp().ln_1p() };
            self.out(row, token, shape.channels() + head, 1)[0] = (rate * softplus).exp();
            self.out(row, token, shape.channels() + heads + head, 1)[0] = 1.0 / (1.0 + (-b).exp());
        }
    }
}
