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
/// Maximum number of tokens per task. A token's channels are adjacent in memory. A task of few tokens and many channels
/// therefore reads a few long streams, which the hardware prefetches.
const BLOCK_TOKENS: usize = 16;
/// Maximum number of inputs that an output of a convolution depends on.
pub(in crate::cpu) const MAX_TAPS: usize = BLOCK_TOKENS;
/// Number of taps in all supported models. The convolution is compiled separately for this number.
const USUAL_TAPS: usize = 4;
/// Number of tokens that are prefetched per unit (a key head or a value head). The first-level cache has no room for
/// all tokens of a block.
const PREFETCHED_TOKENS: usize = 4;
/// Epsilon of the norms of q and k, which is added to a head's sum of squares.
const EPS: f32 = 1e-6;
/// Argument above which softplus is the identity, as in torch.
const SOFTPLUS_THRESHOLD: f32 = 20.0;

/// The operands of [`inputs`], and the computation of single heads.
pub(in crate::cpu) struct Inputs<'a> {
    /// `[tokens, shape.projected()]`.
    pub(in crate::cpu) projected: &'a [f32],
    pub(in crate::cpu) shape: DeltaShape,
    /// `[taps, channels]`.
    pub(in crate::cpu) taps: &'a [f32],
    pub(in crate::cpu) rate: &'a [f32],
    pub(in crate::cpu) bias: &'a [f32],
    /// The last inputs of the convolutions of q and k, per slot.
    pub(in crate::cpu) keys: SlotStates<'a>,
    /// The last inputs of the convolutions of v, per slot.
    pub(in crate::cpu) values: SlotStates<'a>,
    /// `[tokens, shape.inputs()]`.
    pub(in crate::cpu) out: &'a Shared<'a, f32>,
}

/// Computes the inputs of the delta rule for all rows. A task computes all heads, or some of them, for a block of the
/// step's tokens. A block may hold tokens of several rows. The task with a row's first token reads and writes the row's
/// state. It also computes the other tokens whose convolutions reach back into the state.
pub(super) fn inputs(
    path: Path,
    pool: &mut ThreadPool,
    rows: &[Row],
    inputs: &Inputs<'_>,
) -> Result<(), DeviceError> {
    let shape = inputs.shape;
    let units = shape.key_heads + shape.value_heads;
    let tokens = rows.last().map_or(0, |row| row.first_token + row.tokens);
    let blocks = tokens.div_ceil(BLOCK_TOKENS);
    let most_groups = (tokens.min(BLOCK_TOKENS) * shape.channels()).div_ceil(TASK_ELEMENTS);
    let groups = (TASKS * pool.threads()).div_ceil(blocks.max(1)).min(most_groups).max(1);
    let group_units = units.div_ceil(groups).max(1);
    let groups = units.div_ceil(group_units);
    pool.run(blocks * groups, |task, _| {
        let (first_token, first_unit) = (task / groups * BLOCK_TOKENS, task % groups * group_units);
        path.run(Block {
            rows,
            tokens: first_token..tokens.min(first_token + BLOCK_TOKENS),
            units: first_unit..units.min(first_unit + group_units),
            inputs,
        });
    })
}

/// One task: the inputs of some units (key heads and value heads) for the tokens of a block.
struct Block<'a> {
    rows: &'a [Row],
    /// The block's tokens, as indices in the step.
    tokens: Range<usize>,
    units: Range<usize>,
    inputs: &'a Inputs<'a>,
}

/// The tokens of one row that belong to one task.
#[derive(Clone)]
pub(super) struct RowTokens<'a> {
    pub(super) row: &'a Row,
    /// Indices of the tokens in the row. Only the task with token 0 reads and writes the row's state.
    pub(super) tokens: Range<usize>,
}

