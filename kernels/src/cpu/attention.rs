//! Causal attention over paged keys and values, for ragged batches of prefills and decodes alike.
//!
//! A query loops over *blocks* of [`Kernel::BLOCK`] keys, aligned to absolute positions, from the first that its window
//! reaches to its own, and keeps a running maximum, sum and weighted sum of values (online softmax). After every
//! [`RANGE`] keys, also aligned, it starts anew, and what the ranges gave is merged in their order. Which blocks and
//! ranges those are, their order, and every sum within them follow from the query's own position and the window alone,
//! so its result has the same bits in any chunk, beside any batch-mates and on any number of threads. Queries that share
//! keys are computed side by side only to share reads (a kv head's whole group of query heads, for a few tokens of one
//! request), and ranges of one query on several threads only so that nobody waits for a long one.
//!
//! Keys that a query does not see are masked before the softmax, and their values are never read: a page's unwritten
//! slots may hold anything, and 0 * NaN would be NaN.

mod dots;
mod kernel;
mod kv_loop;
mod partial;
mod plan;
mod softmax;
mod widened;

use self::dots::Dots;
use self::kernel::Kernel;
use self::kv_loop::{KvLoop, Next};
use self::partial::Partial;
use self::plan::{Piece, Plan};
use self::widened::Widened;
use super::format::{Bf16, F16, F32, Stored};
use super::isa::Path;
use super::kv::{KvPool, Layout};
use super::memory::{Buffer, Shared};
use super::pool::ThreadPool;
use super::simd::LANES;
use super::step::Step;
use crate::{AttentionShape, DeviceError};

/// Keys of a range: a multiple of every kernel's block. Merging a range costs a query about as much as two keys.
const RANGE: usize = 512;
/// Query rows (tokens by heads of a group) that share the reads of a block.
const TILE_QUERIES: usize = 48;

/// What attention keeps from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    plan: Plan,
    /// A part for each thread.
    floats: Option<Buffer<f32>>,
    /// What ranges gave that were computed apart.
    partials: Option<Buffer<f32>>,
}

impl Scratch {
    /// What it has taken, which is the same for every step of a model but for the lists of a plan.
    pub(super) fn bytes(&self) -> usize {
        let floats = |buffer: &Option<Buffer<f32>>| buffer.as_ref().map_or(0, |floats| floats.len());
        (floats(&self.floats) + floats(&self.partials)) * size_of::<f32>()
    }
}

