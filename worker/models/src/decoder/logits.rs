//! The LM head and sampling: logits one tile of rows at a time, so that their memory does not grow with the prompt.
//!
//! In a TP group each rank computes the logits of its share of the vocabulary. For rows that need only the likeliest
//! token, every rank finds its best token and the leader compares one candidate per rank: the largest logit wins, and
//! among equal ones the lowest token id, as over a whole row. All other rows are gathered whole at the leader: sums over
//! the vocabulary (logprobs, draws) have an order of their own, which candidates would not keep, and penalties, biases
//! and forbidden tokens change logits that are not among the best.

use std::ops::Range;

use tutti_kernels::{Argmax, Device, DeviceError, Linear, SampleRow, ScoreRow, collective::GroupRank};

use super::ends::Ends;
use crate::{
    DecoderDevice,
    model::{LogitRequests, WantedRows},
    weights::share,
};

/// Upper bound of the bytes of one tile's logits, unless [`BLOCK`] rows take more. All rows of a step whose logits fit
/// are one tile.
const TILE_BYTES: usize = 40 << 20;
/// Number of rows that are computed alike: one row among them that needs its whole logits makes all need them. Smaller
/// blocks would read the LM head more often.
const BLOCK: usize = 32;
/// The largest vocabulary whose token ids are exact as f32, the type in which candidates are gathered.
const MAX_CANDIDATES: usize = 1 << 24;

/// The buffers of one tile. `vocabulary` is this rank's share.
pub(super) struct Head<D: Device> {
    group_rank: GroupRank,
    /// Token id of the first row of this rank's share of the LM head.
    first: usize,
    /// Number of rows of the largest tile, the same on all ranks.
    rows: usize,
    /// Hidden states, `[rows, hidden]`.
    hidden: D::Tensor,
    /// Logits, `[rows, vocabulary]`.
    logits: D::Tensor,
    /// `None` in a group of one rank, or if token ids are not exact as f32.
    best: Option<D::Tensor>,
    /// `None` except on the leader of a TP group.
    gathered: Option<Gathered<D>>,
    tiles: Vec<Tile>,
}

/// Buffers of the leader for the values of all ranks.
struct Gathered<D: Device> {
    /// Logits side by side, `[rows, ranks * vocabulary]`.
    logits: D::Tensor,
    /// The ranks' candidates side by side, `[rows, ranks * 2]`.
    best: Option<D::Tensor>,
}

/// Consecutive logit rows that are computed at once.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tile {
    rows: Range<usize>,
    /// True if each of the rows needs exactly its likeliest token.
    likeliest: bool,
}

impl<D: DecoderDevice> Head<D> {
    /// Allocates buffers for the LM head of a vocabulary and for steps of at most `max_step_tokens` tokens.
    pub fn allocate(
        vocabulary: usize,
        hidden: usize,
        max_step_tokens: usize,
        device: &mut D,
    ) -> Result<Self, DeviceError> {
        let group_rank = device.group_rank();
        let (own, ranks) = (share(vocabulary, group_rank), group_rank.world_size);
        let fitting = TILE_BYTES / (vocabulary * size_of::<f32>()).max(1);
        let rows = fitting.max(BLOCK).min(max_step_tokens.max(1));
        let candidates = ranks > 1 && vocabulary <= MAX_CANDIDATES;
        let best = |device: &mut D, width| candidates.then(|| device.tensor(rows, width)).transpose();
        let gathers = group_rank.is_leader() && ranks > 1;
        Ok(Self {
            group_rank,
            first: own.start,
            rows,
            hidden: device.tensor(rows, hidden)?,
            logits: device.tensor(rows, own.len())?,
            best: best(device, 2)?,
            gathered: match gathers {
                true => Some(Gathered {
                    logits: device.tensor(rows, own.len() * ranks)?,
                    best: best(device, 2 * ranks)?,
                }),
                false => None,
            },
            tiles: Vec::new(),
        })
    }

    /// Enqueues the logits that `wanted` needs and answers the requests. `states` holds the step's `logit_rows` hidden
    /// states.
    pub fn lead(
        &mut self,
        device: &mut D,
        ends: &Ends<D>,
        states: &D::Tensor,
        logit_rows: usize,
        wanted: &LogitRequests<'_>,
    ) -> Result<(), DeviceError> {
        let tiles = self.tiles_of(&wanted.rows(), logit_rows)?;
        let LogitRequests { mut sample, mut score } = *wanted;
        for tile in &tiles {
            let (now, then);
            (now, sample) = sample.split_at(sample.partition_point(|(row, _)| *row < tile.rows.end));
            (then, score) = score.split_at(score.partition_point(|(row, _)| *row < tile.rows.end));
            self.compute(device, ends, states, tile)?;
            if !tile.likeliest {
                self.answer(device, &rebase(now, tile.rows.start), &rebase(then, tile.rows.start))?;
            }
        }
        self.tiles = tiles;
        Ok(())
    }