impl<'a> Block<'a> {
    /// Returns the tokens of each row that this block's task computes.
    fn parts(&self) -> impl Iterator<Item = RowTokens<'a>> {
        let (Range { start, end }, kept) = (self.tokens.clone(), self.inputs.shape.taps - 1);
        let first = self.rows.partition_point(|row| row.first_token + row.tokens <= start);
        let rows = self.rows[first..].iter().take_while(move |row| row.first_token < end);
        rows.map(move |row| {
            let tokens = match start.checked_sub(row.first_token) {
                // The row began in an earlier block. The task of that block computes the first `kept` tokens, which
                // depend on the state.
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
    /// Index of the first channel.
    column: usize,
    width: usize,
    /// Factor by which the normalised head is multiplied; `None` if the head is not normalised.
    normed: Option<f32>,
}

impl<'a> Op for Block<'a> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let of_part = |part: RowTokens<'a>| self.units.clone().map(move |unit| (part.clone(), unit));
        let mut work = self.parts().flat_map(of_part).peekable();
        while let Some((part, unit)) = work.next() {
            if let Some((part, unit)) = work.peek() {
                self.inputs.prefetch(s, part, *unit);
            }
            self.inputs.unit(s, &part, unit);
        }
    }
}

impl Inputs<'_> {
    /// Computes the inputs of one unit: a key head or a value head. Unit indices count the key heads first, then the
    /// value heads.
    #[inline(always)]
    pub(super) fn unit<S: Simd>(&self, s: S, part: &RowTokens<'_>, unit: usize) {
        let [first, second] = self.strips(unit);
        if part.row.slot == SlotId::NULL {
            [first, second].into_iter().flatten().for_each(|strip| self.clear(part, strip));
            return;
        }
        let (states, begin, len) = self.state(unit);
        // SAFETY: only the task with the row's first token accesses the state of this head in the row's slot. No other
        // row has the same slot.
        let state = (part.tokens.start == 0).then(|| unsafe { states.part(part.row.slot, begin, len) });
        let mut state = state.unwrap_or_default();
        for strip in [first, second].into_iter().flatten() {
            let of_strip = state.split_off_mut(..state.len().min((self.shape.taps - 1) * strip.width));
            let of_strip = of_strip.unwrap_or_default();
            match self.shape.taps {
                USUAL_TAPS if part.row.tokens == 1 && strip.width.is_multiple_of(LANES) => {
                    self.one_token(s, part.row, strip, of_strip);
                }
                USUAL_TAPS => self.strip::<S, USUAL_TAPS>(s, part, strip, of_strip),
                _ => self.strip::<S, 0>(s, part, strip, of_strip),
            }
        }
        if let Some(head) = unit.checked_sub(self.shape.key_heads) {
            self.gates(part, head);
        }
    }

    /// The strips of one unit: q and k of a key head, or v of a value head.
    #[inline(always)]
    fn strips(&self, unit: usize) -> [Option<Strip>; 2] {
        let DeltaShape { key_heads, key_dim, value_dim, .. } = self.shape;
        match unit.checked_sub(key_heads) {
            None => {
                let scale = (key_dim as f32).sqrt().recip();
                let q = Strip { column: unit * key_dim, width: key_dim, normed: Some(scale) };
                [Some(q), Some(Strip { column: (key_heads + unit) * key_dim, normed: Some(1.0), ..q })]
            }
            Some(head) => {
                let column = 2 * key_heads * key_dim + head * value_dim;
                [Some(Strip { column, width: value_dim, normed: None }), None]
            }
        }
    }

    /// Returns where the state of a unit (a key head or a value head) is: the slot states, the index of the first
    /// element, and the number of elements.
    #[inline(always)]
    fn state(&self, unit: usize) -> (&SlotStates<'_>, usize, usize) {
        let DeltaShape { key_heads, key_dim, value_dim, taps, .. } = self.shape;
        match unit.checked_sub(key_heads) {
            None => (&self.keys, unit * 2 * (taps - 1) * key_dim, 2 * (taps - 1) * key_dim),
            Some(head) => (&self.values, head * (taps - 1) * value_dim, (taps - 1) * value_dim),
        }
    }

