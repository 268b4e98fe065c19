//! Candidates of rows in a TP group: their buffers, and the rows that have candidates.

use std::ops::Range;

use tutti_kernels::{Device, DeviceError, MAX_NOMINATED, Nomination};

use crate::{DecoderDevice, model::WantedRows};

/// Numbers of candidates per row for which there are buffers. A tile takes the smallest number that holds all its
/// nominations, so that no more candidates are sent than necessary.
const CANDIDATES: [usize; 3] = [1, 32, MAX_NOMINATED as usize];

/// The nomination of a row that needs only its likeliest token, but whose tile has rows of another kind.
static LIKELIEST: Nomination = Nomination::LIKELIEST;

/// Buffers for candidates.
pub(super) struct Candidates<D: Device> {
    /// The largest logits of each row, `[rows, 2]`.
    pub peaks: D::Tensor,
    /// One exchange per entry of [`CANDIDATES`], ascending by the number of candidates per row.
    pub exchanges: [Exchange<D>; CANDIDATES.len()],
}

/// Buffers for rows of up to `count` candidates per rank.
pub(super) struct Exchange<D: Device> {
    count: usize,
    /// `[rows, 2 * count]`.
    pub own: D::Tensor,
    /// The ranks' candidates side by side, `[rows, ranks * 2 * count]`. `None` except on the leader.
    pub all: Option<D::Tensor>,
}

impl<D: DecoderDevice> Candidates<D> {
    /// Allocates buffers for `rows` rows of a rank's share of `vocabulary` tokens.
    pub fn allocate(rows: usize, vocabulary: usize, device: &mut D) -> Result<Self, DeviceError> {
        let group_rank = device.group_rank();
        let exchange = |count: usize, device: &mut D| {
            let count = count.min(vocabulary).max(1);
            let all = 2 * count * group_rank.world_size;
            Ok::<_, DeviceError>(Exchange {
                count,
                own: device.tensor(rows, 2 * count)?,
                all: group_rank.is_leader().then(|| device.tensor(rows, all)).transpose()?,
            })
        };
        let [one, some, most] = CANDIDATES;
        let exchanges = [exchange(one, device)?, exchange(some, device)?, exchange(most, device)?];
        Ok(Self { peaks: device.tensor(rows, 2)?, exchanges })
    }

    /// Returns the index of the exchange for rows that nominate `count` tokens.
    pub fn exchange_for(&self, count: usize) -> usize {
        let last = self.exchanges.len() - 1;
        self.exchanges.iter().position(|exchange| exchange.count >= count).unwrap_or(last)
    }
}

/// Rows of a tile, divided into rows of which candidates are gathered and rows that are gathered whole. Indices count
/// from the tile's first row.
#[derive(Default)]
pub(super) struct GatheredBy<'a> {
    pub nominated: Vec<(usize, &'a Nomination)>,
    pub whole: Vec<usize>,
    /// Index of the exchange that has the candidates of `nominated`.
    pub exchange: usize,
}

/// Divides the wanted rows of a tile into rows of which candidates are gathered and rows that are gathered whole.
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
