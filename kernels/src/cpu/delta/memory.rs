//! The memories of the delta rule, `S ← decay·S + k ⊗ δ` with `δ = (v - decay·Sᵀk)·beta`, and their outputs `Sᵀq`.
//!
//! Each column of a memory is computed alone: its sums run over the rows of the memory in order, for any number of tokens
//! and of columns per task. While a token's update passes over a memory, it also sums the next token's `Sᵀk`, so that a
//! token costs one pass.

use std::ops::Range;

use crate::cpu::memory::Shared;
use crate::cpu::memory::slots::SlotStates;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::step::Row;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeltaShape, DeviceError, SlotId};

/// Columns that are computed side by side: two vectors, whose four sums hide the latency of their additions.
const COLUMNS: usize = 2 * LANES;
/// Maximum number of rows of a memory. The columns of a task are copied to the stack, where they fit the first-level
/// cache.
pub(in crate::cpu) const MAX_KEY_DIM: usize = 256;
/// Distance of prefetches, in tokens. A head's inputs are too far from those of the next token for hardware prefetchers.
const AHEAD: usize = 2;
/// Number of tokens from which the copy pays.
pub(super) const COPIED_TOKENS: usize = 4;

/// The operands of [`delta_rule`].
pub(in crate::cpu) struct Memories<'a> {
    /// `[tokens, shape.inputs()]`. A task reads its own heads only.
    pub(in crate::cpu) inputs: &'a Shared<'a, f32>,
    pub(in crate::cpu) shape: DeltaShape,
    pub(in crate::cpu) states: SlotStates<'a>,
    /// `[tokens, shape.values()]`.
    pub(in crate::cpu) out: Shared<'a, f32>,
}

/// Applies the delta rule to the tokens of all rows. A task is a value head of a row or, if those are too few for the
/// threads, some columns of it.
pub(super) fn delta_rule(
    path: Path,
    pool: &mut ThreadPool,
    rows: &[Row],
    memories: &Memories<'_>,
) -> Result<(), DeviceError> {
    let shape = memories.shape;
    let heads = rows.len() * shape.value_heads;
    let blocks = shape.value_dim.div_ceil(COLUMNS);
    let parts = if heads < 4 * pool.threads() { blocks } else { 1 };
    let blocks_per_part = blocks.div_ceil(parts.max(1)) * COLUMNS;
    // The address of a task's first column.
    let begin = |task: usize| {
        let (head, part) = (task / parts, task % parts);
        let row = rows.get(head / shape.value_heads)?;
        Some(memories.begin(row, head % shape.value_heads).wrapping_add(part * blocks_per_part))
    };
    pool.run(heads * parts, |task, _| {
        let (head, part) = (task / parts, task % parts);
        let (row, head) = (&rows[head / shape.value_heads], head % shape.value_heads);
        let columns = part * blocks_per_part..shape.value_dim.min((part + 1) * blocks_per_part);
        // A thread usually runs consecutive tasks.
        path.run(Head { memories, row, head, columns, next: begin(task + 1) });
    })
}

impl Memories<'_> {
    /// Address of the memory of a row's value head.
    pub(super) fn begin(&self, row: &Row, head: usize) -> *const f32 {
        let elements = self.shape.key_dim * self.shape.value_dim;
        self.states.pointer(row.slot, head * elements, elements).cast_const()
    }
}

/// Some columns of the memory of a row's value head, over the tokens of the row.
pub(super) struct Head<'a> {
    pub(super) memories: &'a Memories<'a>,
    pub(super) row: &'a Row,
    pub(super) head: usize,
    pub(super) columns: Range<usize>,
    /// First column that the thread probably computes afterwards.
    pub(super) next: Option<*const f32>,
}

impl Op for Head<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { memories, row, head, columns, next } = self;
        let begin = memories.begin(row, head);
        for first in columns.clone().step_by(COLUMNS) {
            let (width, behind) = (COLUMNS.min(columns.end - first), first + COLUMNS);
            let next = if behind < columns.end { Some(begin.wrapping_add(behind)) } else { next };
            Columns { memories, row, head, first, width, next }.run(s);
        }
    }
}

