//! The loop of a task over the blocks of its keys.

use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::fp8::{self, Pages, WidenPanels};
use super::kernel::{Block, Kernel, Values};
use super::panels::{Panels, Prefetch, Strides};
use super::partial::Partial;
use super::plan::{Piece, Plan, RANGE};
use super::sight::{Seen, Sight, Visible};
use super::softmax::Softmax;
use super::state::State;
use crate::cpu::gemm::tile::{Tiling, for_tile};
use crate::cpu::memory::Shared;
use crate::cpu::memory::kv::Layout;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::step::Row;
use crate::{AttentionShape, KvScales, PageId};

/// One task: a piece of the plan and its operands.
pub(super) struct KvLoop<'a, K: Kernel> {
    pub(super) qkv: &'a [f32],
    pub(super) out: &'a Shared<'a, f32>,
    /// Partial results of split tiles.
    pub(super) partials: &'a Shared<'a, f32>,
    pub(super) shape: AttentionShape,
    pub(super) sight: Sight,
    pub(super) pages: Pages<'a, K::Raw>,
    /// The scales of the layer's keys and values.
    pub(super) scales: KvScales,
    /// Memory for a block that is converted from fp8. Empty if pages are in another type.
    pub(super) widened: &'a mut [u16],
    pub(super) layout: Layout,
    pub(super) strides: Strides,
    pub(super) row: &'a Row,
    /// The row's pages.
    pub(super) table: &'a [PageId],
    pub(super) plan: &'a Plan,
    pub(super) piece: Piece,
    /// Keys of the piece that the thread will usually run next.
    pub(super) next: Option<Next<'a>>,
    pub(super) state: State<'a>,
}

/// Keys of the next piece, which are prefetched. Without the prefetch, a thread would wait for memory at the first
/// block of each task.
pub(super) struct Next<'a> {
    pub(super) table: &'a [PageId],
    pub(super) kv_head: usize,
    /// Positions of the keys. The first is the start of a block.
    pub(super) keys: Range<usize>,
}

impl<K: Kernel> Op for KvLoop<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let queries = Tiling::new(self.head_queries(), S::TILE_ROWS);
        self.take_queries(s, queries);
        let last = self.position(self.piece.tile.tokens - 1);
        let ranges = self.sight.first(self.position(0)) / RANGE..last / RANGE + 1;
        let Some(split) = self.piece.split else {
            if ranges.len() == 1 {
                self.range(s, queries, ranges.start);
                std::mem::swap(&mut self.state.range, &mut self.state.whole);
            } else {
                self.state.whole.clear();
                for range in ranges {
                    self.range(s, queries, range);
                    self.state.whole.merge(s, &self.state.range);
                }
            }
            return self.write_results(s);
        };
        let split_tile = &self.plan.split_tiles[split.tile];
        let (head_dim, count) = (self.shape.head_dim, self.queries());
        let floats = Partial::floats(count, head_dim);
        let partial = |range: usize| {
            let first = split_tile.partials + (range - ranges.start) * floats;
            // SAFETY: each range has its own slice. Only the range's task accesses the slice until the range is counted
            // as done. After that, only the task that counts the last range accesses it.
            Partial::new(unsafe { self.partials.slice_mut(first, floats) }, count, head_dim)
        };
        let own = std::mem::replace(&mut self.state.range, partial(split.range));
        self.range(s, queries, split.range);
        self.state.range = own;
        // The decrement publishes this range's result. The task that decrements to zero sees the results of all ranges.
        if split_tile.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.state.whole.clear();
            for range in ranges.clone() {
                self.state.whole.merge(s, &partial(range));
            }
            self.write_results(s);
        }
    }
}

