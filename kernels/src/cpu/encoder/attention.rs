//! Attention in both directions inside segments.
//!
//! Keys and values are first packed head by head: keys as blocks of sixteen, element by element, and values in rows
//! that are padded to whole blocks. Each task then computes a few queries of one head over all keys of their segment,
//! with a running maximum (Milakov and Gimelshein, arXiv:1805.02867). The order of all sums follows from the indices of
//! the keys in their segment, so neither threads nor other segments change a bit.

use std::ops::Range;

use crate::cpu::memory::Shared;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd, exp};
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, EncoderHeads};

/// Queries that share each load of keys and values.
const QUERIES: usize = 4;
/// Queries per task.
const TASK_QUERIES: usize = 32;
/// Blocks of keys whose scores are held at once.
const HELD_BLOCKS: usize = 16;

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
        let mut sums = [[0.0f32; HELD_BLOCKS * LANES]; QUERIES];
        let mut accumulated = vec![0.0f32; QUERIES * padded];
        for first in self.queries.clone().step_by(QUERIES) {
            let count = QUERIES.min(self.queries.end - first);
            // A query that is missing repeats the first one, and its result is dropped.
            let row = |query: usize| first + if query < count { query } else { 0 };
            let query = |query: usize| &self.qkv[row(query) * 3 * width + column..][..head_dim];
            let queries: [&[f32]; QUERIES] = std::array::from_fn(query);
            accumulated.fill(0.0);
            let (mut most, mut total) = ([f32::NEG_INFINITY; QUERIES], [0.0f32; QUERIES]);
            for held in (0..self.count).step_by(HELD_BLOCKS * LANES) {
                let end = self.count.min(held + HELD_BLOCKS * LANES);
                self.scores(s, queries, held..end, &mut sums);
                for query in 0..QUERIES {
                    let scale = soften(s, &mut sums[query], end - held, &mut most[query], &mut total[query]);
                    for sum in accumulated[query * padded..][..padded].chunks_mut(LANES) {
                        let scaled = s.mul(s.load_some(sum, 0.0), s.splat(scale));
                        s.store_some(sum, scaled);
                    }
                }
                self.accumulate(s, &sums, held..end, padded, &mut accumulated);
            }
            for query in 0..count {
                // SAFETY: each head of each row belongs to one task.
                let out = unsafe { self.out.slice_mut((first + query) * width + column, head_dim) };
                for (out, sum) in out.chunks_mut(LANES).zip(accumulated[query * padded..].chunks(LANES)) {
                    s.store_some(out, s.div(s.load_some(sum, 0.0), s.splat(total[query])));
                }
            }
        }
    }
}

impl HeadAttention<'_> {
    /// Computes the scaled scores of keys. Scores of keys that do not exist are negative infinity.
    #[inline(always)]
    fn scores<S: Simd>(
        &self,
        s: S,
        queries: [&[f32]; QUERIES],
        held: Range<usize>,
        sums: &mut [[f32; HELD_BLOCKS * LANES]; QUERIES],
    ) {
        let head_dim = self.shape.head_dim;
        let scale = s.splat((head_dim as f32).sqrt().recip());
        for (block, first) in held.clone().step_by(LANES).enumerate() {
            let keys = &self.keys[first * head_dim..][..LANES * head_dim];
            let mut products = [s.splat(0.0); QUERIES];
            for (element, key) in keys.chunks_exact(LANES).enumerate() {
                let key = s.load_some(key, 0.0);
                for (product, query) in products.iter_mut().zip(queries) {
                    *product = s.fma(s.splat(query[element]), key, *product);
                }
            }
            let exist = held.end - first;
            for (product, sums) in products.into_iter().zip(&mut *sums) {
                let sums = &mut sums[block * LANES..][..LANES];
                s.store_some(sums, s.mul(product, scale));
                if exist < LANES {
                    sums[exist..].fill(f32::NEG_INFINITY);
                }
            }
        }
    }

    /// Adds the values of keys, weighted by `weights`.
    #[inline(always)]
    fn accumulate<S: Simd>(
        &self,
        s: S,
        weights: &[[f32; HELD_BLOCKS * LANES]; QUERIES],
        held: Range<usize>,
        padded: usize,
        accumulated: &mut [f32],
    ) {
        for column in (0..padded).step_by(LANES) {
            let mut sums = [s.splat(0.0); QUERIES];
            for (query, sum) in sums.iter_mut().enumerate() {
                *sum = s.load_some(&accumulated[query * padded + column..][..LANES], 0.0);
            }
            for (index, key) in held.clone().enumerate() {
                let value = s.load_some(&self.values[key * padded + column..][..LANES], 0.0);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = s.fma(s.splat(weights[index]), value, *sum);
                }
            }
            for (query, sum) in sums.into_iter().enumerate() {
                s.store_some(&mut accumulated[query * padded + column..][..LANES], sum);
            }
        }
    }
}

/// Turns scores of `count` keys into weights relative to the largest score so far, and adds them to `total`. Returns
/// the factor of what was accumulated before.
#[inline(always)]
fn soften<S: Simd>(s: S, scores: &mut [f32], count: usize, most: &mut f32, total: &mut f32) -> f32 {
    let scores = &mut scores[..count.next_multiple_of(LANES)];
    let mut largest = s.splat(*most);
    for block in scores.chunks(LANES) {
        largest = s.max(s.load_some(block, 0.0), largest);
    }
    let largest = s.largest(largest);
    let offset = s.splat(largest);
    let mut sum = s.splat(0.0);
    for block in scores.chunks_mut(LANES) {
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
