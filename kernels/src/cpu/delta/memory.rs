//! The state matrices (*memories*) `S` of the delta rule: the update `S ← decay·S + k ⊗ δ` with
//! `δ = (v - decay·Sᵀk)·beta`, and the output `Sᵀq`.
//!
//! Each column of a memory is computed independently. Its sums run over the memory's rows in order, for any number of
//! tokens and of columns per task. The update for one token also computes `Sᵀk` for the next token, so that each token
//! costs one pass over the memory.

use std::ops::Range;

use crate::cpu::memory::Shared;
use crate::cpu::memory::slots::SlotStates;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::step::Row;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeltaShape, DeviceError, SlotId};

/// Number of vectors of columns that are computed at once. Their independent sums hide the latency of additions.
const NARROW: usize = 2;
/// Number of columns in [`NARROW`] vectors.
const COLUMNS: usize = NARROW * LANES;
/// Number of vectors of columns that are computed at once for rows of few tokens: all columns of a head of 128
/// elements. A state matrix is then read and written as one stream instead of four, which takes about a tenth less
/// time.
const WIDE: usize = 8;
/// Number of registers per vector of columns: its output, its `δ` and the next token's sum.
const REGISTERS: usize = 3;
/// Maximum number of rows of a state matrix. A task copies its columns to the stack, and with at most this many rows
/// the copy fits the first-level cache.
pub(in crate::cpu) const MAX_KEY_DIM: usize = 256;
/// Prefetch distance, in tokens. A head's inputs for successive tokens are too far apart for hardware prefetchers.
const AHEAD: usize = 2;
/// Minimum number of tokens per row for which copying the columns to the stack saves time.
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

/// Applies the delta rule to the tokens of all rows. A task is one value head of one row. If there are too few value
/// heads for the threads, a task is some of a head's columns.
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
    // Returns the address of a task's first column.
    let begin = |task: usize| {
        let (head, part) = (task / parts, task % parts);
        let row = rows.get(head / shape.value_heads)?;
        Some(memories.begin(row, head % shape.value_heads).wrapping_add(part * blocks_per_part))
    };
    pool.run(heads * parts, |task, _| {
        let (head, part) = (task / parts, task % parts);
        let (row, head) = (&rows[head / shape.value_heads], head % shape.value_heads);
        let columns = part * blocks_per_part..shape.value_dim.min((part + 1) * blocks_per_part);
        // A thread usually runs consecutive tasks, so `task + 1` is probably its next one.
        path.run(Head { memories, row, head, columns, next: begin(task + 1) });
    })
}

impl Memories<'_> {
    /// Address of the state matrix of a row's value head.
    pub(super) fn begin(&self, row: &Row, head: usize) -> *const f32 {
        let elements = self.shape.key_dim * self.shape.value_dim;
        self.states.pointer(row.slot, head * elements, elements).cast_const()
    }
}

/// One task: some columns of the state matrix of a row's value head, for all tokens of the row.
pub(super) struct Head<'a> {
    pub(super) memories: &'a Memories<'a>,
    pub(super) row: &'a Row,
    pub(super) head: usize,
    pub(super) columns: Range<usize>,
    /// The first column of the state matrix that the thread probably updates next.
    pub(super) next: Option<*const f32>,
}

impl Op for Head<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let fits = self.row.tokens < COPIED_TOKENS && self.columns.len().is_multiple_of(WIDE * LANES);
        if const { REGISTERS * WIDE <= S::TILE_SUMS } && fits {
            self.blocks::<S, WIDE>(s);
        } else {
            self.blocks::<S, NARROW>(s);
        }
    }
}

