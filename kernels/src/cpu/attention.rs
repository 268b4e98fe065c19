//! Causal attention over paged keys and values, for ragged batches of prefills and decodes alike.
//!
//! A query walks over *blocks* of [`BLOCK`] keys, aligned to absolute positions, from the first that its window
//! reaches to its own, and keeps a running maximum, sum and weighted sum of values (online softmax). Which blocks those
//! are, their order, and every sum within a block follow from the query's own position and the window alone, so its
//! result has the same bits in any chunk and beside any batch-mates. Queries that share keys are computed side by side
//! only to share reads: a kv head's whole group of query heads, for a few tokens of one request.
//!
//! Keys that a query does not see are masked before the softmax, and their values are never read: a page's unwritten
//! slots may hold anything, and 0 * NaN would be NaN.

use super::format::{Format, STEP, with_format};
use super::isa::Path;
use super::kv::{KvPool, Layout};
use super::memory::{Buffer, Shared};
use super::pool::ThreadPool;
use super::simd::{LANES, Op, Simd, exp};
use super::step::{Row, Step};
use super::tile::{Rows, Tiling, for_tile, product, weighted_sum};
use crate::{AttentionShape, DeviceError, PageId};

/// Keys of a block.
const BLOCK: usize = 64;
/// Panels of sixteen keys in a block.
const BLOCK_PANELS: usize = BLOCK / LANES;
/// Query rows (tokens by heads of a group) that share the reads of a block.
const TILE_QUERIES: usize = 48;

/// Some tokens of one row.
#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    /// Counted from the row's first token.
    first: usize,
    tokens: usize,
}

/// What attention keeps from call to call.
#[derive(Default)]
pub(super) struct Scratch {
    tiles: Vec<Tile>,
    /// A part for each thread.
    floats: Option<Buffer<f32>>,
}

impl Scratch {
    /// What it has taken, which is the same for every step of a model but for the list of tiles.
    pub(super) fn bytes(&self) -> usize {
        self.floats.as_ref().map_or(0, |floats| floats.len() * size_of::<f32>())
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
    let Attention { qkv, shape, kv, layer, out } = operands;
    let group = shape.heads / shape.kv_heads;
    let tile_tokens = (TILE_QUERIES / group).max(1);
    let queries = tile_tokens * group;
    // The longest contexts first: they take longest, and nobody should start one when the others are done.
    scratch.tiles.clear();
    for (index, row) in step.rows.iter().enumerate() {
        let tiles = (0..row.tokens).step_by(tile_tokens);
        scratch.tiles.extend(tiles.map(|first| {
            let tokens = tile_tokens.min(row.tokens - first);
            Tile { row: index, first, tokens }
        }));
    }
    scratch.tiles.sort_unstable_by_key(|tile| std::cmp::Reverse(step.rows[tile.row].start + tile.first));
    let part = queries * (2 * shape.head_dim + BLOCK + 3);
    let wanted = pool.threads() * part;
    if scratch.floats.as_ref().is_none_or(|floats| floats.len() < wanted) {
        scratch.floats = Some(Buffer::zeroed(wanted, "attention scratch")?);
    }
    let Some(floats) = scratch.floats.as_mut() else { return Ok(()) };
    let (tiles, floats, out) = (&scratch.tiles, Shared::new(floats), Shared::new(out));
    let layout = Layout::new(&kv.shape, layer);
    with_format!(&kv.data, Fmt, data => pool.run(tiles.len() * shape.kv_heads, |task, thread| {
        let (tile, kv_head) = (tiles[task / shape.kv_heads], task % shape.kv_heads);
        let row = &step.rows[tile.row];
        // SAFETY: each thread has a part of its own, and runs one task at a time.
        let floats = unsafe { floats.part(thread * part, part) };
        let state = State::new(floats, queries, shape.head_dim);
        let table = step.block_table(row);
        path.run(TileTask::<Fmt> { qkv, out: &out, shape, data, layout, row, tile, table, kv_head, state });
    }))
}

/// A task's working memory, by query.
struct State<'a> {
    /// `[queries, head_dim]`.
    q: &'a mut [f32],
    /// Weighted sums of values, `[queries, head_dim]`.
    sums: &'a mut [f32],
    /// Scores, then their exponentials, `[queries, BLOCK]`.
    scores: &'a mut [f32],
    /// The largest score so far.
    largest: &'a mut [f32],
    /// The sum of exponentials so far.
    total: &'a mut [f32],
    /// What the sums of earlier blocks are to be multiplied with.
    decay: &'a mut [f32],
}

