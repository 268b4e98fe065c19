//! Work lists of attention on tensor cores. They determine which queries form a tile, and which tiles have their splits
//! (ranges of keys) computed in parallel. `sources/attention_tiles.cu` describes tiles and splits.
//!
//! The lists affect the time of a step, but no bit of its results.

use super::memory::DevicePointer;
use super::records::{Item, Record, Row};

/// Keys per split: `SPLIT` in `sources/attention_tiles.cu`.
const SPLIT: u32 = 256;
/// Number of queries that one warp computes. A narrow tile has one warp.
const NARROW: u32 = 16;
/// Number of queries of a wide tile.
const WIDE: u32 = 64;
/// Marks an item that computes all splits of its tile: `ALL_SPLITS` in `sources/attention_tiles.cu`.
const ALL_SPLITS: u32 = u32::MAX;
/// Number of thread blocks of narrow tiles that fill a large GPU: four for each of about 130 multiprocessors.
const NARROW_BLOCKS: usize = 512;
/// Number of thread blocks of wide tiles that fill a large GPU: two per multiprocessor.
const WIDE_BLOCKS: usize = 256;

/// A tile of consecutive queries of one row.
#[derive(Clone, Copy, Debug)]
struct Tile {
    row: u32,
    first: u32,
    queries: u32,
    /// Number of splits (ranges of keys) up to the last query's position.
    splits: u32,
}

/// The sizes that determine the work lists, together with the step's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkShape {
    /// Query heads per kv head.
    pub(super) group: usize,
    /// Number of kv heads. Each item runs as one thread block per kv head.
    pub(super) kv_heads: usize,
    /// Maximum number of partial results per kv head: one per query and split of each divided tile.
    pub(super) parts: usize,
}

/// The work lists of a step for one number of query heads per kv head.
#[derive(Debug)]
pub(super) struct AttentionWork {
    pub(super) shape: WorkShape,
    pub(super) narrow: Vec<Item>,
    pub(super) wide: Vec<Item>,
    /// Tiles whose splits are separate items. The partial results of these splits are merged afterwards.
    pub(super) merges: Vec<Item>,
    /// Number of partial results per kv head.
    pub(super) parts: usize,
    /// Address of the three lists on the device, one after another: narrow, wide, merges.
    pub(super) at: DevicePointer<Item>,
}

impl AttentionWork {
    pub(super) fn new(shape: WorkShape) -> Self {
        Self {
            shape,
            narrow: Vec::new(),
            wide: Vec::new(),
            merges: Vec::new(),
            parts: 0,
            at: DevicePointer::NULL,
        }
    }

    /// Builds the lists for a step of `tokens` tokens. `rows` holds the words of the [`Row`] records.
    pub(super) fn build(&mut self, rows: &[u32], tokens: usize) {
        self.narrow.clear();
        self.wide.clear();
        self.merges.clear();
        self.parts = 0;
        let group = self.shape.group as u32;
        let (mut narrow, mut wide) = (0, 0);
        for tile in tiles(rows, tokens, group) {
            *(if tile.queries <= NARROW { &mut narrow } else { &mut wide }) += tile.splits as usize;
        }
        // The average number of splits (ranges of keys) per thread block. A tile with more splits is divided, because
        // it would run longer than other tiles.
        let share = |splits: usize, blocks: usize| (splits * self.shape.kv_heads).div_ceil(blocks).max(1);
        let (narrow, wide) = (share(narrow, NARROW_BLOCKS), share(wide, WIDE_BLOCKS));
        for tile in tiles(rows, tokens, group) {
            let (list, share) = match tile.queries <= NARROW {
                true => (&mut self.narrow, narrow),
                false => (&mut self.wide, wide),
            };
            let Tile { row, first, queries, splits } = tile;
            let parts = self.parts + (queries * splits) as usize;
            let whole = Item { row, first, queries, split: ALL_SPLITS, part: self.parts as u32 };
            if splits as usize <= share || parts > self.shape.parts {
                list.push(whole);
                continue;
            }
            list.extend((0..splits).map(|split| Item { split, part: whole.part + split * queries, ..whole }));
            self.merges.push(whole);
            self.parts = parts;
        }
    }

    /// Appends the words of the three lists to `words`.
    pub(super) fn write(&self, words: &mut Vec<u32>) {
        for item in self.narrow.iter().chain(&self.wide).chain(&self.merges) {
            words.extend_from_slice(item.words());
        }
    }

    /// Number of words that [`write`](Self::write) appends.
    pub(super) fn words(&self) -> usize {
        (self.narrow.len() + self.wide.len() + self.merges.len()) * Item::WORDS
    }
}

/// Returns the tiles of all rows, row by row. Within a row, the tiles with the most keys come first, so that the
/// longest start first.
fn tiles(rows: &[u32], tokens: usize, group: u32) -> impl Iterator<Item = Tile> {
    let (rows, _) = rows.as_chunks::<{ Row::WORDS }>();
    let ends = rows[1.min(rows.len())..].iter().map(|row| row[0]).chain([tokens as u32]);
    (0..).zip(rows).zip(ends).flat_map(move |((row, &[first_token, start, ..]), end)| {
        let all = (end - first_token) * group;
        (0..all.div_ceil(WIDE)).rev().map(move |index| {
            let first = index * WIDE;
            let queries = (all - first).min(WIDE);
            let last_position = start + (first + queries - 1) / group;
            Tile { row, first, queries, splits: last_position / SPLIT + 1 }
        })
    })
}

#[cfg(test)]
mod tests;