impl Head<'_> {
    /// Computes the columns in blocks of `V` vectors.
    #[inline(always)]
    fn blocks<S: Simd, const V: usize>(self, s: S) {
        let Self { memories, row, head, columns, next } = self;
        let begin = memories.begin(row, head);
        for first in columns.clone().step_by(V * LANES) {
            let (width, behind) = ((V * LANES).min(columns.end - first), first + V * LANES);
            let next = if behind < columns.end { Some(begin.wrapping_add(behind)) } else { next };
            Columns::<V> { memories, row, head, first, width, next }.run(s);
        }
    }
}

/// Up to `V` vectors of columns of one state matrix, over the tokens of one row.
struct Columns<'a, const V: usize> {
    memories: &'a Memories<'a>,
    row: &'a Row,
    head: usize,
    /// Index of the first column.
    first: usize,
    width: usize,
    /// First column of the block of columns that the thread probably updates next.
    next: Option<*const f32>,
}

impl<const V: usize> Columns<'_, V> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (row, Memories { states, shape, .. }) = (self.row, self.memories);
        let DeltaShape { key_dim, value_dim, .. } = *shape;
        if row.slot == SlotId::NULL {
            (0..row.tokens).for_each(|token| self.out(token).fill(0.0));
            return;
        }
        let memory = self.head * key_dim * value_dim;
        if self.width == V * LANES && row.tokens < COPIED_TOKENS {
            let state = states.pointer(row.slot, memory, key_dim * value_dim).wrapping_add(self.first);
            // SAFETY: the state matrix holds `key_dim` rows of `V` vectors, `value_dim` elements apart. No other task
            // accesses these columns.
            return unsafe { self.tokens(s, state, value_dim) };
        }
        // SAFETY: no other task accesses these columns of the state matrix, and this task holds one slice at a time.
        let row_of =
            |i: usize| unsafe { states.part(row.slot, memory + i * value_dim + self.first, self.width) };
        assert!(V == NARROW, "a copy of {V} vectors");
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

    /// Returns a token's outputs in the task's columns.
    #[allow(clippy::mut_from_ref)] // Each element belongs to one task.
    #[inline(always)]
    fn out(&self, token: usize) -> &mut [f32] {
        let Memories { shape, out, .. } = self.memories;
        let start =
            (self.row.first_token + token) * shape.values() + self.head * shape.value_dim + self.first;
        // SAFETY: no other task accesses these columns of this row, and this task holds one slice at a time.
        unsafe { out.slice_mut(start, self.width) }
    }

    /// Returns inputs `first .. first + len` of a token. They must belong to the task's own heads.
    #[inline(always)]
    fn input(&self, token: usize, first: usize, len: usize) -> &[f32] {
        let Memories { shape, inputs, .. } = self.memories;
        // SAFETY: the inputs of a row's head are written before the head's state matrix is updated. No other task
        // writes them at the same time.
        unsafe { inputs.slice((self.row.first_token + token) * shape.inputs() + first, len) }
    }

    /// Prefetches the inputs that the task reads for one token. The token may be out of range.
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
    /// `key_dim` rows of `V` vectors are writable at `state`, `stride` elements apart.
    #[inline(always)]
    unsafe fn tokens<S: Simd>(&self, s: S, state: *mut f32, stride: usize) {
        let shape = self.memories.shape;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
        let key_head = self.head / (value_heads / key_heads);
        let key = |token: usize| self.input(token, (key_heads + key_head) * key_dim, key_dim);
        let mut sums = [s.splat(0.0); V];
        for (i, &k) in key(0).iter().enumerate() {
            let (row, k) = (state.wrapping_add(i * stride), s.splat(k));
            for (at, sum) in sums.iter_mut().enumerate() {
                // SAFETY: by the caller's contract, `V` vectors are readable in each row of `state`.
                *sum = s.fma(unsafe { s.load(row.add(at * LANES)) }, k, *sum);
            }
        }
        for token in 0..self.row.tokens {
            self.prefetch(s, token + AHEAD);
            let q = self.input(token, key_head * key_dim, key_dim);
            let v = 2 * key_heads * key_dim + self.head * value_dim + self.first;
            let v = self.input(token, v, self.width);
            let gate = |gate: usize| s.splat(self.input(token, shape.channels() + gate, 1)[0]);
            let (decay, beta) = (gate(self.head), gate(value_heads + self.head));
            let mut delta = [s.splat(0.0); V];
            for ((delta, v), &sum) in delta.iter_mut().zip(v.chunks(LANES)).zip(&sums) {
                *delta = s.mul(s.sub(s.load_some(v, 0.0), s.mul(decay, sum)), beta);
            }
            let update = Update {
                k: key(token),
                q,
                decay,
                delta,
                stride,
                // State matrices are larger than the caches, and hardware prefetchers do not detect the access pattern
                // of narrow blocks.
                ahead: self.next.unwrap_or(state.cast_const()),
                ahead_stride: value_dim,
            };
            let following = if token + 1 < self.row.tokens { Some(key(token + 1)) } else { None };
            // SAFETY: by the caller's contract, `key_dim` rows of `V` vectors are writable at `state`.
            let out = unsafe {
                match (following, token) {
                    (Some(next), 0) => update.run::<S, true, true>(s, state, next, &mut sums),
                    (Some(next), _) => update.run::<S, true, false>(s, state, next, &mut sums),
                    (None, 0) => update.run::<S, false, true>(s, state, key(token), &mut sums),
                    (None, _) => update.run::<S, false, false>(s, state, key(token), &mut sums),
                }
            };
            for (to, out) in self.out(token).chunks_mut(LANES).zip(out) {
                s.store_some(to, out);
            }
        }
    }
}

