//! The LM head and sampling. Logits are computed for one tile of rows at a time, so that their memory does not grow
//! with the prompt.
//!
//! In a TP group each rank computes the logits of its share of the vocabulary. For rows that need only their likeliest
//! token, every rank finds its best token, and the leader compares one candidate per rank. The largest logit wins.
//! Among equal logits the lowest token id wins, as in a group of one rank.
//!
//! In a group of one rank, a row that follows a constraint and needs only the likeliest token that its mask allows is
//! such a row, too, where the device [masks the arg max](tutti_kernels::DeviceLimits::masks_argmax).
//!
//! Some devices sample in this way in a group of one rank, too, if the row has neither bias nor penalties.
//!
//! A row with a `top_k` of at most 256 or without temperature may have a [`Nomination`](tutti_kernels::Nomination),
//! because its token depends only on the best tokens. Each rank applies bias, forbidden tokens and penalties to its own
//! logits of these rows. The ranks compare their largest logits, and each rank sends the requested number of its best
//! tokens. The leader samples from these tokens, with the same result as from the whole row ([`candidates`]).
//!
//! The leader gathers whole rows of logits for all other rows, and for rows with logprobs. A log-sum-exp adds chunks of
//! the vocabulary in a fixed order. The ranks' shares end inside chunks, so sums per rank would give other bits.

mod candidates;

use std::ops::Range;

use tutti_kernels::{
    Argmax, Device, DeviceError, GatheredRows, Linear, SampleRow, ScoreRow, TokenMask, collective::GroupRank,
};

use self::candidates::{Candidates, Exchange, GatheredBy, gathered_by};
use super::ends::Ends;
use crate::{
    DecoderDevice,
    model::{LogitRequests, WantedRows},
    weights::share,
};

/// Maximum bytes of one tile's logits, unless [`BLOCK`] rows take more. A step whose logits all fit has one tile.
const TILE_BYTES: usize = 40 << 20;
/// Number of rows per block. If one row of a block needs more than its likeliest token, each rank stores the logits of
/// all rows of the block. With smaller blocks, a step would read the LM head more often.
const BLOCK: usize = 32;
/// The largest vocabulary whose token ids are exact as f32. The ranks send candidates as f32.
const MAX_CANDIDATES: usize = 1 << 24;
/// The buffers of one tile. In the shapes below, `vocabulary` is the size of this rank's share.
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
    /// `None` if the vocabulary is larger than [`MAX_CANDIDATES`], and in a group of one rank unless its device
    /// [nominates alone](tutti_kernels::DeviceLimits::nominates_alone).
    candidates: Option<Candidates<D>>,
    /// Logits of all ranks side by side, `[rows, ranks * vocabulary]`. `None` except on the leader of a TP group.
    gathered: Option<D::Tensor>,
    tiles: Vec<Tile>,
}

