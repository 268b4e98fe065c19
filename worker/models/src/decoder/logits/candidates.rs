//! Candidate tokens in a TP group: their buffers, and the rows that have candidates.

use std::ops::Range;

use tutti_kernels::{Device, DeviceError, MAX_NOMINATED, Nomination};

use crate::{DecoderDevice, model::WantedRows};

/// Numbers of candidates per row and rank for which there are buffers. A tile uses the smallest number that is enough
/// for all its nominations, so that the ranks send few bytes.
const CANDIDATES: [usize; 3] = [1, 32, MAX_NOMINATED as usize];

/// The nomination of a row that needs only its likeliest token, in a tile that also has other rows.
static LIKELIEST: Nomination = Nomination::LIKELIEST;

/// Buffers for the candidates of a tile.
pub(super) struct Candidates<D: Device> {
    /// Maximum logits of each row before and after bias and penalties, `[rows, 2]`.
    pub peaks: D::Tensor,
    /// One exchange per entry of [`CANDIDATES`], ascending by the number of candidates per row.
    pub exchanges: [Exchange<D>; CANDIDATES.len()],
}

/// Buffers for rows with up to `count` candidates per rank. A candidate takes two numbers.
pub(super) struct Exchange<D: Device> {
    count: usize,
    /// True in a group of one rank.
    alone: bool,
    /// This rank's candidates, `[rows, 2 * count]`.
    pub own: D::Tensor,
    /// The ranks' candidates side by side, `[rows, ranks * 2 * count]`. `None` except on the leader of a TP group.
    pub all: Option<D::Tensor>,
}

impl<D: Device> Exchange<D> {
    /// The candidates of all ranks; `None` on a follower. The own candidates are all candidates of a group of one rank.
    pub fn of_all_ranks(&self) -> Option<&D::Tensor> {
        self.all.as_ref().or(self.alone.then_some(&self.own))
    }
}

impl<D: DecoderDevice> Candidates<D> {
    /// Allocates buffers for `rows` rows. `vocabulary` is the number of tokens in this rank's share.
    pub fn allocate(rows: usize, vocabulary: usize, device: &mut D) -> Result<Self, DeviceError> {
        let group_rank = device.group_rank();
        let exchange = |count: usize, device: &mut D| {
            let count = count.min(vocabulary).max(1);
            let all = 2 * count * group_rank.world_size;
            Ok::<_, DeviceError>(Exchange {
                count,
                alone: group_rank.is_alone(),
                own: device.tensor(rows, 2 * count)?,
                all: (group_rank.is_leader() && !group_rank.is_alone())
                    .then(|| device.tensor(rows, all))
                    .transpose()?,
            })
        };
        let [one, some, most] = CANDIDATES;
        let exchanges = [exchange(one, device)?, exchange(some, device)?, exchange(most, device)?];
        Ok(Self { peaks: device.tensor(rows, 2)?, exchanges })
    }

    /// Returns the index of the smallest exchange for `count` candidates per row.
    pub fn exchange_for(&self, count: usize) -> usize {
        let last = self.exchanges.len() - 1;
        self.exchanges.iter().position(|exchange| exchange.count >= count).unwrap_or(last)
    }
}

/// The rows of a tile that the leader gathers: only candidates of the `nominated` rows, and all logits of the `whole`
/// rows. Row indices count from the tile's first row.
#[derive(Default)]
pub(super) struct GatheredBy<'a> {
    pub nominated: Vec<(usize, &'a Nomination)>,
    pub whole: Vec<usize>,
    /// Index in [`Candidates::exchanges`] of the buffers for the `nominated` rows.
    pub exchange: usize,
}

/// Divides the wanted rows of a tile into rows whose candidates the leader gathers and rows that it gathers whole.
pub(super) fn gathered_by<'a>(
    wanted: &'a WantedRows,
    tile: &Range<usize>,
    candidates: bool,
) -> GatheredBy<'a> {
    let mut by = GatheredBy::default();
    for row in wanted.rows.iter().filter(|row| tile.contains(row)) {
        let nomination = match wanted.nominated.binary_search_by_key(row, |(other, _)| *other) {
            Ok(at) => Some(&wanted.nominated[at].1),
            Err(_) => wanted.likeliest.binary_search(row).is_ok().then_some(&LIKELIEST),
        };
        let index = row - tile.start;
        match nomination.filter(|_| candidates) {
            Some(nomination) => by.nominated.push((index, nomination)),
            None => by.whole.push(index),
        }
    }
    by
}
