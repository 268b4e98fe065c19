//! The attention of a token over its window and over compressed entries.
//!
//! One head of keys, which are also the values, serves all query heads. A task is one token and up to sixteen of its
//! heads, which are the lanes of the softmax. The online softmax begins with the head's sink, as a key without a value:
//! its probability only divides. So a head has seen something before its first key.

use super::Scratch;
use super::choice::{self, IndexerOperands};
use super::heads::{Products, key_stride, lay_out};
use super::keys::{Entries, WindowKeys};
use crate::cpu::attention::grown;
use crate::cpu::memory::Shared;
use crate::cpu::memory::entries::{EntriesPool, EntryLayout};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd, exp};
use crate::cpu::step::{Row, Step};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, SlotId, WindowShape};

/// Number of keys per block. Blocks of the window are aligned to absolute positions. Blocks of entries are counted from
/// the first entry, or from the first chosen one.
pub(super) const BLOCK: usize = 32;
/// Number of heads that share each load of a key's elements when keys are added up.
const ROWS: usize = 4;

/// A token of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    /// Index of its row.
    pub(super) row: usize,
    /// Index among the row's tokens.
    pub(super) index: usize,
}

impl Token {
    /// Number of entries that the token sees.
    pub(super) fn visible(&self, step: &Step, ratio: usize) -> usize {
        (step.rows[self.row].start + self.index + 1) / ratio
    }
}

/// The compressed entries of a layer.
pub(in crate::cpu) struct EntrySource<'a> {
    pub(in crate::cpu) pool: &'a EntriesPool,
    pub(in crate::cpu) layer: usize,
    pub(in crate::cpu) indexer: Option<IndexerOperands<'a>>,
}

/// The operands of [`window_attention`].
pub(in crate::cpu) struct Operands<'a> {
    /// `[tokens, heads * head_dim]`.
    pub(in crate::cpu) q: &'a [f32],
    pub(in crate::cpu) shape: WindowShape,
    pub(in crate::cpu) sinks: &'a [f32],
    pub(in crate::cpu) window: WindowKeys<'a>,
    pub(in crate::cpu) entries: Option<EntrySource<'a>>,
    /// `[tokens, heads * head_dim]`.
    pub(in crate::cpu) out: &'a mut [f32],
}

/// Computes the attention of all tokens of the step. The caller has checked the operands and the step's pages. Tokens
/// of rows with the null slot have results of 0.
pub(in crate::cpu) fn window_attention(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    scratch: &mut Scratch,
    operands: Operands<'_>,
) -> Result<(), DeviceError> {
    let Operands { q, shape, sinks, window, entries, out } = operands;
    let WindowShape { heads, head_dim, .. } = shape;
    let (width, groups) = (heads * head_dim, heads.div_ceil(LANES));
    let Scratch { floats, choices, tokens, .. } = scratch;
    tokens.clear();
    for (index, row) in step.rows.iter().enumerate() {
        if row.slot == SlotId::NULL {
            out[row.first_token * width..][..row.tokens * width].fill(0.0);
        } else {
            tokens.extend((0..row.tokens).map(|token| Token { row: index, index: token }));
        }
    }
    // If a token attends to as many entries as there can be, nothing is chosen.
    let indexer = entries.as_ref().and_then(|entries| {
        entries.indexer.as_ref().filter(|indexer| indexer.shape.top_k < entries.pool.count())
    });
    // The choices of as many tokens as are held at once take a fixed amount of memory.
    let held = indexer.map_or(tokens.len(), |_| choice::held_tokens(pool.threads()));
    let own = State::floats(head_dim).max(indexer.map_or(0, choice::floats));
    let floats = grown(floats, pool.threads() * own)?;
    let out = Shared::new(out);
    for tokens in tokens.chunks(held.max(1)) {
        if let Some((indexer, entries)) = indexer.zip(entries.as_ref()) {
            let memory = (&mut *choices, &mut floats[..]);
            choice::choose(path, pool, step, memory, indexer, entries.layer, tokens)?;
        }
        let (floats, choices) = (Shared::new(&mut floats[..]), &*choices);
        pool.run(tokens.len() * groups, |task, thread| {
            let (index, first) = (task / groups, task % groups * LANES);
            let (token, count) = (tokens[index], LANES.min(heads - first));
            let row = &step.rows[token.row];
            let start = (row.first_token + token.index) * width + first * head_dim;
            let seen = entries.as_ref().map(|EntrySource { pool, layer, .. }| Seen {
                entries: Entries {
                    data: &pool.data,
                    layout: EntryLayout::new(&pool.shape, *layer),
                    table: step.block_table(row),
                },
                visible: token.visible(step, pool.shape.ratio),
                chosen: indexer.and_then(|_| choices.chosen(index)),
            });
            path.run(TokenHeads {
                q: &q[start..start + count * head_dim],
                sinks: &sinks[first..first + count],
                scale: shape.scale,
                window: &window,
                row,
                position: row.start + token.index,
                seen,
                // SAFETY: each thread accesses only its own range, and runs one task at a time.
                state: State::new(unsafe { floats.slice_mut(thread * own, own) }, head_dim),
                // SAFETY: each task has heads of its own.
                out: unsafe { out.slice_mut(start, count * head_dim) },
            });
        })?;
    }
    Ok(())
}

