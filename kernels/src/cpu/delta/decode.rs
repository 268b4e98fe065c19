//! The gated delta rule over rows of few tokens, such as decodes. One pass computes the inputs and updates the state
//! matrices (*memories*).
//!
//! Decodes are bound by memory bandwidth: each token reads and writes one whole state matrix per head. A task computes
//! the inputs of a head just before it updates the head's memory. Meanwhile, it prefetches the next head's memory and
//! the operands of that head's inputs. A separate operation for the inputs would take a third of the time that the
//! memories take. A thread computes the same heads in each layer, so the heads' inputs stay in the thread's cache.

use std::ops::Range;

use super::inputs::{Inputs, RowTokens};
use super::memory::{COPIED_TOKENS, Head, Memories};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{Op, Simd};
use crate::cpu::step::Row;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeltaShape, DeviceError};

/// Minimum number of tasks per thread. Short tasks let all threads end at nearly the same time.
const TASKS: usize = 16;
/// Minimum number of pairs of row and key head per thread. If there are fewer, [`super::memory`] divides the work by
/// columns, too.
const LEAST_HEADS: usize = 4;

/// True if decodes can run in one pass: all rows are short, and there are enough of them for the threads.
pub(super) fn fits(pool: &ThreadPool, rows: &[Row], shape: &DeltaShape) -> bool {
    rows.len() * shape.key_heads >= LEAST_HEADS * pool.threads()
        && rows.iter().all(|row| row.tokens < COPIED_TOKENS)
}

/// Computes the inputs and updates the state matrices of all rows. A task computes one key head and its value heads for
/// some of the rows.
pub(super) fn decode(
    path: Path,
    pool: &mut ThreadPool,
    rows: &[Row],
    inputs: &Inputs<'_>,
    memories: &Memories<'_>,
) -> Result<(), DeviceError> {
    let key_heads = memories.shape.key_heads;
    let parts = (TASKS * pool.threads()).div_ceil(key_heads).min(rows.len()).max(1);
    let rows_per_part = rows.len().div_ceil(parts).max(1);
    let parts = rows.len().div_ceil(rows_per_part);
    pool.run(key_heads * parts, |task, _| {
        let (key_head, first) = (task / parts, task % parts * rows_per_part);
        let own = first..rows.len().min(first + rows_per_part);
        path.run(KeyHead { rows, own, key_head, inputs, memories });
    })
}

/// One task: a key head and its value heads, for the rows `own`.
struct KeyHead<'a> {
    rows: &'a [Row],
    own: Range<usize>,
    key_head: usize,
    inputs: &'a Inputs<'a>,
    memories: &'a Memories<'a>,
}

impl Op for KeyHead<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, own, key_head, inputs, memories } = self;
        let DeltaShape { key_heads, value_heads, value_dim, .. } = memories.shape;
        let ratio = value_heads / key_heads;
        let values = |key_head: usize| key_head * ratio..(key_head + 1) * ratio;
        // Returns the row and the key head that the thread probably computes after row `row`.
        let next = |row: usize| match rows.get(row + 1) {
            Some(row) => Some((row, key_head)),
            None => rows.first().filter(|_| key_head + 1 < key_heads).map(|row| (row, key_head + 1)),
        };
        // These are loops, because a closure that is not inlined is compiled without the path's instructions.
        for index in own {
            let row = &rows[index];
            let part = RowTokens { row, tokens: 0..row.tokens };
            inputs.unit(s, &part, key_head);
            for head in values(key_head) {
                inputs.unit(s, &part, key_heads + head);
            }
            let next = next(index);
            if let Some((row, key_head)) = next {
                let part = RowTokens { row, tokens: 0..row.tokens };
                inputs.prefetch(s, &part, key_head);
                for head in values(key_head) {
                    inputs.prefetch(s, &part, key_heads + head);
                }
            }
            for head in values(key_head) {
                let next = match next {
                    _ if head + 1 < values(key_head).end => Some(memories.begin(row, head + 1)),
                    Some((row, key_head)) => Some(memories.begin(row, values(key_head).start)),
                    None => None,
                };
                Head { memories, row, head, columns: 0..value_dim, next }.run(s);
            }
        }
    }
}