/// The operands of [`attention`].
pub(super) struct Attention<'a> {
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]`; only q is read.
    pub(super) qkv: &'a [f32],
    pub(super) shape: AttentionShape,
    pub(super) kv: &'a KvPool,
    pub(super) layer: usize,
    /// `[tokens, heads * head_dim]`.
    pub(super) out: &'a mut [f32],
}

/// Computes attention. The step's pages have been checked, and its keys and values stored.
pub(super) fn attention(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    scratch: &mut Scratch,
    operands: Attention<'_>,
) -> Result<(), DeviceError> {
    match &operands.kv.data {
        Stored::F32(data) => attend::<Widened<F32>>(path, pool, step, scratch, operands, data),
        Stored::F16(data) => attend::<Widened<F16>>(path, pool, step, scratch, operands, data),
        Stored::Bf16(data) if path.dots_bf16() => attend::<Dots>(path, pool, step, scratch, operands, data),
        Stored::Bf16(data) => attend::<Widened<Bf16>>(path, pool, step, scratch, operands, data),
    }
}

/// Computes attention with one kernel.
fn attend<K: Kernel>(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    scratch: &mut Scratch,
    operands: Attention<'_>,
    data: &[K::Raw],
) -> Result<(), DeviceError> {
    const { assert!(RANGE.is_multiple_of(K::BLOCK) && K::BLOCK <= kernel::MOST_PANELS * LANES) };
    let Attention { qkv, shape, kv, layer, out } = operands;
    let threads = pool.threads();
    let sight = Sight { window: shape.window };
    let state_floats = State::floats(plan::most_queries(&shape), shape.head_dim, K::BLOCK);
    let Scratch { plan, floats, partials } = scratch;
    let floats = grown(floats, threads * state_floats)?;
    let partials = grown(partials, if threads > 1 { plan::MOST_PARTIALS } else { 0 })?;
    plan.make(step, &shape, threads, K::MOST_HEADS);
    let (plan, floats, partials, out) =
        (&*plan, Shared::new(floats), Shared::new(partials), Shared::new(out));
    let layout = Layout::new(&kv.shape, layer);
    pool.run(plan.pieces.len(), |task, thread| {
        let piece = plan.pieces[task];
        let row = &step.rows[piece.tile.row];
        // SAFETY: each thread has a part of its own, and runs one task at a time.
        let floats = unsafe { floats.slice_mut(thread * state_floats, state_floats) };
        let queries = piece.kv_heads * piece.tile.tokens * (shape.heads / shape.kv_heads);
        let state = State::new(floats, queries, shape.head_dim, K::BLOCK);
        let table = step.block_table(row);
        let (partials, out) = (&partials, &out);
        // A thread's pieces follow each other, as a rule.
        let next = plan.pieces.get(task + 1).map(|piece| {
            let row = &step.rows[piece.tile.row];
            let first = sight.first(row.start + piece.tile.first);
            let start =
                piece.split.map_or(first, |split| first.max(split.range * RANGE)) / K::BLOCK * K::BLOCK;
            let end = row.start + piece.tile.first + piece.tile.tokens;
            Next { table: step.block_table(row), kv_head: piece.kv_head, keys: start..end }
        });
        K::run(
            path,
            KvLoop::<K> {
                qkv,
                out,
                partials,
                shape,
                sight,
                data,
                layout,
                row,
                table,
                plan,
                piece,
                next,
                state,
            },
        );
    })
}

/// The buffer, with room for so many elements.
fn grown(buffer: &mut Option<Buffer<f32>>, wanted: usize) -> Result<&mut Buffer<f32>, DeviceError> {
    let buffer = match buffer.take().filter(|buffer| buffer.len() >= wanted) {
        Some(enough) => buffer.insert(enough),
        None => buffer.insert(Buffer::zeroed(wanted, "attention scratch")?),
    };
    Ok(buffer)
}

/// Which keys a query sees: the one place that knows about windows.
#[derive(Clone, Copy)]
struct Sight {
    window: Option<usize>,
}

/// Keys of a block that a query sees, counted from the block's start; none where `end` is not beyond `first`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Visible {
    first: usize,
    end: usize,
}

/// The keys of a block that some queries see.
#[derive(Clone, Copy)]
struct Seen {
    /// Keys that at least one of them sees.
    any: Visible,
    /// Keys that all of them see.
    common: Visible,
}

impl Sight {
    /// The first key that a query at `position` sees.
    #[inline(always)]
    fn first(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The keys that a query at `position` sees in the block of `keys` keys at `start`.
    #[inline(always)]
    fn of_block(self, keys: usize, position: usize, start: usize) -> Visible {
        let first = self.first(position).saturating_sub(start).min(keys);
        let end = (position + 1).saturating_sub(start).min(keys);
        Visible { first, end }
    }
}

/// A task's working memory, by query.
struct State<'a> {
    /// Queries, `head_dim` elements each, as the kernel lays them out.
    q: &'a mut [f32],
    /// Scores of a block, then their weights, `[queries, block]`.
    scores: &'a mut [f32],
    /// What the sums of earlier blocks are to be multiplied with, and room for sixteen more.
    decay: &'a mut [f32],
    /// Of the range at hand.
    range: Partial<'a>,
    /// Of the ranges before it.
    whole: Partial<'a>,
}

impl<'a> State<'a> {
    fn floats(queries: usize, head_dim: usize, block: usize) -> usize {
        queries * (head_dim + block + 1) + LANES + 2 * Partial::floats(queries, head_dim)
    }

    /// Cuts up [`floats`](Self::floats) floats, or more.
    fn new(floats: &'a mut [f32], queries: usize, head_dim: usize, block: usize) -> Self {
        let (q, rest) = floats.split_at_mut(queries * head_dim);
        let (scores, rest) = rest.split_at_mut(queries * block);
        let (decay, rest) = rest.split_at_mut(queries + LANES);
        let (range, rest) = rest.split_at_mut(Partial::floats(queries, head_dim));
        let (whole, _) = rest.split_at_mut(Partial::floats(queries, head_dim));
        let (range, whole) = (Partial::new(range, queries, head_dim), Partial::new(whole, queries, head_dim));
        Self { q, scores, decay, range, whole }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, testable};
    use super::super::simd::to_bf16;
    use super::super::testing::Random;
    use super::*;
    use crate::{KvShape, PageId, RowInputs, StepInputs, WeightType};

    /// All that surrounds the dot-product instruction is checked without it: every path multiplies pairs, by other means
    /// where it has to, and comes near attention in f32.
    #[test]
    fn dots_come_near_f32_and_have_the_same_bits_with_and_without_the_instruction() {
        const PAGES: u32 = 60;
        let mut random = Random::new(31);
        for (heads, kv_heads, head_dim, window) in
            [(4, 2, 32, None), (6, 1, 16, Some(37)), (3, 3, 128, None), (2, 1, 48, Some(200))]
        {
            let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.2, window };
            let (page_tokens, dtype) = (16, WeightType::Bf16);
            let pages = PAGES as usize + 1;
            let mut kv =
                KvPool::zeroed(KvShape { layers: 1, kv_heads, head_dim, page_tokens, pages, dtype }).unwrap();
            let elements = kv.data.bytes().len() / 2;
            let values = random.normals(elements, 1.0);
            for (to, x) in kv.data.bytes_mut().as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *to = to_bf16(x).to_le_bytes();
            }
            let Stored::Bf16(data) = &kv.data else { unreachable!() };
            let table: Vec<PageId> = (1..=PAGES).rev().map(PageId).collect();
            // A chunk, two decodes of which one needs two ranges, and a few tokens.
            let rows = [(130, 61), (5, 1), (900, 1), (600, 3)];
            let (mut inputs, mut tokens) = (Vec::new(), 0);
            for (start, count) in rows {
                inputs.push(RowInputs { first_token: tokens, tokens: count, start, block_table: &table });
                tokens += count;
            }
            let (token_ids, positions) = (vec![0; tokens], vec![0.0; tokens]);
            let mut step = Step::default();
            let inputs =
                StepInputs { token_ids: &token_ids, positions: &positions, rows: &inputs, logit_rows: &[] };
            step.begin(&inputs).unwrap();
            let qkv = random.normals(tokens * (heads + 2 * kv_heads) * head_dim, 1.0);
            let run = |isa, dots: bool| {
                let path = Path::new(isa).unwrap();
                let (mut pool, mut scratch) = (ThreadPool::new(2).unwrap(), Scratch::default());
                let mut out = vec![f32::NAN; tokens * heads * head_dim];
                let operands = Attention { qkv: &qkv, shape, kv: &kv, layer: 0, out: &mut out };
                let attend = if dots { attend::<Dots> } else { attend::<Widened<Bf16>> };
                attend(path, &mut pool, &step, &mut scratch, operands, data).unwrap();
                out
            };
            let mut fused = None;
            for isa in testable("attention in dot products") {
                let (exact, got) = (run(isa, false), run(isa, true));
                let apart = exact.iter().zip(&got).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
                // Written so that a NaN fails.
                assert!(apart < 0.05 && !got.iter().any(|x| x.is_nan()), "{isa} {shape:?}: {apart} apart");
                // The portable path rounds products and sums apart.
                if isa != Isa::Portable {
                    let bits: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
                    assert!(
                        fused.get_or_insert_with(|| bits.clone()) == &bits,
                        "{isa} {shape:?}: other bits"
                    );
                }
            }
        }
    }
}