/// The entries that a token attends to.
struct Seen<'a> {
    entries: Entries<'a>,
    /// Number of entries that the token sees.
    visible: usize,
    /// The chosen ones, in ascending order; `None` if the token attends to all.
    chosen: Option<&'a [u32]>,
}

/// The working memory of a task.
struct State<'a> {
    /// Queries, `[head_dim][16]`.
    queries: &'a mut [f32],
    /// Keys of a block, [`key_stride`] elements apart.
    keys: &'a mut [f32],
    /// Scores of a block, which become weights, `[BLOCK][16]`.
    weights: &'a mut [f32],
    /// Weighted sums of keys, `[16][head_dim, padded]`.
    sums: &'a mut [f32],
}

impl<'a> State<'a> {
    /// Number of floats of a state.
    fn floats(head_dim: usize) -> usize {
        let padded = head_dim.next_multiple_of(LANES);
        head_dim * LANES + BLOCK * (key_stride(head_dim) + LANES) + padded * LANES
    }

    /// Divides a slice of at least [`floats`](Self::floats) floats.
    fn new(floats: &'a mut [f32], head_dim: usize) -> Self {
        let (queries, rest) = floats.split_at_mut(head_dim * LANES);
        let (keys, rest) = rest.split_at_mut(BLOCK * key_stride(head_dim));
        let (weights, rest) = rest.split_at_mut(BLOCK * LANES);
        Self { queries, keys, weights, sums: &mut rest[..head_dim.next_multiple_of(LANES) * LANES] }
    }
}

/// One task: up to sixteen heads of one token.
struct TokenHeads<'a> {
    /// `[heads, head_dim]`.
    q: &'a [f32],
    sinks: &'a [f32],
    scale: f32,
    window: &'a WindowKeys<'a>,
    row: &'a Row,
    position: usize,
    seen: Option<Seen<'a>>,
    state: State<'a>,
    /// `[heads, head_dim]`.
    out: &'a mut [f32],
}

impl Op for TokenHeads<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { q, sinks, scale, window, row, position, seen, mut state, out } = self;
        let (head_dim, heads) = (window.head_dim, sinks.len());
        let stride = key_stride(head_dim);
        lay_out(q, head_dim, scale, state.queries);
        state.sums.fill(0.0);
        let mut softmax = Softmax { largest: s.load_some(sinks, 0.0), total: s.splat(1.0) };
        let mut first = (position + 1).saturating_sub(window.window);
        while first <= position {
            let end = (first / BLOCK * BLOCK + BLOCK).min(position + 1);
            for (key, position) in state.keys.chunks_exact_mut(stride).zip(first..end) {
                window.read(s, row, position, &mut key[..head_dim]);
            }
            softmax.add(s, &mut state, head_dim, heads, end - first);
            first = end;
        }
        if let Some(Seen { entries, visible, chosen }) = seen {
            let count = chosen.map_or(visible, <[u32]>::len);
            for first in (0..count).step_by(BLOCK) {
                let end = count.min(first + BLOCK);
                for (key, index) in state.keys.chunks_exact_mut(stride).zip(first..end) {
                    let entry = chosen.map_or(index, |chosen| chosen[index] as usize);
                    entries.read(s, entry, &mut key[..head_dim]);
                }
                softmax.add(s, &mut state, head_dim, heads, end - first);
            }
        }
        let mut totals = [0.0; LANES];
        s.store_some(&mut totals, softmax.total);
        let padded = head_dim.next_multiple_of(LANES);
        for ((out, sums), total) in
            out.chunks_exact_mut(head_dim).zip(state.sums.chunks_exact(padded)).zip(totals)
        {
            for (out, sums) in out.chunks_mut(LANES).zip(sums.chunks_exact(LANES)) {
                s.store_some(out, s.div(s.load_some(sums, 0.0), s.splat(total)));
            }
        }
    }
}