impl<K: Kernel> KvLoop<'_, K> {
    fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Number of queries per kv head.
    fn head_queries(&self) -> usize {
        self.piece.tile.tokens * self.group()
    }

    /// Number of queries of the piece. They are ordered by kv head.
    fn queries(&self) -> usize {
        self.piece.kv_heads * self.head_queries()
    }

    /// Position of a token in its request. `token` is counted from the tile's first token.
    #[inline(always)]
    fn position(&self, token: usize) -> usize {
        self.row.start + self.piece.tile.first + token
    }

    /// Scales the queries of `self.piece` and writes them to `self.state`.
    #[inline(always)]
    fn take_queries<S: Simd>(&mut self, s: S, tiling: Tiling) {
        let (group, head_dim) = (self.group(), self.shape.head_dim);
        let width = (self.shape.heads + 2 * self.shape.kv_heads) * head_dim;
        let scale = self.shape.scale * LOG2_E * self.scales.key;
        let rows = self.row.first_token + self.piece.tile.first;
        // The tokens of a tile are far apart in memory and may be in another core's cache, so they are prefetched.
        for token in 0..self.piece.tile.tokens {
            let from = (rows + token) * width + self.piece.kv_head * group * head_dim;
            for line in (0..self.piece.kv_heads * group * head_dim).step_by(LANES) {
                s.prefetch(self.qkv.as_ptr().wrapping_add(from + line).cast());
            }
        }
        for head in 0..self.piece.kv_heads {
            let first_head = (self.piece.kv_head + head) * group;
            let query = |query: usize| {
                let from = (rows + query / group) * width + (first_head + query % group) * head_dim;
                &self.qkv[from..from + head_dim]
            };
            for index in 0..tiling.tiles {
                let (first, count) = tiling.tile(index);
                let to = (head * tiling.end(tiling.tiles) + first) * head_dim;
                let q = &mut self.state.q[to..to + count * head_dim];
                for_tile!(S, count, lay_out_queries::<S, K, R, P>(s, first, query, scale, q));
            }
        }
    }

    /// Computes attention over the keys of one range, into `state.range`.
    #[inline(always)]
    fn range<S: Simd>(&mut self, s: S, queries: Tiling, range: usize) {
        self.state.range.clear();
        let last = self.position(self.piece.tile.tokens - 1);
        let first = self.sight.first(self.position(0)).max(range * RANGE) / K::BLOCK;
        let end = (last + 1).min((range + 1) * RANGE).div_ceil(K::BLOCK);
        let mut panels = self.panels(first * K::BLOCK);
        for block in first..end {
            let next = self.next_panels((block + 1) * K::BLOCK).unwrap_or(panels);
            self.block(s, queries, block * K::BLOCK, (panels, next));
            panels = next;
        }
    }

    /// Adds the block at `start` to the results of all queries that see at least one of its keys. `panels` holds the
    /// block's panels and the panels of the block to prefetch.
    #[inline(always)]
    fn block<S: Simd>(&mut self, s: S, tiling: Tiling, start: usize, panels: (Panels, Panels)) {
        let (head_dim, own) = (self.shape.head_dim, self.head_queries());
        let mut prefetch = Prefetch::new(panels.1, self.piece.kv_heads);
        for head in 0..self.piece.kv_heads {
            let (mut block, narrow) = self.block_of_head(s, &panels.0, head, &mut prefetch);
            for index in 0..tiling.tiles {
                let (first, count) = tiling.tile(index);
                let Some(seen) = self.seen(first, count, start) else { continue };
                let panels = (seen.any.first / LANES, seen.any.end.div_ceil(LANES));
                let first = head * own + first;
                let q = &self.state.q[first * head_dim..(first + count) * head_dim];
                let scores = &mut self.state.scores[first * K::BLOCK..(first + count) * K::BLOCK];
                for_tile!(S, count, K::scores::<S, R, P>(s, q, &block, panels, scores));
                // Only the first tile prefetches. Later tiles get the addresses of the current block, which is already
                // in the cache.
                block.next_keys = block.keys;
            }
            if let (Some(Block { values, next_values, .. }), Some(form)) = (&narrow, K::FROM_FP8) {
                let (panels, panel) = (panels.0.seen(), self.strides.panel());
                let (_, to) = self.widened.split_at_mut(self.widened.len() / 2);
                s.call(WidenPanels { from: values, next: next_values, panels, panel, form, to });
            }
            for index in 0..tiling.tiles {
                let (first, count) = tiling.tile(index);
                let Some(seen) = self.seen(first, count, start) else { continue };
                let visible = self.all_visible(first, count, start);
                let first = head * own + first;
                self.softmax(s, first, count, seen, &visible);
                let values = Values {
                    block: &block,
                    seen,
                    visible: &visible,
                    head_dim,
                    weights: &self.state.scores[first * K::BLOCK..(first + count) * K::BLOCK],
                    decay: &self.state.decay[first..first + count],
                    sums: &mut self.state.range.sums[first * head_dim..(first + count) * head_dim],
                };
                K::add_values(s, values);
                block.next_values = block.values;
            }
        }
    }

    /// Returns the addresses of one head's panels. If the pages are in fp8, these are those of converted panels, whose
    /// keys are there, and the block of fp8 comes along.
    #[inline(always)]
    fn block_of_head<S: Simd>(
        &mut self,
        s: S,
        panels: &Panels,
        head: usize,
        prefetch: &mut Prefetch,
    ) -> (Block<K::Raw>, Option<Block<u8>>) {
        match (self.pages, const { K::FROM_FP8 }) {
            (Pages::Fp8(data), Some(form)) => {
                let (narrow, panel) =
                    (panels.of_head(data, self.strides, head, prefetch), self.strides.panel());
                let (to, _) = self.widened.split_at_mut(self.widened.len() / 2);
                let (from, next) = (&narrow.keys, &narrow.next_keys);
                s.call(WidenPanels { from, next, panels: panels.seen(), panel, form, to });
                (fp8::block_of(self.widened, panel), Some(narrow))
            }
            (Pages::Full(data), _) => (panels.of_head(data, self.strides, head, prefetch), None),
            (Pages::Fp8(_), None) => unreachable!("fp8 pages and a kernel over f32"),
        }
    }

    #[inline(always)]
    fn softmax<S: Simd>(&mut self, s: S, first: usize, count: usize, seen: Seen, visible: &[Visible; LANES]) {
        let Partial { largest, total, .. } = &mut self.state.range;
        let (Some(largest), Some(decay)) =
            (largest[first..].first_chunk_mut(), self.state.decay[first..].first_chunk_mut())
        else {
            unreachable!("sixteen floats of padding follow the last query")
        };
        let scores = &mut self.state.scores[first * K::BLOCK..(first + count) * K::BLOCK];
        let total = &mut total[first..first + count];
        let any = seen.any;
        s.call(Softmax::<K> { scores, visible, any, largest, total, decay, kernel: PhantomData });
    }

    /// The keys of the block at `start` that a query sees. `query` is counted from its kv head's first query.
    #[inline(always)]
    fn visible(&self, query: usize, start: usize) -> Visible {
        self.sight.of_block(K::BLOCK, self.position(query / self.group()), start)
    }

    /// The keys of the block at `start` that each of `count` queries from `first` on sees.
    #[inline(always)]
    fn all_visible(&self, first: usize, count: usize, start: usize) -> [Visible; LANES] {
        let group = self.group();
        let (mut token, mut left) = (first / group, group - first % group);
        let of_token = |token| self.sight.of_block(K::BLOCK, self.position(token), start);
        let mut visible = [of_token(token); LANES];
        for query in &mut visible[..count] {
            if left == 0 {
                (token, left) = (token + 1, group);
            }
            *query = of_token(token);
            left -= 1;
        }
        visible
    }

    /// The keys of the block at `start` that `count` queries from `first` on see; `None` if the queries see no key of
    /// the block. Both ends of a query's visible keys ascend with the query's position, so the first and the last query
    /// determine the result.
    #[inline(always)]
    fn seen(&self, first: usize, count: usize, start: usize) -> Option<Seen> {
        let (first, last) = (self.visible(first, start), self.visible(first + count - 1, start));
        let any = Visible { first: first.first, end: last.end };
        let common = Visible { first: last.first, end: first.end };
        (any.first < any.end).then_some(Seen { any, common })
    }

    /// The panels of the block at `start` that the tile sees.
    #[inline(always)]
    fn panels(&self, start: usize) -> Panels {
        let (first, last) = (self.sight.first(self.position(0)), self.position(self.piece.tile.tokens - 1));
        let seen = self.sight_of(first..last + 1, start);
        Panels::new(&self.layout, self.table, self.piece.kv_head, start, seen)
    }

    /// Returns the panels of the piece's next block. After the piece's last block, returns those of the first block of
    /// the piece that the thread will usually run next. `start` is the first key after the current block.
    #[inline(always)]
    fn next_panels(&self, start: usize) -> Option<Panels> {
        let last = self.position(self.piece.tile.tokens - 1);
        let end = self.piece.split.map_or(last + 1, |split| (last + 1).min((split.range + 1) * RANGE));
        if start < end {
            return Some(self.panels(start));
        }
        let next = self.next.as_ref()?;
        let seen = self.sight_of(next.keys.clone(), next.keys.start);
        Some(Panels::new(&self.layout, next.table, next.kv_head, next.keys.start, seen))
    }

    /// Returns the part of the position range `keys` that lies in the block at `start`, counted from `start`.
    #[inline(always)]
    fn sight_of(&self, keys: Range<usize>, start: usize) -> Visible {
        let first = keys.start.saturating_sub(start).min(K::BLOCK);
        Visible { first, end: keys.end.saturating_sub(start).min(K::BLOCK) }
    }

    /// Divides the sums by the totals and writes the tile's results.
    #[inline(always)]
    fn write_results<S: Simd>(&mut self, s: S) {
        let (group, head_dim, own) = (self.group(), self.shape.head_dim, self.head_queries());
        for query in 0..self.queries() {
            let token = self.row.first_token + self.piece.tile.first + query % own / group;
            let head = (self.piece.kv_head + query / own) * group + query % group;
            // SAFETY: each (token, head) belongs to one tile, and only one task writes the tile's results.
            let to = unsafe { self.out.slice_mut((token * self.shape.heads + head) * head_dim, head_dim) };
            let (total, scale) = (s.splat(self.state.whole.total[query]), s.splat(self.scales.value));
            let sums = &self.state.whole.sums[query * head_dim..(query + 1) * head_dim];
            for (to, sum) in to.chunks_mut(LANES).zip(sums.chunks(LANES)) {
                s.store_some(to, s.mul(s.div(s.load_some(sum, 0.0), total), scale));
            }
        }
    }
}

/// Writes the `R` queries of a tile that begins with query `first` to `q`. `_P` is the number of panels that
/// [`for_tile`] assigns to `R`.
#[inline(always)]
fn lay_out_queries<'q, S: Simd, K: Kernel, const R: usize, const _P: usize>(
    s: S,
    first: usize,
    query: impl Fn(usize) -> &'q [f32],
    scale: f32,
    q: &mut [f32],
) {
    let mut queries: [&[f32]; R] = [&[]; R];
    for (index, to) in queries.iter_mut().enumerate() {
        *to = query(first + index);
    }
    K::lay_out_queries(s, &queries, scale, q);
}
