//! KV pages as bytes on the wire, independent of the number of ranks in a group.
//!
//! On the wire a page has the same bytes as in a group of one rank. The leader of a larger group joins the ranks'
//! shares before it sends a page, and each rank cuts its share from a page that arrives. The sending and the receiving
//! group may thus differ in size.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
};

use tutti_kernels::collective::GroupRank;

use crate::weights::share;

/// The layout of a page on the wire: sections (layers) in order, each with all its units (KV heads) in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PageLayout {
    /// Number of equally large sections per page.
    pub sections: usize,
    /// Number of units per section. The ranks of a group divide the units among themselves.
    pub units: usize,
    /// Bytes per unit of one section.
    pub unit_bytes: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Name of the format of a unit's bytes.
    pub format: String,
}

impl PageLayout {
    /// Bytes per page.
    pub fn page_bytes(&self) -> usize {
        self.sections * self.units * self.unit_bytes
    }

    /// Returns a hash of the layout. Two workers compare their hashes before either uses the other's bytes. Equal
    /// layouts have equal hashes in all processes of one build.
    pub fn id(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the range of units that a rank holds of every section. With more ranks than units, neighbouring ranks
    /// hold the same unit.
    pub(crate) fn units_of(&self, group_rank: GroupRank) -> Range<usize> {
        share(self.units, group_rank)
    }

    /// Cuts a rank's `units` from whole `pages`: one slice per section.
    pub(crate) fn cut<'a>(&self, pages: &'a [u8], units: Range<usize>) -> impl Iterator<Item = &'a [u8]> {
        let bytes = units.start * self.unit_bytes..units.end * self.unit_bytes;
        pages.chunks_exact(self.units * self.unit_bytes).map(move |section| &section[bytes.clone()])
    }

    /// Joins the ranks' shares of the same pages into whole pages, and appends these to `out`. `shares` holds the
    /// shares end to end, in order of rank.
    pub(crate) fn join(&self, shares: &[u8], ranks: usize, out: &mut Vec<u8>) {
        let section_bytes = self.units * self.unit_bytes;
        let extent_of = |rank| {
            let units = self.units_of(GroupRank { rank, world_size: ranks });
            (units.start * self.unit_bytes, units.len() * self.unit_bytes)
        };
        let (_, share_bytes) = extent_of(0);
        let sections = shares.len() / (ranks * share_bytes).max(1);
        let first = out.len();
        out.resize(first + sections * section_bytes, 0);
        for rank in 0..ranks {
            let (at, bytes) = extent_of(rank);
            let from = shares[rank * sections * bytes..].chunks_exact(bytes);
            for (section, share) in out[first..].chunks_exact_mut(section_bytes).zip(from) {
                section[at..at + bytes].copy_from_slice(share);
            }
        }
    }
}

#[cfg(test)]
mod tests;