/// The running softmax of sixteen heads.
struct Softmax<F> {
    /// The largest score so far.
    largest: F,
    /// The sum of exponentials.
    total: F,
}

impl<F: Copy> Softmax<F> {
    /// Adds the first `count` keys of the state's block to the sums of the first `heads` heads.
    #[inline(always)]
    fn add<S: Simd<F = F>>(
        &mut self,
        s: S,
        state: &mut State<'_>,
        head_dim: usize,
        heads: usize,
        count: usize,
    ) {
        let State { queries, keys, weights, sums } = state;
        let (stride, padded) = (key_stride(head_dim), head_dim.next_multiple_of(LANES));
        let weights = &mut weights[..count * LANES];
        Products { queries, keys, out: weights }.run(s);
        let mut largest = self.largest;
        for scores in weights.chunks_exact(LANES) {
            largest = s.max(s.load_some(scores, 0.0), largest);
        }
        let decay = exp(s, s.sub(self.largest, largest));
        let mut sum = s.splat(0.0);
        for scores in weights.chunks_exact_mut(LANES) {
            let weight = exp(s, s.sub(s.load_some(scores, 0.0), largest));
            s.store_some(scores, weight);
            sum = s.add(sum, weight);
        }
        self.total = s.fma(self.total, decay, sum);
        self.largest = largest;
        let mut decays = [0.0; LANES];
        s.store_some(&mut decays, decay);
        let keys = &keys[..count * stride];
        for first in (0..heads).step_by(ROWS) {
            // Rows beyond the last head are computed, too, with the weights of lanes that have no head.
            let sums = &mut sums[first * padded..][..ROWS * padded];
            s.call(AddKeys { keys, stride, weights, first, decays: &decays, sums });
        }
    }
}

/// Adds the weighted keys of a block to the sums of [`ROWS`] heads.
struct AddKeys<'a> {
    keys: &'a [f32],
    /// Distance in elements between keys.
    stride: usize,
    /// `[keys][16]`.
    weights: &'a [f32],
    /// Index of the first head.
    first: usize,
    /// The factor of each head's sums so far.
    decays: &'a [f32; LANES],
    /// `[ROWS][head_dim, padded]`.
    sums: &'a mut [f32],
}

impl Op for AddKeys<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { keys, stride, weights, first, decays, sums } = self;
        let (count, padded) = (weights.len() / LANES, sums.len() / ROWS);
        assert!(
            padded <= stride && keys.len() >= count * stride && first + ROWS <= LANES,
            "keys out of bounds"
        );
        for at in (0..padded).step_by(LANES) {
            let mut own = [s.splat(0.0); ROWS];
            for (row, own) in own.iter_mut().enumerate() {
                *own = s.mul(s.load_some(&sums[row * padded + at..], 0.0), s.splat(decays[first + row]));
            }
            for key in 0..count {
                // SAFETY: a key has at least `padded` elements by the assertion, and `at` is below by a whole block.
                let elements = unsafe { s.load(keys.as_ptr().add(key * stride + at)) };
                for (row, own) in own.iter_mut().enumerate() {
                    // SAFETY: each key has sixteen weights, and the heads are below sixteen by the assertion.
                    let weight = unsafe { *weights.get_unchecked(key * LANES + first + row) };
                    *own = s.fma(s.splat(weight), elements, *own);
                }
            }
            for (row, own) in own.into_iter().enumerate() {
                s.store_some(&mut sums[row * padded + at..], own);
            }
        }
    }
}
