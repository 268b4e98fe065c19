//! Who computes what: tiles of queries, each under one kv head, and ranges of keys where a tile takes too long for one.

use std::sync::atomic::AtomicUsize;

use super::partial::Partial;
use super::{RANGE, Sight, TILE_QUERIES};
use crate::AttentionShape;
use crate::cpu::step::Step;

/// Floats kept for the results of ranges that are computed apart: enough for 8,000 heads of 128 elements by ranges, or a
/// context of 250,000 tokens for sixteen heads. What needs more is not cut.
pub(super) const MOST_PARTIALS: usize = 1 << 20;
/// A tile is cut into ranges when it is more than one of so many shares of a thread's work.
const SHARES: usize = 4;
/// Heads are divided until there are so many pieces for each thread.
const PIECES: usize = 2;

/// Some tokens of one row.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) row: usize,
    /// Counted from the row's first token.
    pub(super) first: usize,
    pub(super) tokens: usize,
}

/// One task: a tile under one or more consecutive kv heads, or a range of its keys.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) tile: Tile,
    pub(super) kv_head: usize,
    /// Heads from `kv_head` on. Several where the tile has few queries: a page holds its heads beside each other, and is
    /// read from memory faster the more of it is wanted.
    pub(super) kv_heads: usize,
    /// `None` where the tile is not cut.
    pub(super) split: Option<KvSplit>,
}

/// One range of a tile that is cut.
#[derive(Clone, Copy)]
pub(super) struct KvSplit {
    /// The range's first key over [`RANGE`].
    pub(super) range: usize,
    /// In [`Plan::split_tiles`].
    pub(super) tile: usize,
}

/// A tile under some kv heads, cut into ranges.
pub(super) struct SplitTile {
    /// Where its results begin, range after range, in floats.
    pub(super) partials: usize,
    /// Ranges that are not done. Who brings it to none merges them.
    pub(super) left: AtomicUsize,
}

/// The pieces of one call, the longest first: nobody should start one of those when the others are done, and threads take
/// from the back of each other.
#[derive(Default)]
pub(super) struct Plan {
    tiles: Vec<Tile>,
    pub(super) pieces: Vec<Piece>,
    pub(super) split_tiles: Vec<SplitTile>,
}

/// Queries of a piece, at most.
pub(super) fn most_queries(shape: &AttentionShape) -> usize {
    TILE_QUERIES.max(shape.heads / shape.kv_heads)
}

/// Tokens of a tile.
pub(super) fn tile_tokens(shape: &AttentionShape) -> usize {
    (TILE_QUERIES / (shape.heads / shape.kv_heads)).max(1)
}

impl Plan {
    /// For the rows of a step. What is cut changes no result, so it may depend on the batch.
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
        // So many pieces, not cut, keep all threads busy.
        let each = (PIECES * threads).div_ceil(self.tiles.len().max(1));
        for &tile in &self.tiles {
            let (first, last) = keys(&tile);
            let ranges = first / RANGE..last / RANGE + 1;
            let most_heads = (TILE_QUERIES / (tile.tokens * group)).clamp(1, shape.kv_heads).min(most_heads);
            let mut kv_head = 0;
            while kv_head < shape.kv_heads {
                let rest = shape.kv_heads - kv_head;
                let kv_heads = most_heads.min(rest);
                let floats = ranges.len() * Partial::floats(kv_heads * tile.tokens * group, shape.head_dim);
                let long = cost(&tile) * SHARES * threads > all;
                if threads == 1 || ranges.len() == 1 || !long || floats > MOST_PARTIALS - partials {
                    let kv_heads = kv_heads.min((shape.kv_heads / each).max(1));
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
