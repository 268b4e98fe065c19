//! Causal attention over paged keys and values, for ragged batches of prefills and decodes alike.
//!
//! A query loops over *blocks* of [`Kernel::BLOCK`] keys, aligned to absolute positions, from the first key in its
//! window to its own position. The query keeps a running maximum, sum and weighted sum of values (online softmax). At
//! every position that is a multiple of [`RANGE`], the query starts a new partial result. The partial results are
//! merged in order.
//!
//! The blocks, the ranges, their order and every sum within them depend only on the query's position and the window.
//! The result therefore has the same bits in any chunk, with any batch-mates and on any number of threads. Queries that
//! share keys (the query heads of one kv head, for a few tokens of one request) are computed together only to share
//! reads. One query's ranges run on different threads only to balance the load.
//!
//! Keys outside a query's window are masked before the softmax, and their values are never read: an unwritten slot of a
//! page may hold NaN, and 0 * NaN is NaN.

mod dots;
mod fp8;
mod kernel;
mod kv_loop;
mod panels;
mod partial;
mod plan;
pub(super) mod rotate;
mod sight;
mod softmax;
mod state;
mod widened;

use self::dots::Dots;
use self::fp8::{Pages, widened_len};
use self::kernel::Kernel;
use self::kv_loop::{KvLoop, Next};
use self::panels::Strides;
use self::plan::{Plan, RANGE};
use self::sight::Sight;
use self::state::State;
use self::widened::Widened;
use crate::cpu::memory::format::{Bf16, F16, F16FromFp8, F32, FromFp8, Stored};
use crate::cpu::memory::kv::{KvData, KvPool, Layout};
use crate::cpu::memory::{Buffer, Element, Shared};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{Isa, LANES};
use crate::cpu::step::Step;
use crate::cpu::threads::pool::ThreadPool;
use crate::{AttentionShape, DeviceError, KvScales, KvType, WeightType};

/// Memory that attention reuses from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    plan: Plan,
    /// One [`State`] per thread.
    floats: Option<Buffer<f32>>,
    /// Partial results of ranges that run as separate tasks.
    partials: Option<Buffer<f32>>,
    /// One block per thread, converted from fp8.
    widened: Option<Buffer<u16>>,
}

impl Scratch {
    /// Size in bytes of the float buffers, without the plan's lists. The size does not change between steps of a model.
    pub(super) fn bytes(&self) -> usize {
        let floats = |buffer: &Option<Buffer<f32>>| buffer.as_ref().map_or(0, |floats| floats.len());
        let widened = self.widened.as_ref().map_or(0, |widened| widened.bytes().len());
        (floats(&self.floats) + floats(&self.partials)) * size_of::<f32>() + widened
    }
}

/// The operands of [`attention`].
pub(super) struct Attention<'a> {
    /// `[tokens, (heads + 2 * kv_heads) * head_dim]`. Only q is read.
    pub(super) qkv: &'a [f32],
    pub(super) shape: AttentionShape,
    pub(super) kv: &'a KvPool,
    pub(super) layer: usize,
    /// `[tokens, heads * head_dim]`.
    pub(super) out: &'a mut [f32],
}