impl<'a> State<'a> {
    fn new(floats: &'a mut [f32], queries: usize, head_dim: usize) -> Self {
        let (q, rest) = floats.split_at_mut(queries * head_dim);
        let (sums, rest) = rest.split_at_mut(queries * head_dim);
        let (scores, rest) = rest.split_at_mut(queries * BLOCK);
        let (largest, rest) = rest.split_at_mut(queries);
        let (total, decay) = rest.split_at_mut(queries);
        Self { q, sums, scores, largest, total, decay }
    }
}

/// The keys of a block that a query sees, counted from the block's start.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Visible {
    first: usize,
    end: usize,
}

/// A tile of tokens under one kv head.
struct TileTask<'a, W: Format> {
    qkv: &'a [f32],
    out: &'a Shared<'a, f32>,
    shape: AttentionShape,
    data: &'a [W::Raw],
    layout: Layout,
    row: &'a Row,
    tile: Tile,
    table: &'a [PageId],
    kv_head: usize,
    state: State<'a>,
}

impl<W: Format> Op for TileTask<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.take_queries();
        let start = self.position(0);
        let last = self.position(self.tile.tokens - 1);
        for block in self.first_visible(start) / BLOCK..=last / BLOCK {
            self.block(s, block * BLOCK);
        }
        self.give_results(s);
    }
}