    /// Prefetches the memory that a unit reads, and the outputs of its first tokens. The inputs and outputs may be in
    /// other cores' caches, and states and taps are in main memory. Outputs of later tokens need no prefetch, because
    /// they are written as streams.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, s: S, part: &RowTokens<'_>, unit: usize) {
        let (shape, row) = (self.shape, part.row);
        if part.tokens.start == 0 {
            let (states, first, len) = self.state(unit);
            let start = states.pointer(row.slot, first, len).cast_const();
            (0..len).step_by(LANES).for_each(|at| s.prefetch(start.wrapping_add(at).cast()));
        }
        for Strip { column, width, .. } in self.strips(unit).into_iter().flatten() {
            for column in (column..column + width).step_by(LANES) {
                for tap in 0..shape.taps {
                    s.prefetch(self.taps.as_ptr().wrapping_add(tap * shape.channels() + column).cast());
                }
                for (index, token) in part.tokens.clone().enumerate() {
                    let (token, out) = (row.first_token + token, self.out.as_ptr().cast_const());
                    let x = self.projected.as_ptr().wrapping_add(token * shape.projected() + column);
                    if index < PREFETCHED_TOKENS {
                        s.prefetch(x.cast());
                        s.prefetch_to_write(out.wrapping_add(token * shape.inputs() + column).cast());
                    } else {
                        s.prefetch_far(x.cast());
                    }
                }
            }
        }
    }

    /// Returns a token's outputs in columns `column .. column + width`.
    #[allow(clippy::mut_from_ref)] // Each element belongs to one task.
    #[inline(always)]
    fn out(&self, row: &Row, token: usize, column: usize, width: usize) -> &mut [f32] {
        let start = (row.first_token + token) * self.shape.inputs() + column;
        // SAFETY: only this task accesses these columns of this token, and it holds one slice at a time.
        unsafe { self.out.slice_mut(start, width) }
    }

    /// Writes zeros for a row without state. Nothing reads the row's decays and betas.
    #[inline(always)]
    fn clear(&self, RowTokens { row, tokens }: &RowTokens<'_>, strip: Strip) {
        tokens.clone().for_each(|token| self.out(row, token, strip.column, strip.width).fill(0.0));
    }

    /// Convolves the channels of a strip over a part of a row. `state` holds the inputs before the row, `[taps - 1,
    /// width]`, and receives the row's last inputs. It is empty if another task has the row's state. `TAPS` is the
    /// number of taps, which lets the compiler unroll loops; 0 stands for any number.
    #[inline(always)]
    fn strip<S: Simd, const TAPS: usize>(&self, s: S, part: &RowTokens<'_>, strip: Strip, state: &mut [f32]) {
        let Strip { column, width, normed } = strip;
        let kept = if TAPS == 0 { self.shape.taps } else { TAPS } - 1;
        let (channels, stride) = (self.shape.channels(), self.shape.projected());
        let RowTokens { row, tokens } = part;
        let projected = &self.projected[row.first_token * stride..][..row.tokens * stride];
        let mut weights = [s.splat(0.0); MAX_TAPS];
        let mut window = [s.splat(0.0); MAX_TAPS - 1 + BLOCK_TOKENS];
        for at in (0..width).step_by(LANES) {
            let end = width.min(at + LANES);
            for (tap, weight) in weights[..=kept].iter_mut().enumerate() {
                *weight = s.load_some(&self.taps[tap * channels + column..][at..end], 0.0);
            }
            // All inputs are loaded before the first output is stored. At these strides, the addresses of loads and
            // stores have equal low bits, and the processor would wrongly assume that a load depends on an earlier
            // store.
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
            // If the part ends before the row does, it does not hold the row's last inputs.
            let held = (tokens.end == row.tokens).then(|| &window[tokens.len()..]);
            for (index, state) in state.chunks_exact_mut(width).enumerate() {
                let x = match held {
                    Some(held) => held[index],
                    None => {
                        s.load_some(&projected[(row.tokens + index - kept) * stride + column..][at..end], 0.0)
                    }
                };
                s.store_some(&mut state[at..end], x);
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
    }

    /// Does the same as [`Self::strip`] for a row of one token and whole vectors of channels. All values stay in
    /// registers.
    #[inline(always)]
    fn one_token<S: Simd>(&self, s: S, row: &Row, strip: Strip, state: &mut [f32]) {
        let Strip { column, width, normed } = strip;
        let x = &self.projected[row.first_token * self.shape.projected() + column..][..width];
        let out = self.out(row, 0, column, width);
        let taps: [&[f32]; USUAL_TAPS] =
            std::array::from_fn(|tap| &self.taps[tap * self.shape.channels() + column..][..width]);
        let (oldest, newer) = state[..(USUAL_TAPS - 1) * width].split_at_mut(width);
        let (older, last) = newer.split_at_mut(width);
        let mut squares = s.splat(0.0);
        for at in (0..width).step_by(LANES) {
            let load = |from: &[f32]| s.load_some(&from[at..at + LANES], 0.0);
            let inputs = [load(oldest), load(older), load(last), load(x)];
            let mut sum = s.splat(0.0);
            for (tap, input) in taps.iter().zip(inputs) {
                sum = s.fma(load(tap), input, sum);
            }
            let y = silu(s, sum);
            squares = s.fma(y, y, squares);
            s.store_some(&mut out[at..at + LANES], y);
            for (state, input) in [&mut *oldest, &mut *older, &mut *last].into_iter().zip(&inputs[1..]) {
                s.store_some(&mut state[at..at + LANES], *input);
            }
        }
        if let Some(scale) = normed {
            let factor = s.splat(scale / (s.sum(squares) + EPS).sqrt());
            for out in out.chunks_exact_mut(LANES) {
                s.store_some(out, s.mul(s.load_some(out, 0.0), factor));
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