/// Up to [`COLUMNS`] columns of one memory, over the tokens of one row.
struct Columns<'a> {
    memories: &'a Memories<'a>,
    row: &'a Row,
    head: usize,
    /// First column.
    first: usize,
    width: usize,
    /// First column of the block that the thread probably computes next.
    next: Option<*const f32>,
}

impl Columns<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (row, Memories { states, shape, .. }) = (self.row, self.memories);
        let DeltaShape { key_dim, value_dim, .. } = *shape;
        if row.slot == SlotId::NULL {
            (0..row.tokens).for_each(|token| self.out(token).fill(0.0));
            return;
        }
        let memory = self.head * key_dim * value_dim;
        if self.width == COLUMNS && row.tokens < COPIED_TOKENS {
            let state = states.pointer(row.slot, memory, key_dim * value_dim).wrapping_add(self.first);
            // SAFETY: `key_dim` rows of `COLUMNS` columns lie in the memory, `value_dim` elements apart. They belong to this
            // task alone.
            return unsafe { self.tokens(s, state, value_dim) };
        }
        // SAFETY: these elements belong to this task alone, which holds one slice at a time.
        let row_of =
            |i: usize| unsafe { states.part(row.slot, memory + i * value_dim + self.first, self.width) };
        let mut copy = [0.0; MAX_KEY_DIM * COLUMNS];
        for (i, copy) in copy.chunks_exact_mut(COLUMNS).take(key_dim).enumerate() {
            copy[..self.width].copy_from_slice(row_of(i));
        }
        // SAFETY: the copy has at least `key_dim` rows of `COLUMNS` columns.
        unsafe { self.tokens(s, copy.as_mut_ptr(), COLUMNS) };
        for (i, copy) in copy.chunks_exact(COLUMNS).take(key_dim).enumerate() {
            row_of(i).copy_from_slice(&copy[..self.width]);
        }
    }

    /// The output of a token in the task's columns.
    #[allow(clippy::mut_from_ref)] // Each element belongs to one task.
    #[inline(always)]
    fn out(&self, token: usize) -> &mut [f32] {
        let Memories { shape, out, .. } = self.memories;
        let start =
            (self.row.first_token + token) * shape.values() + self.head * shape.value_dim + self.first;
        // SAFETY: these columns of this row belong to this task, which holds one slice at a time.
        unsafe { out.slice_mut(start, self.width) }
    }

    /// Inputs `first .. first + len` of a token, of the task's own heads.
    #[inline(always)]
    fn input(&self, token: usize, first: usize, len: usize) -> &[f32] {
        let Memories { shape, inputs, .. } = self.memories;
        // SAFETY: the inputs of a row's head are written before the head's memory is computed, and by no other task at the
        // same time.
        unsafe { inputs.slice((self.row.first_token + token) * shape.inputs() + first, len) }
    }

    /// Prefetches what the task reads of a token. The token may be out of range.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, token: usize) {
        let Memories { shape, inputs, .. } = self.memories;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = *shape;
        let key_head = self.head / (value_heads / key_heads);
        let token =
            inputs.as_ptr().cast_const().wrapping_add((self.row.first_token + token) * shape.inputs());
        let q = (key_head * key_dim, key_dim);
        let k = ((key_heads + key_head) * key_dim, key_dim);
        let v = (2 * key_heads * key_dim + self.head * value_dim + self.first, self.width);
        for (first, count) in [q, k, v] {
            for element in (first..first + count).step_by(LANES) {
                s.prefetch(token.wrapping_add(element).cast());
            }
        }
    }

    /// Applies the delta rule to the row's tokens.
    ///
    /// # Safety
    ///
    /// `key_dim` rows of [`COLUMNS`] columns are writable at `state`, `stride` elements apart.
    #[inline(always)]
    unsafe fn tokens<S: Simd>(&self, s: S, state: *mut f32, stride: usize) {
        let shape = self.memories.shape;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
        let key_head = self.head / (value_heads / key_heads);
        let key = |token: usize| self.input(token, (key_heads + key_head) * key_dim, key_dim);
        let mut sums = [s.splat(0.0); 2];
        for (i, &k) in key(0).iter().enumerate() {
            let (row, k) = (state.wrapping_add(i * stride), s.splat(k));
            // SAFETY: the caller's contract.
            sums = unsafe { [s.fma(s.load(row), k, sums[0]), s.fma(s.load(row.add(LANES)), k, sums[1])] };
        }
        for token in 0..self.row.tokens {
            self.prefetch(s, token + AHEAD);
            let q = self.input(token, key_head * key_dim, key_dim);
            let v = 2 * key_heads * key_dim + self.head * value_dim + self.first;
            let v = self.input(token, v, self.width);
            let gate = |gate: usize| s.splat(self.input(token, shape.channels() + gate, 1)[0]);
            let (decay, beta) = (gate(self.head), gate(value_heads + self.head));
            let (low, high) = v.split_at(LANES.min(v.len()));
            let delta = |v: &[f32], sum: S::F| s.mul(s.sub(s.load_some(v, 0.0), s.mul(decay, sum)), beta);
            let update = Update {
                k: key(token),
                q,
                decay,
                delta: [delta(low, sums[0]), delta(high, sums[1])],
                stride,
                // Memories are read from far away, and the two lines of each of their rows form no stream.
                ahead: self.next.unwrap_or(state.cast_const()),
                ahead_stride: value_dim,
            };
            let following = if token + 1 < self.row.tokens { Some(key(token + 1)) } else { None };
            // SAFETY: the caller's contract.
            let out = unsafe {
                match (following, token) {
                    (Some(next), 0) => update.run::<S, true, true>(s, state, next, &mut sums),
                    (Some(next), _) => update.run::<S, true, false>(s, state, next, &mut sums),
                    (None, 0) => update.run::<S, false, true>(s, state, key(token), &mut sums),
                    (None, _) => update.run::<S, false, false>(s, state, key(token), &mut sums),
                }
            };
            let (low, high) = self.out(token).split_at_mut(LANES.min(self.width));
            s.store_some(low, out[0]);
            s.store_some(high, out[1]);
        }
    }
}

