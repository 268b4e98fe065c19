//! Attention in both directions inside segments.
//!
//! Keys and values are first packed head by head: keys as blocks of sixteen, element by element, and values in rows
//! that are padded to whole blocks. Each task then computes some queries of one head over all keys of their segment,
//! with a running maximum (Milakov and Gimelshein, arXiv:1805.02867). All queries of the task pass over a few blocks of
//! keys and values, which stay in the cache, before any passes over the next. The order of all sums follows from the
//! indices of the keys in their segment, so neither threads nor other segments change a bit.

use std::ops::Range;

use crate::cpu::memory::Shared;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd, exp};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, EncoderHeads};

/// Queries that share each load of keys and values. With AVX2, their sums, the loaded block and a factor fill the
/// registers.
const QUERIES: usize = 6;
/// Queries per task.
const TASK_QUERIES: usize = 8 * QUERIES;
/// Blocks of keys whose scores are held at once.
const HELD_BLOCKS: usize = 8;
/// Keys whose scores are held at once.
const HELD: usize = HELD_BLOCKS * LANES;

/// Memory of the packed keys and values, which grows to what the largest input so far needed.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Scratch {
    pub(in crate::cpu) fn bytes(&self) -> usize {
        (self.keys.capacity() + self.values.capacity()) * size_of::<f32>()
    }

    fn fit(&mut self, keys: usize, values: usize) {
        // Growth doubles otherwise, which for the largest input would be memory for nothing.
        for (held, wanted) in [(&mut self.keys, keys), (&mut self.values, values)] {
            held.reserve_exact(wanted.saturating_sub(held.len()));
            held.resize(wanted.max(held.len()), 0.0);
        }
    }
}

/// One segment, with the number of blocks of keys of all segments in front of it.
struct Located {
    rows: Range<usize>,
    first_block: usize,
}

impl Located {
    fn blocks(&self) -> usize {
        self.rows.len().div_ceil(LANES)
    }
}

/// Computes attention inside each of `segments`. `qkv` is `[rows, 3 * heads * head_dim]`, and `out` is
/// `[rows, heads * head_dim]`.
pub(in crate::cpu) fn attention(
    (path, pool, scratch): (Path, &mut ThreadPool, &mut Scratch),
    qkv: &[f32],
    shape: EncoderHeads,
    segments: &[Range<usize>],
    out: &mut [f32],
) -> Result<(), DeviceError> {
    let EncoderHeads { heads, head_dim } = shape;
    let padded = head_dim.next_multiple_of(LANES);
    let mut blocks = 0;
    let locate = |rows: &Range<usize>| {
        let located = Located { rows: rows.clone(), first_block: blocks };
        blocks += located.blocks();
        located
    };
    let located: Vec<Located> = segments.iter().map(locate).collect();
    scratch.fit(blocks * LANES * heads * head_dim, blocks * LANES * heads * padded);
    let (keys, values) = (Shared::new(&mut scratch.keys), Shared::new(&mut scratch.values));
    let width = heads * head_dim;
    pool.run(located.len() * heads, |task, _| {
        let (segment, head) = (&located[task / heads], task % heads);
        let block = segment.first_block * heads + head * segment.blocks();
        let (blocks, first) = (segment.blocks() * LANES, block * LANES);
        // SAFETY: each head of each segment belongs to one task, and has a range of its own.
        let (keys, values) = unsafe {
            (
                keys.slice_mut(first * head_dim, blocks * head_dim),
                values.slice_mut(first * padded, blocks * padded),
            )
        };
        pack(
            qkv,
            segment,
            [width + head * head_dim, 2 * width + head * head_dim, 3 * width],
            head_dim,
            keys,
            values,
        );
    })?;
    let (keys, values): (&[f32], &[f32]) = (&scratch.keys, &scratch.values);
    let mut tasks = Vec::new();
    for segment in &located {
        for first in segment.rows.clone().step_by(TASK_QUERIES) {
            tasks.push((segment, first..segment.rows.end.min(first + TASK_QUERIES)));
        }
    }
    let out = Shared::new(out);
    pool.run(tasks.len() * heads, |task, _| {
        let ((segment, queries), head) = (&tasks[task / heads], task % heads);
        let block = segment.first_block * heads + head * segment.blocks();
        let (blocks, first) = (segment.blocks() * LANES, block * LANES);
        path.run(HeadAttention {
            qkv,
            queries: queries.clone(),
            shape,
            head,
            keys: &keys[first * head_dim..][..blocks * head_dim],
            values: &values[first * padded..][..blocks * padded],
            count: segment.rows.len(),
            out: &out,
        });
    })
}