/// Computes attention. The caller has checked the step's pages and stored the step's keys and values.
pub(super) fn attention(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    scratch: &mut Scratch,
    operands: Attention<'_>,
) -> Result<(), DeviceError> {
    use Pages::{Fp8, Full};
    let dots = path.dots_bf16();
    match &operands.kv.data {
        KvData::Full(Stored::F32(data)) => {
            attend::<Widened<F32>>(path, pool, step, scratch, operands, Full(data))
        }
        KvData::Full(Stored::F16(data)) => {
            attend::<Widened<F16>>(path, pool, step, scratch, operands, Full(data))
        }
        KvData::Full(Stored::Bf16(data)) if dots => {
            attend::<Dots>(path, pool, step, scratch, operands, Full(data))
        }
        KvData::Full(Stored::Bf16(data)) => {
            attend::<Widened<Bf16>>(path, pool, step, scratch, operands, Full(data))
        }
        // Dot products of bfloat16 round queries and weights, so only models in bfloat16 use them.
        KvData::Fp8(data) if dots && operands.kv.shape.dtype == KvType::Fp8(WeightType::Bf16) => {
            attend::<Dots>(path, pool, step, scratch, operands, Fp8(data))
        }
        // Without instructions for f16, its numbers are slow to widen.
        KvData::Fp8(data) if path.isa() == Isa::Portable => {
            attend::<Widened<Bf16>>(path, pool, step, scratch, operands, Fp8(data))
        }
        KvData::Fp8(data) => attend::<Widened<F16FromFp8>>(path, pool, step, scratch, operands, Fp8(data)),
    }
}

/// Computes attention with one kernel.
fn attend<K: Kernel>(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    scratch: &mut Scratch,
    operands: Attention<'_>,
    pages: Pages<'_, K::Raw>,
) -> Result<(), DeviceError> {
    const { assert!(RANGE.is_multiple_of(K::BLOCK) && K::BLOCK <= kernel::MOST_PANELS * LANES) };
    let Attention { qkv, shape, kv, layer, out } = operands;
    let threads = pool.threads();
    let sight = Sight { window: shape.window };
    let state_floats = State::floats(plan::most_queries(&shape), shape.head_dim, K::BLOCK);
    let KvScales { key, value } = kv.scales(layer);
    let Scratch { plan, floats, partials, widened } = scratch;
    let (widened_len, factor) = match pages {
        Pages::Full(_) => (0, 1.0),
        Pages::Fp8(_) => (widened_len(K::BLOCK, shape.head_dim), K::FROM_FP8.map_or(1.0, FromFp8::factor)),
    };
    let scales = KvScales { key: key * factor, value: value * factor };
    let widened = Shared::new(grown(widened, threads * widened_len)?);
    let floats = grown(floats, threads * state_floats)?;
    let partials = grown(partials, if threads > 1 { plan::MOST_PARTIALS } else { 0 })?;
    plan.make(step, &shape, threads, K::MOST_HEADS);
    let (plan, floats, partials, out) =
        (&*plan, Shared::new(floats), Shared::new(partials), Shared::new(out));
    let layout = Layout::new(&kv.shape, layer);
    let strides = Strides::new(kv.shape.page_tokens, shape.head_dim);
    pool.run(plan.pieces.len(), |task, thread| {
        let piece = plan.pieces[task];
        let row = &step.rows[piece.tile.row];
        // SAFETY: each thread accesses only its own range of `floats`, and runs one task at a time.
        let floats = unsafe { floats.slice_mut(thread * state_floats, state_floats) };
        let queries = piece.kv_heads * piece.tile.tokens * (shape.heads / shape.kv_heads);
        // SAFETY: each thread accesses only its own range of `widened`, and runs one task at a time.
        let widened = unsafe { widened.slice_mut(thread * widened_len, widened_len) };
        let state = State::new(floats, queries, shape.head_dim, K::BLOCK);
        let table = step.block_table(row);
        let (partials, out) = (&partials, &out);
        // The piece that this thread will probably run next: a thread usually runs consecutive pieces.
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
                pages,
                scales,
                widened,
                layout,
                strides,
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

/// Returns the buffer, grown to at least `wanted` elements.
pub(super) fn grown<T: Element>(
    buffer: &mut Option<Buffer<T>>,
    wanted: usize,
) -> Result<&mut Buffer<T>, DeviceError> {
    let buffer = match buffer.take().filter(|buffer| buffer.len() >= wanted) {
        Some(enough) => buffer.insert(enough),
        None => buffer.insert(Buffer::zeroed(wanted, "attention scratch")?),
    };
    Ok(buffer)
}

#[cfg(test)]
mod tests;