    /// Enqueues this rank's share of the logits that the leader's requests need.
    pub fn follow(
        &mut self,
        device: &mut D,
        ends: &Ends<D>,
        states: &D::Tensor,
        logit_rows: usize,
        wanted: &WantedRows,
    ) -> Result<(), DeviceError> {
        let tiles = self.tiles_of(wanted, logit_rows)?;
        for tile in &tiles {
            self.compute(device, ends, states, tile)?;
        }
        self.tiles = tiles;
        Ok(())
    }

    /// Divides the wanted rows into tiles, in a list that the caller gives back.
    fn tiles_of(&mut self, wanted: &WantedRows, logit_rows: usize) -> Result<Vec<Tile>, DeviceError> {
        if let Some(row) = wanted.rows.last().filter(|&&row| row >= logit_rows) {
            return Err(DeviceError::Misuse(format!("logit row {row} of a step that has {logit_rows}")));
        }
        let mut tiles = std::mem::take(&mut self.tiles);
        tiles.clear();
        let candidates = self.group_rank.is_alone() || self.best.is_some();
        divide(wanted, self.rows, candidates, &mut tiles);
        Ok(tiles)
    }

    /// Computes the final norm and the LM head of a tile: to logits at the leader or, for rows that need only their
    /// likeliest token, to samples.
    fn compute(
        &mut self,
        device: &mut D,
        ends: &Ends<D>,
        states: &D::Tensor,
        tile: &Tile,
    ) -> Result<(), DeviceError> {
        let Self { hidden: x, logits, best, gathered, .. } = self;
        device.copy_rows(states, tile.rows.clone(), x)?;
        let (norm, weight) = (Some(ends.final_norm()), ends.lm_head());
        if tile.likeliest {
            let argmax = Argmax { x, norm, weight, logits };
            let Some(best) = best else { return device.argmax(argmax) };
            device.partial_argmax(argmax, self.first, best)?;
            let all = gathered.as_mut().and_then(|gathered| gathered.best.as_mut());
            device.gather_columns(best, all)?;
            return match gathered.as_ref().and_then(|gathered| gathered.best.as_ref()) {
                Some(all) => device.best_candidates(all),
                None => Ok(()),
            };
        }
        device.linear(Linear { x, norm, weight, bias: None }, logits)?;
        if self.group_rank.is_alone() {
            return Ok(());
        }
        device.gather_columns(logits, gathered.as_mut().map(|gathered| &mut gathered.logits))
    }

    /// Samples and scores rows of a tile. Row indices count from the tile's first row.
    fn answer(
        &self,
        device: &mut D,
        sample: &[(usize, SampleRow<'_>)],
        score: &[(usize, ScoreRow)],
    ) -> Result<(), DeviceError> {
        let logits = self.gathered.as_ref().map_or(&self.logits, |gathered| &gathered.logits);
        if !sample.is_empty() {
            device.sample(logits, sample)?;
        }
        if !score.is_empty() {
            device.score(logits, score)?;
        }
        Ok(())
    }
}

/// Divides wanted rows into tiles of at most `capacity` rows, in order, which cover every wanted row once. Rows of blocks
/// that are computed alike follow each other in one tile as far as they fit.
fn divide(wanted: &WantedRows, capacity: usize, candidates: bool, tiles: &mut Vec<Tile>) {
    let WantedRows { rows, likeliest } = wanted;
    let (mut rows, mut likeliest) = (&rows[..], &likeliest[..]);
    while let Some(&first) = rows.first() {
        let block;
        (block, rows) = rows.split_at(rows.partition_point(|row| *row < first + BLOCK.min(capacity)));
        let best;
        (best, likeliest) =
            likeliest.split_at(likeliest.partition_point(|row| *row < first + BLOCK.min(capacity)));
        let end = block.last().map_or(first, |last| last + 1);
        let tile = Tile { rows: first..end, likeliest: candidates && best.len() == end - first };
        match tiles.last_mut() {
            Some(last)
                if last.likeliest == tile.likeliest
                    && end - last.rows.start <= capacity
                    // Rows without a request may be computed for nothing, but not sampled.
                    && (!tile.likeliest || last.rows.end == first) =>
            {
                last.rows.end = end;
            }
            _ => tiles.push(tile),
        }
    }
}

/// Returns the requests `rows` with each row index counted from `start`, the tile's first row.
fn rebase<T: Copy>(rows: &[(usize, T)], start: usize) -> Vec<(usize, T)> {
    rows.iter().map(|&(row, request)| (row - start, request)).collect()
}

#[cfg(test)]
mod tests;