/// Packs the keys and values of one head of a segment. `columns` are the column of the head's keys, the column of its
/// values, and the number of columns.
fn pack(
    qkv: &[f32],
    segment: &Located,
    columns: [usize; 3],
    head_dim: usize,
    keys: &mut [f32],
    values: &mut [f32],
) {
    let [key, value, width] = columns;
    let padded = head_dim.next_multiple_of(LANES);
    keys.fill(0.0);
    values.fill(0.0);
    for (index, row) in segment.rows.clone().map(|row| &qkv[row * width..][..width]).enumerate() {
        let block = &mut keys[index / LANES * LANES * head_dim..];
        for (element, &key) in row[key..key + head_dim].iter().enumerate() {
            block[element * LANES + index % LANES] = key;
        }
        values[index * padded..][..head_dim].copy_from_slice(&row[value..value + head_dim]);
    }
}

/// The attention of a few queries of one head.
struct HeadAttention<'a> {
    qkv: &'a [f32],
    /// Rows of the queries.
    queries: Range<usize>,
    shape: EncoderHeads,
    head: usize,
    /// Keys of the segment, `[blocks][head_dim][16]`.
    keys: &'a [f32],
    /// Values of the segment, `[keys][head_dim, padded]`.
    values: &'a [f32],
    /// Number of keys.
    count: usize,
    out: &'a Shared<'a, f32>,
}

impl Op for HeadAttention<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let EncoderHeads { heads, head_dim } = self.shape;
        let (width, column) = (heads * head_dim, self.head * head_dim);
        let padded = head_dim.next_multiple_of(LANES);
        let groups = self.queries.len().div_ceil(QUERIES);
        let mut packed = vec![0.0f32; groups * QUERIES * head_dim];
        self.pack_queries(&mut packed);
        let mut accumulated = vec![0.0f32; groups * QUERIES * padded];
        let mut state = vec![Softmax::EMPTY; groups * QUERIES];
        let mut scores = [[0.0f32; HELD]; QUERIES];
        for first in (0..self.count).step_by(HELD) {
            let held = first..self.count.min(first + HELD);
            let blocks = held.start * head_dim..held.end.next_multiple_of(LANES) * head_dim;
            let keys = &self.keys[blocks];
            let values = &self.values[held.start * padded..held.end.next_multiple_of(LANES) * padded];
            let of_group = packed.chunks_exact(QUERIES * head_dim).zip(state.chunks_exact_mut(QUERIES));
            for ((packed, state), sums) in of_group.zip(accumulated.chunks_exact_mut(QUERIES * padded)) {
                self.scores(s, packed, keys, held.len(), &mut scores);
                for ((scores, state), sums) in scores.iter_mut().zip(state).zip(sums.chunks_exact_mut(padded))
                {
                    let factor = s.splat(soften(s, scores, held.len(), state));
                    for sum in sums.chunks_exact_mut(LANES) {
                        let scaled = s.mul(s.load_some(sum, 0.0), factor);
                        s.store_some(sum, scaled);
                    }
                }
                accumulate(s, &scores, values, padded, sums);
            }
        }
        for ((row, sums), state) in self.queries.clone().zip(accumulated.chunks_exact(padded)).zip(&state) {
            // SAFETY: each head of each row belongs to one task.
            let out = unsafe { self.out.slice_mut(row * width + column, head_dim) };
            for (out, sum) in out.chunks_mut(LANES).zip(sums.chunks_exact(LANES)) {
                s.store_some(out, s.div(s.load_some(sum, 0.0), s.splat(state.total)));
            }
        }
    }
}

