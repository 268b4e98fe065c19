//! How tensors are divided among the ranks of a TP group.

use std::{borrow::Cow, ops::Range};

use tutti_kernels::{HostMatrix, WeightType, collective::GroupRank};

/// The rule for one tensor. A family declares one for each, beside its name and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Every rank holds all of it.
    Replicated,
    /// By outputs, in this many equal units (heads, or single outputs) that stay whole.
    Rows(usize),
    /// By inputs, likewise: what the ranks compute with it is summed.
    Columns(usize),
    /// Whole at rank 0 and nowhere else: a bias of a sum over ranks, which is to be added once.
    Leader,
}

/// What a rank holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardRange {
    /// Outputs; a vector's elements.
    pub rows: Range<usize>,
    /// Inputs; one, of a vector.
    pub columns: Range<usize>,
}

/// A rank's share of `units`. Where there are more ranks than units, neighbours hold the same one. The family has seen
/// to it that one number divides the other.
pub(crate) fn share(units: usize, group_rank: GroupRank) -> Range<usize> {
    let first = group_rank.rank * units / group_rank.world_size;
    first..first + (units / group_rank.world_size).max(1)
}

impl Cut {
    /// What a rank holds of a tensor of this shape.
    pub fn shard_range(self, rows: usize, columns: usize, group_rank: GroupRank) -> ShardRange {
        let within = |units: usize, length: usize| {
            let (share, unit) = (share(units, group_rank), length / units.max(1));
            share.start * unit..share.end * unit
        };
        match self {
            Self::Rows(units) => ShardRange { rows: within(units, rows), columns: 0..columns },
            Self::Columns(units) => ShardRange { rows: 0..rows, columns: within(units, columns) },
            Self::Leader if !group_rank.is_leader() => ShardRange { rows: 0..0, columns: 0..columns },
            Self::Replicated | Self::Leader => ShardRange { rows: 0..rows, columns: 0..columns },
        }
    }
}

impl ShardRange {
    /// How many elements it has; saturates where a config is absurd, and then no file matches.
    pub fn elements(&self) -> usize {
        self.rows.len().saturating_mul(self.columns.len())
    }

    /// Its bytes of a whole matrix: in place where they lie together, gathered where inputs are cut.
    pub fn slice<'a>(&self, whole: HostMatrix<'a>) -> Cow<'a, [u8]> {
        let Self { rows, columns } = self;
        let size = whole.dtype.bytes();
        let row_bytes = whole.columns * size;
        if columns.len() == whole.columns {
            return Cow::Borrowed(&whole.bytes[rows.start * row_bytes..rows.end * row_bytes]);
        }
        let mut bytes = Vec::with_capacity(self.elements() * size);
        for row in rows.clone() {
            let row = &whole.bytes[row * row_bytes..][..row_bytes];
            bytes.extend_from_slice(&row[columns.start * size..columns.end * size]);
        }
        Cow::Owned(bytes)
    }

    /// Its bytes as a matrix.
    pub fn view<'a>(&self, bytes: &'a [u8], dtype: WeightType) -> HostMatrix<'a> {
        HostMatrix { bytes, dtype, rows: self.rows.len(), columns: self.columns.len() }
    }

    /// Where its elements are in the whole tensor, whose rows are `width` long: runs of neighbours.
    pub fn runs(&self, width: usize) -> impl Iterator<Item = Range<usize>> {
        let Self { rows, columns } = self.clone();
        let (count, step) = match (rows.len(), columns.len()) {
            (0, _) | (_, 0) => (0, 1),
            (rows, columns) if columns == width => (1, rows),
            (rows, _) => (rows, 1),
        };
        (0..count).map(move |run| {
            let first = rows.start + run;
            first * width + columns.start..(first + step - 1) * width + columns.end
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group_rank(rank: usize, size: usize) -> GroupRank {
        GroupRank { rank, world_size: size }
    }

    #[test]
    fn shares_cover_everything_once_or_are_shared_alike() {
        let shares =
            |units, size| (0..size).map(|rank| share(units, group_rank(rank, size))).collect::<Vec<_>>();
        assert_eq!(shares(6, 2), [0..3, 3..6]);
        assert_eq!(shares(2, 4), [0..1, 0..1, 1..2, 1..2]);
        assert_eq!(shares(1, 1), [0..1; 1]);
    }

    #[test]
    fn the_bytes_and_the_runs_of_a_shard_are_the_same_elements() {
        // Four rows of six elements of two bytes, each the element's own number.
        let bytes: Vec<u8> = (0..24u16).flat_map(u16::to_le_bytes).collect();
        let whole = HostMatrix { bytes: &bytes, dtype: WeightType::F16, rows: 4, columns: 6 };
        for (cut, rank, expected) in [
            (Cut::Rows(4), 1, (12..24).collect::<Vec<u16>>()),
            (Cut::Columns(3), 0, vec![0, 1, 6, 7, 12, 13, 18, 19]),
            (Cut::Columns(6), 1, vec![3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]),
            (Cut::Replicated, 1, (0..24).collect()),
            (Cut::Leader, 1, vec![]),
        ] {
            // Three units among three ranks; else two ranks.
            let range = cut.shard_range(4, 6, group_rank(rank, if cut == Cut::Columns(3) { 3 } else { 2 }));
            let found = range.slice(whole);
            let found: Vec<u16> = found.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            assert_eq!(found, expected, "{cut:?}");
            let runs: Vec<u16> = range.runs(6).flatten().map(|element| element as u16).collect();
            assert_eq!(runs, if range.rows.is_empty() { vec![] } else { expected }, "{cut:?}");
            assert_eq!(range.elements(), found.len());
        }
    }
}
