//! Who computes what: tiles of queries, each under one kv head, and ranges of keys where a tile takes too long for one.

use std::sync::atomic::AtomicUsize;

use super::super::step::Step;
use super::partial::Partial;
use super::{RANGE, Sight, TILE_QUERIES};
use crate::AttentionShape;

/// Floats kept for the results of ranges that are computed apart: those of 60,000 queries of 128-element heads by
/// ranges. What needs more is not cut.
pub(super) const MOST_PARTIALS: usize = 8 << 20;
/// A tile is cut into ranges when it is more than one of so many shares of each thread's work.
const SHARES: usize = 4;

/// Some tokens of one row.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) row: usize,
    /// Counted from the row's first token.
    pub(super) first: usize,
    pub(super) tokens: usize,
}

/// One task: a tile under one kv head, or a range of its keys.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) tile: Tile,
    pub(super) kv_head: usize,
    /// `None` where the tile is not cut.
    pub(super) part: Option<Part>,
}

/// One range of a tile that is cut.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The range's first key over [`RANGE`].
    pub(super) range: usize,
    /// In [`Plan::cuts`].
    pub(super) cut: usize,
}

/// A tile under one kv head, cut into ranges.
pub(super) struct Cut {
    /// Where its results begin, range after range, in floats.
    pub(super) partials: usize,
    /// Ranges that are not done. Who brings it to none merges them.
    pub(super) left: AtomicUsize,
}

/// The pieces of one call, the longest first: nobody should start one of those when the others are done.
#[derive(Default)]
pub(super) struct Plan {
    tiles: Vec<Tile>,
    pub(super) pieces: Vec<Piece>,
    pub(super) cuts: Vec<Cut>,
}

/// Tokens of a tile.
pub(super) fn tile_tokens(shape: &AttentionShape) -> usize {
    (TILE_QUERIES / (shape.heads / shape.kv_heads)).max(1)
}

impl Plan {
    /// For the rows of a step. What is cut changes no result, so it may depend on the batch.
    pub(super) fn make(&mut self, step: &Step, shape: &AttentionShape, threads: usize) {
        let (tile_tokens, group) = (tile_tokens(shape), shape.heads / shape.kv_heads);
        self.tiles.clear();
        self.pieces.clear();
        self.cuts.clear();
        for (index, row) in step.rows.iter().enumerate() {
            let tiles = (0..row.tokens).step_by(tile_tokens);
            self.tiles.extend(tiles.map(|first| {
                let tokens = tile_tokens.min(row.tokens - first);
                Tile { row: index, first, tokens }
            }));
        }
        let sight = Sight { window: shape.window };
        let span = |tile: &Tile| {
            let position = step.rows[tile.row].start + tile.first;
            (sight.first(position), position + tile.tokens - 1)
        };
        let cost = |tile: &Tile| {
            let (first, last) = span(tile);
            (last + 1 - first) * tile.tokens
        };
        self.tiles.sort_unstable_by_key(|tile| std::cmp::Reverse(cost(tile)));
        let all: usize = self.tiles.iter().map(cost).sum::<usize>() * shape.kv_heads;
        let mut partials = 0;
        for &tile in &self.tiles {
            let (first, last) = span(&tile);
            let ranges = first / RANGE..last / RANGE + 1;
            let floats = ranges.len() * Partial::floats(tile.tokens * group, shape.head_dim);
            for kv_head in 0..shape.kv_heads {
                let long = cost(&tile) * SHARES * threads > all;
                if threads == 1 || ranges.len() == 1 || !long || floats > MOST_PARTIALS - partials {
                    self.pieces.push(Piece { tile, kv_head, part: None });
                    continue;
                }
                let cut = self.cuts.len();
                self.cuts.push(Cut { partials, left: AtomicUsize::new(ranges.len()) });
                partials += floats;
                let parts = ranges.clone().map(|range| Part { range, cut });
                self.pieces.extend(parts.map(|part| Piece { tile, kv_head, part: Some(part) }));
            }
        }
    }
}
