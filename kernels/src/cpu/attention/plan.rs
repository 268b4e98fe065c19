//! The division of attention into tasks. A task computes one tile of queries for one or more kv heads. A tile that
//! takes too long for one task is divided into ranges of keys, with one task per range.

use std::sync::atomic::AtomicUsize;

use super::partial::Partial;
use super::sight::Sight;
use crate::AttentionShape;
use crate::cpu::step::Step;

/// Number of keys per range: a multiple of every kernel's block. For a query, merging the result of a range takes about
/// as long as computing two keys.
pub(super) const RANGE: usize = 512;
/// Maximum number of queries (tokens times query heads per kv head) that share the reads of a block.
const TILE_QUERIES: usize = 48;
/// Number of floats for the partial results of split tiles: enough for 8,000 partial results of a query head with 128
/// elements, for example those of sixteen heads over a context of 250,000 tokens. A tile that would need more is not
/// split.
pub(super) const MOST_PARTIALS: usize = 1 << 20;
/// A tile is split into ranges if its cost is more than `1 / SHARES` of a thread's average work.
const SHARES: usize = 4;
/// Minimum number of pieces per thread. If there would be fewer pieces, each piece takes fewer kv heads.
const PIECES: usize = 2;

/// Consecutive tokens of one row.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) row: usize,
    /// Index of the tile's first token, counted from the row's first token.
    pub(super) first: usize,
    pub(super) tokens: usize,
}

/// One task: a tile with one or more consecutive kv heads, over all its keys or over one range of them.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) tile: Tile,
    pub(super) kv_head: usize,
    /// Number of heads from `kv_head` on. A piece with few queries has several heads, because a page's heads are
    /// adjacent in memory, and long reads use more of the memory's bandwidth.
    pub(super) kv_heads: usize,
    /// The range of keys; `None` if the tile is not split.
    pub(super) split: Option<KvSplit>,
}

/// One range of the keys of a split tile.
#[derive(Clone, Copy)]
pub(super) struct KvSplit {
    /// Index of the range: its first key divided by [`RANGE`].
    pub(super) range: usize,
    /// Index in [`Plan::split_tiles`].
    pub(super) tile: usize,
}

/// A tile with its kv heads, split into ranges of keys.
pub(super) struct SplitTile {
    /// Index of the first float of the tile's partial results, which are ordered by range.
    pub(super) partials: usize,
    /// Number of ranges that are not done. The task that decrements this number to zero merges the results.
    pub(super) left: AtomicUsize,
}

/// The pieces of one call, the longest first, because a long piece that starts late delays the end of the call. Idle
/// threads take pieces from the end of other threads' shares, where pieces are short.
#[derive(Default)]
pub(super) struct Plan {
    tiles: Vec<Tile>,
    pub(super) pieces: Vec<Piece>,
    pub(super) split_tiles: Vec<SplitTile>,
}

/// Maximum number of queries per piece.
pub(super) fn most_queries(shape: &AttentionShape) -> usize {
    TILE_QUERIES.max(shape.heads / shape.kv_heads)
}

/// Number of tokens per tile.
pub(super) fn tile_tokens(shape: &AttentionShape) -> usize {
    (TILE_QUERIES / (shape.heads / shape.kv_heads)).max(1)
}

impl Plan {
    /// Makes the plan for the rows of a step. Splits change no result, so they may depend on the batch.
    pub(super) fn make(&mut self, step: &Step, shape: &AttentionShape, threads: usize, most_heads: usize) {
        let (tile_tokens, group) = (tile_tokens(shape), shape.heads / shape.kv_heads);
        self.tiles.clear();
        self.pieces.clear();
        self.split_tiles.clear();
        for (index, row) in step.rows.iter().enumerate() {
            let tiles = (0..row.tokens).step_by(tile_tokens);
            self.tiles.extend(tiles.map(|first| {
                let tokens = tile_tokens.min(row.tokens - first);
                Tile { row: index, first, tokens }
            }));
        }
        let sight = Sight { window: shape.window };
        let keys = |tile: &Tile| {
            let position = step.rows[tile.row].start + tile.first;
            (sight.first(position), position + tile.tokens - 1)
        };
        let cost = |tile: &Tile| {
            let (first, last) = keys(tile);
            (last + 1 - first) * tile.tokens
        };
        self.tiles.sort_unstable_by_key(|tile| std::cmp::Reverse(cost(tile)));
        let all: usize = self.tiles.iter().map(cost).sum::<usize>() * shape.kv_heads;
        let mut partials = 0;
        // Number of pieces per tile that is enough to keep all threads busy without splits.
        let each = (PIECES * threads).div_ceil(self.tiles.len().max(1));
        for &tile in &self.tiles {
            let (first, last) = keys(&tile);
            let ranges = first / RANGE..last / RANGE + 1;
            let most_heads = (TILE_QUERIES / (tile.tokens * group)).clamp(1, shape.kv_heads).min(most_heads);
            let mut kv_head = 0;
            while kv_head < shape.kv_heads {
                let rest = shape.kv_heads - kv_head;
                // Each range is a piece of its own, so a split tile keeps the threads busy even with more heads per
                // piece.
                let busy = |ranges: usize| (shape.kv_heads * ranges / each).max(1);
                let kv_heads = most_heads.min(rest).min(busy(ranges.len()));
                let floats = ranges.len() * Partial::floats(kv_heads * tile.tokens * group, shape.head_dim);
                let long = cost(&tile) * SHARES * threads > all;
                if threads == 1 || ranges.len() == 1 || !long || floats > MOST_PARTIALS - partials {
                    let kv_heads = kv_heads.min(busy(1));
                    self.pieces.push(Piece { tile, kv_head, kv_heads, split: None });
                    kv_head += kv_heads;
                    continue;
                }
                let split_tile = self.split_tiles.len();
                self.split_tiles.push(SplitTile { partials, left: AtomicUsize::new(ranges.len()) });
                partials += floats;
                let splits = ranges.clone().map(|range| KvSplit { range, tile: split_tile });
                self.pieces.extend(splits.map(|split| Piece { tile, kv_head, kv_heads, split: Some(split) }));
                kv_head += kv_heads;
            }
        }
    }
}

#[cfg(test)]
mod tests;