impl<W: Format> TileTask<'_, W> {
    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Of a token, counted from the tile's first.
    #[inline(always)]
    fn position(&self, token: usize) -> usize {
        self.row.start + self.tile.first + token
    }

    /// The position one block after this one, which will be wanted next; itself if the tile does not reach that far.
    #[inline(always)]
    fn later(&self, position: usize) -> usize {
        let later = position + BLOCK;
        if later <= self.position(self.tile.tokens - 1) { later } else { position }
    }

    /// The first key that a query at `position` sees: the one place that knows about windows.
    #[inline(always)]
    fn first_visible(&self, position: usize) -> usize {
        self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// What a query at `position` sees of the block at `start`; `None` if nothing.
    #[inline(always)]
    fn visible(&self, position: usize, start: usize) -> Option<Visible> {
        let first = self.first_visible(position).max(start) - start;
        let end = (position + 1).min(start + BLOCK).saturating_sub(start);
        (first < end).then_some(Visible { first, end })
    }

    /// Copies the tile's queries and starts their sums.
    #[inline(always)]
    fn take_queries(&mut self) {
        let (group, head_dim) = (self.group(), self.shape.head_dim);
        let width = (self.shape.heads + 2 * self.shape.kv_heads) * head_dim;
        let queries = self.tile.tokens * group;
        for token in 0..self.tile.tokens {
            let from = (self.row.first_token + self.tile.first + token) * width;
            let from = &self.qkv[from + self.kv_head * group * head_dim..][..group * head_dim];
            self.state.q[token * group * head_dim..][..group * head_dim].copy_from_slice(from);
        }
        self.state.sums[..queries * head_dim].fill(0.0);
        self.state.largest[..queries].fill(f32::NEG_INFINITY);
        self.state.total[..queries].fill(0.0);
    }

    /// Lets every query that sees some of the block at `start` take it in.
    #[inline(always)]
    fn block<S: Simd>(&mut self, s: S, start: usize) {
        let group = self.group();
        // Tokens that see some of it are neighbours: those before come too early, those after have moved past it.
        let sees = |task: &Self, token: usize| task.visible(task.position(token), start);
        let mut first = 0;
        while first < self.tile.tokens && sees(self, first).is_none() {
            first += 1;
        }
        let mut end = first;
        let mut panels = (BLOCK_PANELS, 0);
        while let Some(visible) = (end < self.tile.tokens).then(|| sees(self, end)).flatten() {
            panels = (panels.0.min(visible.first / LANES), panels.1.max(visible.end.div_ceil(LANES)));
            end += 1;
        }
        let rows = Tiling::new((end - first) * group, S::ACCUMULATORS);
        for index in 0..rows.tiles {
            let (query, count) = rows.tile(index);
            for_tile!(S, count, {
                let query = first * group + query;
                s.call(Scores::<W, R, P> { task: self, query, start, panels })
            });
        }
        let mut token = first;
        while token < end {
            // Tokens that see the same part of the block, mostly all of it, share the reads of its values.
            let Some(visible) = sees(self, token) else { break };
            let mut after = token;
            while after < end && sees(self, after) == Some(visible) {
                (after * group..(after + 1) * group).for_each(|query| self.softmax(s, query, visible));
                after += 1;
            }
            let rows = Tiling::new((after - token) * group, S::ACCUMULATORS);
            for index in 0..rows.tiles {
                let (query, count) = rows.tile(index);
                for_tile!(S, count, {
                    let query = token * group + query;
                    s.call(Weigh::<W, R, P> { task: self, query, start, visible })
                });
            }
            token = after;
        }
    }

    #[inline(always)]
    fn score_panels<S: Simd, const R: usize, const P: usize>(
        &mut self,
        s: S,
        query: usize,
        start: usize,
        panel: usize,
    ) {
        let head_dim = self.shape.head_dim;
        let (mut panels, mut next) = ([self.data.as_ptr(); P], [self.data.as_ptr(); P]);
        for p in 0..P {
            let position = start + (panel + p) * LANES;
            let at = self.layout.key_panel(self.table, self.kv_head, position);
            panels[p] = self.data[at..at + LANES * head_dim].as_ptr();
            let at = self.layout.key_panel(self.table, self.kv_head, self.later(position));
            next[p] = self.data[at..].as_ptr();
        }
        let q = self.state.q[query * head_dim..(query + R) * head_dim].as_ptr();
        let x = Rows { start: q, row_stride: head_dim, input_stride: 1 };
        // SAFETY: both slices above; a head's elements are even in number.
        let scores = unsafe {
            product::<S, W, R, P>(s, x, panels, head_dim / 2, |p, step| next[p].wrapping_add(step * STEP))
        };
        for (r, scores) in scores.iter().enumerate() {
            for (p, &scores) in scores.iter().enumerate() {
                let to = &mut self.state.scores[(query + r) * BLOCK + (panel + p) * LANES..][..LANES];
                s.store_some(to, s.mul(scores, s.splat(self.shape.scale)));
            }
        }
    }

    /// Turns a query's scores into exponentials, and moves its maximum and total on.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, s: S, query: usize, visible: Visible) {
        const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
        let lowest = s.splat(f32::NEG_INFINITY);
        let scores = &mut self.state.scores[query * BLOCK..(query + 1) * BLOCK];
        let blocks = visible.first / LANES..visible.end.div_ceil(LANES);
        let mut largest = lowest;
        for block in blocks.clone() {
            let lanes = &mut scores[block * LANES..(block + 1) * LANES];
            let mut score = s.load_some(lanes, 0.0);
            if block * LANES < visible.first || (block + 1) * LANES > visible.end {
                let lane = s.load_some(&LANE, 0.0);
                let first = visible.first as f32 - (block * LANES) as f32;
                let end = visible.end as f32 - (block * LANES) as f32;
                score = s.less(lane, s.splat(first), lowest, score);
                score = s.less(lane, s.splat(end), score, lowest);
                s.store_some(lanes, score);
            }
            largest = s.max(score, largest);
        }
        let before = self.state.largest[query];
        let largest = before.max(s.largest(largest));
        let mut total = s.splat(0.0);
        for block in blocks {
            let lanes = &mut scores[block * LANES..(block + 1) * LANES];
            let weight = exp(s, s.sub(s.load_some(lanes, 0.0), s.splat(largest)));
            s.store_some(lanes, weight);
            total = s.add(total, weight);
        }
        // Also for the first block, where it is exp(-infinity) = 0; never -infinity less itself.
        let decay = if before == largest { 1.0 } else { (before - largest).exp() };
        self.state.largest[query] = largest;
        self.state.total[query] = self.state.total[query] * decay + s.sum(total);
        self.state.decay[query] = decay;
    }

    #[inline(always)]
    fn weigh_columns<S: Simd, const R: usize, const P: usize>(
        &mut self,
        s: S,
        query: usize,
        start: usize,
        visible: Visible,
        column: usize,
    ) {
        let head_dim = self.shape.head_dim;
        let mut sums = [[s.splat(0.0); P]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            let decay = s.splat(self.state.decay[query + r]);
            let from = &self.state.sums[(query + r) * head_dim + column * LANES..][..P * LANES];
            for (p, sum) in sums.iter_mut().enumerate() {
                *sum = s.mul(s.load_some(&from[p * LANES..], 0.0), decay);
            }
        }
        let mut first = visible.first;
        while first < visible.end {
            // Sixteen keys never straddle a page.
            let end = visible.end.min((first / LANES + 1) * LANES);
            let at = self.layout.value(self.table, self.kv_head, start + first) + column * LANES;
            let values = self.data[at..at + (end - first - 1) * head_dim + P * LANES].as_ptr();
            let later = self.later(start + first);
            let next =
                self.data[self.layout.value(self.table, self.kv_head, later) + column * LANES..].as_ptr();
            let weights = self.state.scores[query * BLOCK + first..(query + R - 1) * BLOCK + end].as_ptr();
            // SAFETY: both slices above.
            unsafe {
                weighted_sum::<S, W, R, P>(s, &mut sums, weights, BLOCK, values, next, head_dim, end - first);
            }
            first = end;
        }
        for (r, sums) in sums.iter().enumerate() {
            let to = &mut self.state.sums[(query + r) * head_dim + column * LANES..][..P * LANES];
            for (p, &sum) in sums.iter().enumerate() {
                s.store_some(&mut to[p * LANES..(p + 1) * LANES], sum);
            }
        }
    }

    /// Divides by the totals and writes the tile's results.
    #[inline(always)]
    fn give_results<S: Simd>(&mut self, s: S) {
        let (group, head_dim) = (self.group(), self.shape.head_dim);
        for query in 0..self.tile.tokens * group {
            let token = self.row.first_token + self.tile.first + query / group;
            let head = self.kv_head * group + query % group;
            // SAFETY: each (token, head) belongs to one task.
            let to = unsafe { self.out.part((token * self.shape.heads + head) * head_dim, head_dim) };
            let total = s.splat(self.state.total[query]);
            let sums = &self.state.sums[query * head_dim..(query + 1) * head_dim];
            for (to, sum) in to.chunks_mut(LANES).zip(sums.chunks(LANES)) {
                s.store_some(to, s.div(s.load_some(sum, 0.0), total));
            }
        }
    }
}