/// Consecutive logit rows that are computed together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tile {
    rows: Range<usize>,
    /// True if each row needs its likeliest token and nothing else.
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
        let candidates = (ranks > 1 || device.limits().nominates_alone) && vocabulary <= MAX_CANDIDATES;
        let gathers = group_rank.is_leader() && ranks > 1;
        Ok(Self {
            group_rank,
            first: own.start,
            rows,
            hidden: device.tensor(rows, hidden)?,
            logits: device.tensor(rows, own.len())?,
            candidates: candidates.then(|| Candidates::allocate(rows, own.len(), device)).transpose()?,
            gathered: gathers.then(|| device.tensor(rows, own.len() * ranks)).transpose()?,
            tiles: Vec::new(),
        })
    }

    /// Enqueues the logits that `wanted` needs, and the sampling and the scores. `states` holds the hidden states of
    /// the step's `logit_rows` logit rows.
    pub fn lead(
        &mut self,
        device: &mut D,
        ends: &Ends<D>,
        states: &D::Tensor,
        logit_rows: usize,
        wanted: &LogitRequests<'_>,
    ) -> Result<(), DeviceError> {
        let nominates = self.candidates.is_some() || !self.group_rank.is_alone();
        let mut rows = match nominates {
            true => wanted.rows_of_group(),
            false => wanted.rows(device.limits().masks_argmax),
        };
        if self.group_rank.is_alone() {
            // A nomination cannot count the token of a step in flight. Groups have one step in flight.
            rows.nominated.retain(|(_, nomination)| nomination.adjustments.is_none());
        }
        let tiles = self.tiles_of(&rows, logit_rows)?;
        let LogitRequests { mut sample, mut score } = *wanted;
        for tile in &tiles {
            let (now, then);
            (now, sample) = sample.split_at(sample.partition_point(|(row, _)| *row < tile.rows.end));
            (then, score) = score.split_at(score.partition_point(|(row, _)| *row < tile.rows.end));
            let gathered = self.compute(device, ends, states, (&rows, now), tile)?;
            if !tile.likeliest {
                let (now, then) = (rebase(now, tile.rows.start), rebase(then, tile.rows.start));
                self.answer(device, &gathered, &now, &then)?;
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
            self.compute(device, ends, states, (wanted, &[]), tile)?;
        }
        self.tiles = tiles;
        Ok(())
    }

    /// Divides the wanted rows into tiles. Takes the list out of `self.tiles`. The caller puts the list back, so that
    /// its memory is reused.
    fn tiles_of(&mut self, wanted: &WantedRows, logit_rows: usize) -> Result<Vec<Tile>, DeviceError> {
        if let Some(row) = wanted.rows.last().filter(|&&row| row >= logit_rows) {
            return Err(DeviceError::Misuse(format!("logit row {row} of a step that has {logit_rows}")));
        }
        let mut tiles = std::mem::take(&mut self.tiles);
        tiles.clear();
        let candidates = self.group_rank.is_alone() || self.candidates.is_some();
        divide(wanted, self.rows, candidates, &mut tiles);
        Ok(tiles)
    }

    /// Computes the final norm and the LM head of a tile. In a tile of likeliest tokens, also samples all rows. In any
    /// other tile, sends the leader the candidates or the whole logits of each row. `sample` has the tile's requests,
    /// and nothing on a follower.
    fn compute<'a>(
        &mut self,
        device: &mut D,
        ends: &Ends<D>,
        states: &D::Tensor,
        (wanted, sample): (&'a WantedRows, &[(usize, SampleRow<'_>)]),
        tile: &Tile,
    ) -> Result<GatheredBy<'a>, DeviceError> {
        let Self { hidden: x, logits, candidates, gathered, first, .. } = self;
        device.copy_rows(states, tile.rows.clone(), x)?;
        let (norm, weight) = (Some(ends.final_norm()), ends.lm_head());
        if tile.likeliest {
            let allowed = masks_of(sample);
            let argmax = Argmax { x, norm, weight, logits, allowed: &allowed };
            match candidates {
                Some(Candidates { exchanges: [Exchange { own, all, .. }, ..], .. })
                    if !self.group_rank.is_alone() =>
                {
                    device.partial_argmax(argmax, *first, own)?;
                    device.gather_columns(own, all.as_mut())?;
                    all.as_ref().map_or(Ok(()), |all| device.best_candidates(all))?;
                }
                _ => device.argmax(argmax)?,
            }
            return Ok(GatheredBy::default());
        }
        device.linear(Linear { x, norm, weight, bias: None }, logits)?;
        if self.group_rank.is_alone() && candidates.is_none() {
            return Ok(GatheredBy::default());
        }
        let mut by = gathered_by(wanted, &tile.rows, candidates.is_some());
        let most = by.nominated.iter().map(|(_, nomination)| nomination.count as usize).max();
        if let (Some(most), Some(candidates)) = (most, candidates) {
            by.exchange = candidates.exchange_for(most);
            let Candidates { peaks, exchanges } = candidates;
            let Exchange { own, all, .. } = &mut exchanges[by.exchange];
            device.adjust(logits, &by.nominated, *first, peaks)?;
            device.all_reduce_max(peaks)?;
            device.nominate(logits, &by.nominated, *first, peaks, own)?;
            if !self.group_rank.is_alone() {
                device.gather_columns(own, all.as_mut())?;
            }
        }
        if !by.whole.is_empty() && !self.group_rank.is_alone() {
            device.gather_rows(logits, &by.whole, gathered.as_mut())?;
        }
        Ok(by)
    }

    /// Enqueues sampling and scoring of rows of a tile. Row indices count from the tile's first row.
    fn answer(
        &self,
        device: &mut D,
        by: &GatheredBy<'_>,
        sample: &[(usize, SampleRow<'_>)],
        score: &[(usize, ScoreRow)],
    ) -> Result<(), DeviceError> {
        let logits = self.gathered.as_ref().unwrap_or(&self.logits);
        let all = self.candidates.as_ref().filter(|_| !by.nominated.is_empty());
        let all = all.and_then(|all| Some((&all.peaks, all.exchanges[by.exchange].of_all_ranks()?)));
        if let Some((peaks, candidates)) = all {
            let nominated: Vec<usize> = by.nominated.iter().map(|(row, _)| *row).collect();
            let gathered = GatheredRows { logits, candidates, peaks, nominated: &nominated };
            device.sample_gathered(gathered, sample)?;
        } else if !sample.is_empty() {
            device.sample(logits, sample)?;
        }
        if !score.is_empty() {
            device.score(logits, score)?;
        }
        Ok(())
    }
}

/// Divides the wanted rows into tiles of at most `capacity` rows, in order, so that each wanted row is in exactly one
/// tile. The wanted rows of `BLOCK` consecutive rows form a block. Consecutive blocks share a tile if they fit, and
/// if all or none of them only need their rows' likeliest tokens.
fn divide(wanted: &WantedRows, capacity: usize, candidates: bool, tiles: &mut Vec<Tile>) {
    let WantedRows { rows, likeliest, .. } = wanted;
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
                    // A tile may compute logits of rows without a request. A tile of likeliest tokens must not contain
                    // such rows, because all its rows are sampled.
                    && (!tile.likeliest || last.rows.end == first) =>
            {
                last.rows.end = end;
            }
            _ => tiles.push(tile),
        }
    }
}

/// Returns the masks of requests for consecutive rows. Returns nothing, and allocates nothing, if no row has one.
fn masks_of<'a>(sample: &[(usize, SampleRow<'a>)]) -> Vec<Option<&'a TokenMask>> {
    match sample.iter().any(|(_, row)| row.allowed.is_some()) {
        true => sample.iter().map(|(_, row)| row.allowed).collect(),
        false => Vec::new(),
    }
}

/// Returns the requests `rows` with each row index counted from `start`, the tile's first row.
fn rebase<T: Copy>(rows: &[(usize, T)], start: usize) -> Vec<(usize, T)> {
    rows.iter().map(|&(row, request)| (row - start, request)).collect()
}

#[cfg(test)]
mod tests;