impl HeadAttention<'_> {
    /// Packs the queries in groups, `[groups][head_dim][QUERIES]`. Queries that are missing in the last group stay 0.
    fn pack_queries(&self, packed: &mut [f32]) {
        let EncoderHeads { heads, head_dim } = self.shape;
        let (width, column) = (3 * heads * head_dim, self.head * head_dim);
        for (index, row) in self.queries.clone().enumerate() {
            let group = &mut packed[index / QUERIES * QUERIES * head_dim..][..QUERIES * head_dim];
            let query = &self.qkv[row * width + column..][..head_dim];
            for (to, element) in group.iter_mut().skip(index % QUERIES).step_by(QUERIES).zip(query) {
                *to = *element;
            }
        }
    }

    /// Computes the scaled scores of a group of queries and `count` keys. The scores of keys that fill up the last
    /// block are negative infinity.
    #[inline(always)]
    fn scores<S: Simd>(
        &self,
        s: S,
        packed: &[f32],
        keys: &[f32],
        count: usize,
        scores: &mut [[f32; HELD]; QUERIES],
    ) {
        let head_dim = self.shape.head_dim;
        let scale = s.splat((head_dim as f32).sqrt().recip());
        for (block, keys) in keys.chunks_exact(LANES * head_dim).enumerate() {
            let mut products = [s.splat(0.0); QUERIES];
            for (key, queries) in keys.as_chunks::<LANES>().0.iter().zip(packed.as_chunks::<QUERIES>().0) {
                let key = s.load_some(key, 0.0);
                for (product, query) in products.iter_mut().zip(queries) {
                    *product = s.fma(s.splat(*query), key, *product);
                }
            }
            let exist = count - block * LANES;
            for (product, scores) in products.into_iter().zip(&mut *scores) {
                let scores = &mut scores[block * LANES..][..LANES];
                s.store_some(scores, s.mul(product, scale));
                if exist < LANES {
                    scores[exist..].fill(f32::NEG_INFINITY);
                }
            }
        }
    }
}

/// Adds values, weighted by the weights of a group of queries. Keys that fill up the last block have a weight of 0.
#[inline(always)]
fn accumulate<S: Simd>(
    s: S,
    weights: &[[f32; HELD]; QUERIES],
    values: &[f32],
    padded: usize,
    accumulated: &mut [f32],
) {
    for column in (0..padded).step_by(LANES) {
        let mut sums = [s.splat(0.0); QUERIES];
        for (sum, accumulated) in sums.iter_mut().zip(accumulated.chunks_exact(padded)) {
            *sum = s.load_some(&accumulated[column..][..LANES], 0.0);
        }
        for (block, values) in values.chunks_exact(LANES * padded).enumerate() {
            let weights: [&[f32; LANES]; QUERIES] =
                std::array::from_fn(|query| &weights[query].as_chunks::<LANES>().0[block]);
            for (index, values) in values.chunks_exact(padded).enumerate().take(LANES) {
                let value = s.load_some(&values[column..][..LANES], 0.0);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = s.fma(s.splat(weights[index]), value, *sum);
                }
            }
        }
        for (sum, accumulated) in sums.into_iter().zip(accumulated.chunks_exact_mut(padded)) {
            s.store_some(&mut accumulated[column..][..LANES], sum);
        }
    }
}

/// The running softmax of a query.
#[derive(Clone, Copy)]
struct Softmax {
    /// Largest score so far.
    most: f32,
    /// Sum of the weights so far, relative to the largest score.
    total: f32,
}

impl Softmax {
    const EMPTY: Self = Self { most: f32::NEG_INFINITY, total: 0.0 };
}

/// Turns scores of `count` keys into weights relative to the largest score so far, and adds them to the total. Returns
/// the factor of what was accumulated before.
#[inline(always)]
fn soften<S: Simd>(s: S, scores: &mut [f32; HELD], count: usize, state: &mut Softmax) -> f32 {
    let Softmax { most, total } = state;
    let scores = &mut scores[..count.next_multiple_of(LANES)];
    let mut largest = s.splat(*most);
    for block in scores.chunks_exact(LANES) {
        largest = s.max(s.load_some(block, 0.0), largest);
    }
    let largest = s.largest(largest);
    let offset = s.splat(largest);
    let mut sum = s.splat(0.0);
    for block in scores.chunks_exact_mut(LANES) {
        let weight = exp(s, s.sub(s.load_some(block, 0.0), offset));
        sum = s.add(sum, weight);
        s.store_some(block, weight);
    }
    // One value in all lanes, so that the same function computes it.
    let mut factor = [0.0; LANES];
    s.store_some(&mut factor, exp(s, s.splat(*most - largest)));
    *total = *total * factor[0] + s.sum(sum);
    *most = largest;
    factor[0]
}
