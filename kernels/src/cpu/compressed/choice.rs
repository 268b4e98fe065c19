//! The choice of the entries that a token attends to.
//!
//! The entries of a token are scored in several ranges, each of which keeps its best candidates. A candidate is a
//! number that orders by score and then by index, so that the best of all candidates do not depend on the ranges.

use super::attention::{BLOCK, Token};
use super::heads::{Products, key_stride, lay_out};
use super::keys::Entries;
use crate::cpu::memory::Shared;
use crate::cpu::memory::entries::{EntriesPool, EntryLayout};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::step::Step;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, IndexerShape};

/// Minimum number of entries per range.
const LEAST_ENTRIES: usize = 256;
/// Minimum number of tokens whose choices are held at once.
const LEAST_HELD: usize = 64;

/// The operands of the choice of entries.
pub(in crate::cpu) struct IndexerOperands<'a> {
    /// `[tokens, heads * head_dim]`.
    pub(in crate::cpu) queries: &'a [f32],
    /// `[tokens, heads]`.
    pub(in crate::cpu) weights: &'a [f32],
    pub(in crate::cpu) shape: IndexerShape,
    pub(in crate::cpu) pool: &'a EntriesPool,
}

/// Number of tokens whose choices are held at once.
pub(super) fn held_tokens(threads: usize) -> usize {
    LEAST_HELD.max(4 * threads)
}

/// Number of floats of a task's working memory.
pub(super) fn floats(indexer: &IndexerOperands<'_>) -> usize {
    let IndexerShape { heads, head_dim, .. } = indexer.shape;
    let groups = heads.div_ceil(LANES);
    groups * LANES * (head_dim + 1) + BLOCK * (key_stride(head_dim) + 2 * LANES)
}

/// A range of the entries of a token.
#[derive(Clone, Copy, Debug)]
struct Scored {
    /// Index of the token.
    token: usize,
    first: usize,
    end: usize,
    /// Number of candidates.
    candidates: usize,
}

/// The choices of some tokens.
#[derive(Default)]
pub(super) struct Choices {
    ranges: Vec<Scored>,
    /// Candidates of each range, twice as many as are chosen.
    candidates: Vec<u64>,
    /// Per token, the indices of its ranges.
    of_token: Vec<(usize, usize)>,
    /// Chosen entries of each token in ascending order, `[tokens, top_k]`.
    chosen: Vec<u32>,
    top_k: usize,
}

impl Choices {
    pub(super) fn bytes(&self) -> usize {
        self.candidates.capacity() * size_of::<u64>() + self.chosen.capacity() * size_of::<u32>()
    }

    /// The entries that a token has chosen; `None` if it attends to all.
    pub(super) fn chosen(&self, token: usize) -> Option<&[u32]> {
        let (first, end) = self.of_token[token];
        (first < end).then(|| &self.chosen[token * self.top_k..][..self.top_k])
    }

    /// Divides the entries of tokens that see more than are chosen into ranges.
    fn plan(&mut self, step: &Step, tokens: &[Token], threads: usize, top_k: usize, ratio: usize) {
        let Self { ranges, candidates, of_token, chosen, .. } = self;
        ranges.clear();
        of_token.clear();
        let most = (2 * threads).div_ceil(tokens.len().max(1));
        for (index, token) in tokens.iter().enumerate() {
            let (visible, first_range) = (token.visible(step, ratio), ranges.len());
            if visible > top_k {
                let count = most.min(visible.div_ceil(LEAST_ENTRIES)).max(1);
                let share = visible.div_ceil(count).next_multiple_of(BLOCK);
                ranges.extend((0..visible).step_by(share).map(|first| Scored {
                    token: index,
                    first,
                    end: visible.min(first + share),
                    candidates: 0,
                }));
            }
            of_token.push((first_range, ranges.len()));
        }
        self.top_k = top_k;
        // The memory does not depend on the step: there are at most `2 * threads` ranges, and one more per token.
        let held = held_tokens(threads);
        candidates.resize(candidates.len().max((held + 2 * threads) * 2 * top_k), 0);
        chosen.resize(chosen.len().max(held * top_k), 0);
    }
}