/// One token's update of [`COLUMNS`] columns of a memory.
struct Update<'a, F> {
    k: &'a [f32],
    q: &'a [f32],
    decay: F,
    delta: [F; 2],
    stride: usize,
    /// Memory that the row's first token prefetches, as many rows and columns, and the distance of its rows.
    ahead: *const f32,
    ahead_stride: usize,
}

impl<F: Copy> Update<'_, F> {
    /// Updates the columns, and returns the token's output. With `NEXT`, `sums` receives the products of the new memory
    /// with the next token's key. With `AHEAD`, the memory `ahead` is prefetched. Both are known to the compiler: with a
    /// branch in the loop, it would load each element and then spread it, by two instructions.
    ///
    /// # Safety
    ///
    /// As for [`Columns::tokens`].
    #[inline(always)]
    unsafe fn run<S: Simd<F = F>, const NEXT: bool, const AHEAD: bool>(
        &self,
        s: S,
        state: *mut f32,
        next: &[f32],
        sums: &mut [F; 2],
    ) -> [F; 2] {
        let (mut out, mut following) = ([s.splat(0.0); 2], [s.splat(0.0); 2]);
        for (i, ((&k, &q), &next)) in self.k.iter().zip(self.q).zip(next).enumerate() {
            let row = state.wrapping_add(i * self.stride);
            if AHEAD {
                let ahead = self.ahead.wrapping_add(i * self.ahead_stride);
                (0..2).for_each(|half| s.prefetch_far(ahead.wrapping_add(half * LANES).cast()));
            }
            for half in 0..2 {
                let at = row.wrapping_add(half * LANES);
                // SAFETY: the caller's contract.
                let old = unsafe { s.load(at) };
                let new = s.fma(s.splat(k), self.delta[half], s.mul(self.decay, old));
                // SAFETY: the caller's contract.
                unsafe { s.store(at, new) };
                out[half] = s.fma(new, s.splat(q), out[half]);
                if NEXT {
                    following[half] = s.fma(new, s.splat(next), following[half]);
                }
            }
        }
        *sums = following;
        out
    }
}