/// One token's update of `V` vectors of columns of a state matrix.
struct Update<'a, F, const V: usize> {
    k: &'a [f32],
    q: &'a [f32],
    decay: F,
    delta: [F; V],
    stride: usize,
    /// Columns that are prefetched during the row's first token, as many as are updated. Their rows are `ahead_stride`
    /// elements apart.
    ahead: *const f32,
    ahead_stride: usize,
}

impl<F: Copy, const V: usize> Update<'_, F, V> {
    /// Updates the columns, and returns the token's output. With `NEXT`, `sums` receives the product of the updated
    /// columns and the next token's key. With `AHEAD`, the columns at `ahead` are prefetched. `NEXT` and `AHEAD` are
    /// constants, because a branch in the loop makes the compiler load and broadcast each element with two
    /// instructions.
    ///
    /// # Safety
    ///
    /// `self.k.len()` rows of `V` vectors are writable at `state`, `self.stride` elements apart.
    #[inline(always)]
    unsafe fn run<S: Simd<F = F>, const NEXT: bool, const AHEAD: bool>(
        &self,
        s: S,
        state: *mut f32,
        next: &[f32],
        sums: &mut [F; V],
    ) -> [F; V] {
        let (mut out, mut following) = ([s.splat(0.0); V], [s.splat(0.0); V]);
        for (i, ((&k, &q), &next)) in self.k.iter().zip(self.q).zip(next).enumerate() {
            let row = state.wrapping_add(i * self.stride);
            if AHEAD {
                let ahead = self.ahead.wrapping_add(i * self.ahead_stride);
                (0..V).for_each(|vector| s.prefetch_far(ahead.wrapping_add(vector * LANES).cast()));
            }
            for vector in 0..V {
                let at = row.wrapping_add(vector * LANES);
                // SAFETY: by the caller's contract, `V` vectors are writable in each row of `state`.
                let old = unsafe { s.load(at) };
                let new = s.fma(s.splat(k), self.delta[vector], s.mul(self.decay, old));
                // SAFETY: by the caller's contract, `V` vectors are writable in each row of `state`.
                unsafe { s.store(at, new) };
                out[vector] = s.fma(new, s.splat(q), out[vector]);
                if NEXT {
                    following[vector] = s.fma(new, s.splat(next), following[vector]);
                }
            }
        }
        *sums = following;
        out
    }
}