/// Scores of `R` queries from `query` on against panels of the block at `start`, before the softmax.
struct Scores<'t, 'a, W: Format, const R: usize, const P: usize> {
    task: &'t mut TileTask<'a, W>,
    query: usize,
    start: usize,
    panels: (usize, usize),
}

impl<W: Format, const R: usize, const P: usize> Op for Scores<'_, '_, W, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mut panel, end) = self.panels;
        while panel + P <= end {
            self.task.score_panels::<S, R, P>(s, self.query, self.start, panel);
            panel += P;
        }
        while panel < end {
            self.task.score_panels::<S, R, 1>(s, self.query, self.start, panel);
            panel += 1;
        }
    }
}

/// Adds the values of the block at `start`, weighted, to the sums of `R` queries that see the same part of it.
struct Weigh<'t, 'a, W: Format, const R: usize, const P: usize> {
    task: &'t mut TileTask<'a, W>,
    query: usize,
    start: usize,
    visible: Visible,
}

impl<W: Format, const R: usize, const P: usize> Op for Weigh<'_, '_, W, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.task.shape.head_dim / LANES;
        let mut column = 0;
        while column + P <= columns {
            self.task.weigh_columns::<S, R, P>(s, self.query, self.start, self.visible, column);
            column += P;
        }
        while column < columns {
            self.task.weigh_columns::<S, R, 1>(s, self.query, self.start, self.visible, column);
            column += 1;
        }
    }
}