/// Chooses the entries of tokens, at most as many tokens as are held at once.
pub(super) fn choose(
    path: Path,
    pool: &mut ThreadPool,
    step: &Step,
    (choices, floats): (&mut Choices, &mut [f32]),
    indexer: &IndexerOperands<'_>,
    layer: usize,
    tokens: &[Token],
) -> Result<(), DeviceError> {
    let IndexerOperands { queries, weights, shape, pool: entries } = indexer;
    let IndexerShape { heads, head_dim, top_k } = *shape;
    choices.plan(step, tokens, pool.threads(), top_k, entries.shape.ratio);
    let own = self::floats(indexer);
    let Choices { ranges, candidates, of_token, chosen, .. } = choices;
    let (floats, candidates) = (Shared::new(floats), Shared::new(&mut candidates[..]));
    let scored = Shared::new(&mut ranges[..]);
    let layout = EntryLayout::new(&entries.shape, layer);
    pool.run(scored.len(), |task, thread| {
        // SAFETY: each range belongs to one task.
        let (range, candidates) =
            unsafe { (&mut scored.slice_mut(task, 1)[0], candidates.slice_mut(task * 2 * top_k, 2 * top_k)) };
        let token = tokens[range.token];
        let row = &step.rows[token.row];
        let index = row.first_token + token.index;
        let mut best = Best::new(candidates, top_k, 0);
        path.run(Scores {
            queries: &queries[index * heads * head_dim..][..heads * head_dim],
            weights: &weights[index * heads..][..heads],
            head_dim,
            entries: Entries { data: &entries.data, layout, table: step.block_table(row) },
            first: range.first,
            end: range.end,
            // SAFETY: each thread accesses only its own range, and runs one task at a time.
            floats: unsafe { floats.slice_mut(thread * own, own) },
            best: &mut best,
        });
        best.shrink();
        range.candidates = best.count;
    })?;
    let (ranges, of_token, chosen) = (&*ranges, &*of_token, Shared::new(&mut chosen[..]));
    pool.run(tokens.len(), |token, _| {
        let (first, end) = of_token[token];
        if first == end {
            return;
        }
        // SAFETY: each token belongs to one task, and so do its ranges.
        let (candidates, chosen) = unsafe {
            (
                candidates.slice_mut(first * 2 * top_k, (end - first) * 2 * top_k),
                chosen.slice_mut(token * top_k, top_k),
            )
        };
        let (own, others) = candidates.split_at_mut(2 * top_k);
        let mut best = Best::new(own, top_k, ranges[first].candidates);
        for (range, others) in ranges[first + 1..end].iter().zip(others.chunks_exact(2 * top_k)) {
            others[..range.candidates].iter().for_each(|&candidate| best.add(candidate));
        }
        best.shrink();
        chosen.iter_mut().zip(&*best.held).for_each(|(chosen, &candidate)| *chosen = index_of(candidate));
        chosen.sort_unstable();
    })
}

/// A candidate: a number that is the larger the better the entry is. A lower index is better if scores are equal.
fn candidate(score: f32, index: usize) -> u64 {
    // 0 and -0 are equal scores.
    let bits = (score + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!(index as u32))
}

/// The index of a candidate's entry.
fn index_of(candidate: u64) -> u32 {
    !(candidate as u32)
}

/// The best of the candidates that were added, and at times a few more.
struct Best<'a> {
    /// Room for twice as many as are kept.
    held: &'a mut [u64],
    count: usize,
    top_k: usize,
    /// The worst of the best when some were dropped last. A candidate below it is not among the best.
    least: u64,
}

impl<'a> Best<'a> {
    /// `held` begins with `count` candidates.
    fn new(held: &'a mut [u64], top_k: usize, count: usize) -> Self {
        Self { held, count, top_k, least: 0 }
    }

    #[inline(always)]
    fn add(&mut self, candidate: u64) {
        if candidate < self.least {
            return;
        }
        if self.count == self.held.len() {
            self.shrink();
        }
        self.held[self.count] = candidate;
        self.count += 1;
    }

    /// Drops all but the best.
    fn shrink(&mut self) {
        if self.count > self.top_k {
            let last = self.top_k - 1;
            self.held[..self.count].select_nth_unstable_by(last, |a, b| b.cmp(a));
            self.count = self.top_k;
            self.least = self.held[last];
        }
    }
}

/// The scores of some entries for one token.
struct Scores<'a, 'b> {
    /// `[heads, head_dim]`.
    queries: &'a [f32],
    /// One per head.
    weights: &'a [f32],
    head_dim: usize,
    entries: Entries<'a>,
    first: usize,
    end: usize,
    floats: &'a mut [f32],
    best: &'a mut Best<'b>,
}

impl Op for Scores<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { queries, weights, head_dim, entries, first, end, floats, best } = self;
        let (heads, stride) = (weights.len(), key_stride(head_dim));
        let groups = heads.div_ceil(LANES);
        let (laid_out, rest) = floats.split_at_mut(groups * LANES * head_dim);
        let (factors, rest) = rest.split_at_mut(groups * LANES);
        let (keys, rest) = rest.split_at_mut(BLOCK * stride);
        let (products, rest) = rest.split_at_mut(BLOCK * LANES);
        let sums = &mut rest[..BLOCK * LANES];
        for (queries, to) in queries.chunks(LANES * head_dim).zip(laid_out.chunks_exact_mut(LANES * head_dim))
        {
            lay_out(queries, head_dim, 1.0, to);
        }
        let scale = (heads as f32).sqrt().recip() * (head_dim as f32).sqrt().recip();
        // Lanes without a head add 0.
        factors.fill(0.0);
        factors.iter_mut().zip(weights).for_each(|(factor, weight)| *factor = weight * scale);
        for first in (first..end).step_by(BLOCK) {
            let count = BLOCK.min(end - first);
            for (key, entry) in keys.chunks_exact_mut(stride).zip(first..first + count) {
                entries.read(s, entry, &mut key[..head_dim]);
            }
            let (products, sums) = (&mut products[..count * LANES], &mut sums[..count * LANES]);
            sums.fill(0.0);
            for (queries, factors) in laid_out.chunks_exact(LANES * head_dim).zip(factors.chunks_exact(LANES))
            {
                Products { queries, keys, out: products }.run(s);
                let (factors, zero) = (s.load_some(factors, 0.0), s.splat(0.0));
                for (sum, product) in sums.chunks_exact_mut(LANES).zip(products.chunks_exact(LANES)) {
                    let product = s.load_some(product, 0.0);
                    // A product that is NaN stays so.
                    let positive = s.less(product, zero, zero, product);
                    s.store_some(sum, s.fma(factors, positive, s.load_some(sum, 0.0)));
                }
            }
            for (sum, entry) in sums.chunks_exact(LANES).zip(first..) {
                best.add(candidate(s.sum(s.load_some(sum, 0.0)), entry));
            }
        }
    }
}

#[cfg(test)]
mod tests;
